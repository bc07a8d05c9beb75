"""New priorities of the transitions of a minibatch."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32, njit, u64
from lowgpu_kernels.dims import F32, FLAG, I32, U64, B, Float, L, W
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.replay_write import spec_sums
from lowgpu_kernels.ops.replay.tree import (
    FAN,
    LARGEST,
    UNIT,
    leaves_of,
    priority_of,
    sums_of,
    units_of,
    widths_of,
)

THREADS = 64  # few rows a block, so that a small batch spreads over the SMs. Untuned.


@op(
    # exp(alpha log x): |alpha log x| reaches 80 before a leaf is one unit; then rounding to units.
    error=lambda **_: 96,
    changes=("priority", "sums", "highest"),
    sizes=lambda params, sizes: _sizes(sizes),
    bench=("L=1048576 B=8192", "L=16777216 B=8192"),
)
def priority_update(
    index: I32[B],
    error: F32[B],
    priority: F32[L],
    sums: U64[W],
    highest: F32[1],
    *,
    alpha: Float(0, 1) = 0.6,
    eps: Float(1e-30, 1) = 1e-6,
    in_order: FLAG = False,
):
    """Set priorities by temporal-difference error; only what changed is touched.

        priority[index[b]] = (|error[b]| + eps)^alpha      as whole units of 2^-20, at least one
        sums               = those of the new leaves, exactly
        highest            = the largest of itself and the new leaves

    Of rows with the same index the last one counts. Every leaf's difference is added to the sum above
    it on each level, in units: in 64-bit integers, so in any order to the same bits, and never off.

    Leaves are below 4096. A priority past that, or of an error that is NaN, is the largest one:
    scale the rewards if errors reach 4096^(1 / alpha).

    Args:
        index: leaves, as `priority_sample` draws them; rows of index -1 are left out.
        error: temporal-difference error of each row, in the unit of the return; its sign is dropped.
        priority: leaves. Zero where there is no transition.
        sums: of the leaves, all levels; see ops/replay/tree.py.
        highest: largest priority so far, 1 before the first update: that of new transitions.
        alpha: how far priorities follow errors, in [0, 1]; 0 makes all the same.
        eps: added to the size of an error, in its unit, so that none of them is never drawn again.
        in_order: promise that index does not decrease, as `priority_sample` gives it: one launch
            instead of two.

    Changes: priority, sums, highest.

    Raises:
        TypeError: an array of another element type, or of a library whose arrays cannot be changed.
        ValueError: sizes that are not a tree's; a parameter out of range; on the CPU, an index out
            of range, or one that decreases where in_order says none does.

    Source: Schaul et al. 2016, section 3.3 (arXiv:1511.05952); integer sums ours.
    """
    for b, i in enumerate(index):
        if i >= 0:
            exact = (abs(error[b]) + eps) ** alpha if error[b] == error[b] else np.inf
            priority[i] = max(np.floor(min(exact, LARGEST) / UNIT), 1) * UNIT
    touched = priority[index[index >= 0]]
    highest[0] = max(highest[0], touched.max(initial=0))
    sums[:] = spec_sums(priority)


def _sizes(sizes):
    leaves = leaves_of(sizes.get(L, 1))
    return {L: leaves, W: sums_of(leaves)}


@priority_update.draws
def _draw(rng, sizes, params):
    leaves, rows = sizes[L], sizes[B]
    few = rng.integers(1, leaves + 1)  # of few leaves, many rows share one
    index = rng.integers(-1, few, size=rows)
    priority = rng.integers(2**22, size=leaves) * UNIT
    error = rng.normal(size=rows) * 10.0 ** rng.integers(-7, 6, size=rows)
    error[rng.random(rows) < 0.05] = 0
    return {
        "index": np.sort(index) if params["in_order"] else index,
        "error": error,
        "priority": priority,
        "sums": spec_sums(priority),
        "highest": [priority.max()],
    }


@priority_update.checks
def _check(index, priority, in_order, **_):
    wrong = np.flatnonzero((index < -1) | (index >= len(priority)))
    if len(wrong):
        b = wrong[0]
        raise ValueError(f"index[{b}] must be in [-1, {len(priority)}), got {index[b]}")
    falls = np.flatnonzero(np.diff(index) < 0)
    if in_order and len(falls):
        b = falls[0]
        raise ValueError(
            f"in_order was promised, got index[{b}]={index[b]} before {index[b + 1]}; leave it out"
        )


@priority_update.verifies
def _verify(got, inputs, params, eps):
    """Leaves within rounding of the spec's; their sums and the highest exactly what follows of them."""
    want = {n: a.astype("f8") for n, a in inputs.items() if a.dtype == "f4"}
    exact = {n: a.copy() for n, a in inputs.items() if n not in want}
    priority_update.spec(**want, **exact, **params)
    allowed = np.maximum(UNIT, 96 * eps * want["priority"]) * 1.001
    away = np.abs(got["priority"] - want["priority"])
    assert (away <= allowed).all(), f"leaf {np.argmax(away - allowed)}: off by {away.max()}"
    others = np.ones(len(away), bool)
    others[inputs["index"][inputs["index"] >= 0]] = False
    np.testing.assert_array_equal(got["priority"][others], inputs["priority"][others])
    np.testing.assert_array_equal(got["sums"], spec_sums(got["priority"].astype("f8")))
    touched = got["priority"][~others].max(initial=0)
    assert got["highest"][0] == max(inputs["highest"][0], touched)


@priority_update.on_cpu
def _cpu(index, error, priority, sums, highest, alpha, eps, in_order):
    _cpu_loop(index, error, priority, sums, highest, alpha, eps, widths_of(len(priority)))


@njit
def _cpu_loop(index, error, priority, sums, highest, alpha, eps, widths):
    last = np.zeros(len(priority), np.bool_)
    for b in range(len(index) - 1, -1, -1):
        i = index[b]
        if i < 0 or last[i]:
            continue
        last[i] = True
        fresh = priority_of(error[b], alpha, eps)
        # Unsigned, so a difference below zero wraps around and the sum wraps back.
        more = u64(units_of(fresh) - units_of(priority[i]))
        priority[i] = fresh
        highest[0] = max(highest[0], fresh)
        place, level = int(i), 0
        for width in widths:
            place //= FAN
            sums[level + place] += more
            level += width


@priority_update.on_cuda
def _launch(index, error, priority, sums, highest, alpha, eps, in_order, stream):
    leaves, rows = len(priority), len(index)
    macros = {"threads": THREADS, "levels": len(widths_of(leaves)), "in_order": in_order}
    sizes = i32(rows), i32(leaves // FAN)
    grid, early = blocks(rows, THREADS), launch.from_the_wait()
    if not in_order:
        claim = cuda_c("replay/priority_update", "claim_kernel", **macros)
        launch.launch(claim, grid, THREADS, (index, priority, sums, *sizes), stream, early=early)
    settle = cuda_c("replay/priority_update", "settle_kernel", **macros)
    args = index, error, priority, sums, highest, *sizes, alpha, eps
    launch.launch(settle, grid, THREADS, args, stream, early=early)
