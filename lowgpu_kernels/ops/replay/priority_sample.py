"""Draws in proportion to priority, from a tree of integer sums."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import f32, i32, njit, u64
from lowgpu_kernels.device.philox import SAMPLE, draw, numpy_draw
from lowgpu_kernels.dims import F32, I32, SEED, U64, B, D, Int, L, Outputs, W
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.replay_write import spec_sums
from lowgpu_kernels.ops.replay.tree import (
    FAN,
    TOP,
    UNIT,
    leaves_of,
    stride_of,
    sums_of,
    target_of,
    units_of,
    widths_of,
)

VECTOR = 16  # bytes a thread reads at a time
GROUP = 64  # rows a block draws, and one value of `least`. Untuned: 8192 rows are 128 blocks.
MEMBERS = 8  # lanes that search for a row together; as priority_search.cuh has it. Untuned.


@op(
    error=lambda **_: 0,  # integers, and leaves as they are
    changes=("clock",),
    sizes=lambda params, sizes: _sizes(params, sizes),
    bench=("L=1048576 batch=8192", "L=16777216 batch=8192"),
)
def priority_sample(
    priority: F32[L], sums: U64[W], clock: U64[2], *, batch: Int(1), seed: SEED = 0
) -> Outputs(index=I32[B], drawn=F32[B], least=F32[D]):
    """Transitions of a ring, each as likely as its priority says, with replacement.

        units    = priority / 2^-20, whole numbers;  total = their sum
        width    = floor((2^64 - 1) / batch)
        target   = floor((b * width + floor(r[b] * width / 2^64)) * total / 2^64)
        index[b] = the first whose units, added up from leaf 0, pass the target
                   r[b] = first two words of draw(seed, SAMPLE, b, clock)

    Row b draws from its own of `batch` equal strata of the total, so indices come in order, and a batch
    holds a leaf P * batch times to within two, where P = units / total. A leaf of zero is never drawn,
    and no sum has been rounded. Of a tree with nothing in it every index is -1 and every priority
    drawn 0.

    `replay_gather` makes importance weights of drawn and least; the total and the number of leaves
    cancel when weights are divided by the largest of the batch.

    Args:
        priority: leaves, whole multiples of 2^-20; see `priority_update`.
        sums: of the leaves, all levels.
        clock: batches drawn so far, and a count that is 0 between calls.
        batch: rows to draw, at least 1.
        seed: of the run.

    Changes: clock, by one batch, so that a replayed graph never draws the same numbers.

    Returns:
        index: leaf of each row, not decreasing.
        drawn: its priority.
        least: smallest priority drawn of each group of 64 rows.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: sizes that are not a tree's; a parameter out of range; on a GPU, priority or sums
            not aligned to 16 bytes.

    Source: Schaul et al. 2016, section 3.3 and appendix B.2.1 (arXiv:1511.05952); integer sums ours.
    """
    ends = np.cumsum(np.rint(priority / UNIT).astype(np.uint64))
    total, width = int(ends[-1]), (2**64 - 1) // batch
    high, low = (w.tolist() for w in numpy_draw(seed, SAMPLE, np.arange(batch), clock[0])[:2])
    clock[:] = int(clock[0]) + 1, 0
    fractions = [
        b * width + ((h << 32 | w) * width >> 64) for b, (h, w) in enumerate(zip(high, low))
    ]
    targets = np.array([fraction * total >> 64 for fraction in fractions], np.uint64)
    index = np.searchsorted(ends, targets, side="right") if total else np.full(batch, -1)
    drawn = priority[index] if total else np.zeros(batch)
    return index, drawn, np.array([drawn[g : g + GROUP].min() for g in range(0, batch, GROUP)])


def _sizes(params, sizes):
    leaves, batch = leaves_of(sizes.get(L, 1)), int(params["batch"])
    return {L: leaves, W: sums_of(leaves), B: batch, D: blocks(batch, GROUP)}


@priority_sample.draws
def _draw(rng, sizes, params):
    leaves = sizes[L]
    units = rng.integers(1, 2 ** rng.integers(1, 32), size=leaves)
    units[rng.random(leaves) < rng.choice((0, 0.5, 0.99, 1))] = 0
    priority = units.astype("f4").astype("f8") * UNIT
    return {
        "priority": priority,
        "sums": spec_sums(priority),
        "clock": [rng.integers(2**62), 0],
    }


@priority_sample.on_cpu
def _cpu(priority, sums, clock, batch, seed, index, drawn, least):
    widths = widths_of(len(priority))
    ends = np.cumsum(sums[len(sums) - widths[-1] :])
    _cpu_loop(priority, sums, widths, ends, clock[0], seed, stride_of(batch), index, drawn)
    clock[0] += u64(1)
    least[:] = np.minimum.reduceat(drawn, np.arange(0, len(drawn), GROUP))


@njit(parallel=True)
def _cpu_loop(priority, sums, widths, ends, clock, seed, stride, index, drawn):
    for b in prange(len(index)):
        words = draw(seed, SAMPLE, b, clock)
        if ends[-1] == u64(0):
            index[b], drawn[b] = i32(-1), f32(0)
        else:
            target = target_of(b, words[0], words[1], stride, ends[-1])
            index[b] = _find(target, priority, sums, widths, ends)
            drawn[b] = priority[index[b]]


@njit
def _find(target, priority, sums, widths, ends):
    place = np.searchsorted(ends, target, side="right")
    left = target - ends[place - 1] if place > 0 else target
    level = len(sums) - len(ends)
    for k in range(len(widths) - 2, -1, -1):
        level -= widths[k]
        place *= FAN
        while sums[level + place] <= left:
            left -= sums[level + place]
            place += 1
    place *= FAN
    while units_of(priority[place]) <= left:
        left -= units_of(priority[place])
        place += 1
    return i32(place)


@priority_sample.on_cuda
def _launch(priority, sums, clock, batch, seed, *outputs):
    *outputs, stream = outputs
    macros = tree_macros(priority, sums)
    kernel = cuda_c("replay/priority_sample", "priority_sample_kernel", **macros)
    groups = i32(len(priority) // FAN)
    args = priority, sums, clock, groups, i32(batch), seed, stride_of(batch), *outputs
    launch.launch(kernel, blocks(batch, GROUP), GROUP * MEMBERS, args, stream)


def tree_macros(priority, sums):
    """The constants of a kernel that searches the tree.

    Raises:
        ValueError: an array that cannot be read 16 bytes at a time.
    """
    for name, array in (("priority", priority), ("sums", sums)):
        if isinstance(array, Buffer) and array.address % VECTOR:
            raise ValueError(f"{name} must be aligned to {VECTOR} bytes, got {array.address:#x}")
    levels = len(widths_of(len(priority)))
    return {"rows": GROUP, "members": MEMBERS, "levels": levels, "fan": FAN, "top": TOP}
