"""Actions drawn from a softmax policy."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, njit
from lowgpu_kernels.device.draws import categorical as drawn
from lowgpu_kernels.device.draws import greedy as best
from lowgpu_kernels.device.philox import ACTION, draw, numpy_draw, unit
from lowgpu_kernels.dims import F32, FLAG, I32, SEED, U64, A, B, Outputs
from lowgpu_kernels.op import blocks, op

THREADS = 128  # rows a block. Untuned.


@op(
    # Two sums of A terms and a handful of roundings in exp and log.
    error=lambda A, **_: 2 * A + 16,
    # A policy without actions has nothing to draw.
    sizes=lambda params, sizes: {A: max(sizes[A], 1)},
    bench=("B=4096 A=3", "B=131072 A=3", "B=4096 A=64"),
    flops=lambda B, A, **_: 60 * B * A,
)
def categorical(logits: F32[B, A], clock: U64[1], *, seed: SEED, greedy: FLAG = False) -> Outputs(
    action=I32[B], log_probability=F32[B], entropy=F32[B]
):
    """An action for each row, drawn from the softmax of its logits.

        p[b, a]   = exp(logits[b, a]) / sum over a of exp(logits[b, a])
        u[b]      = 24 bits of Philox(seed; ACTION, b, clock)
        action[b] = first a with p[b, 0] + ... + p[b, a] > u[b];  greedy: first a of the largest p
        entropy[b] = -sum over a of p[b, a] log(p[b, a])

    An action with p = 0 is never drawn: where rounding leaves u past the last edge, the last action
    with p > 0 is. The clock is read and not advanced, so the caller that draws again advances it.

    Args:
        logits: unnormalised log-probabilities; -inf masks an action.
        clock: global step the draw belongs to.
        seed: in [0, 2^64).
        greedy: take the likeliest action instead of drawing; the first among equals.

    Returns:
        action: in [0, A).
        log_probability: log of the action's p, nats, also when greedy.
        entropy: nats, in [0, log(A)] up to rounding.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: no action at all; on the CPU, a row that is NaN, +inf or entirely -inf somewhere.
            On a GPU nothing can be raised without waiting: that row's action is -1, and its
            log_probability and entropy are NaN.

    Source: inverse-transform sampling, Devroye 1986, "Non-uniform random variate generation", III.2.
    """
    rows = len(logits)
    p, log_p = _softmax(logits)
    if greedy:
        action = np.argmax(logits, axis=1)
    else:
        edges = np.cumsum(p, axis=1)
        action = np.empty(rows, np.int64)
        for b, u in enumerate(_units(seed, clock, rows)):
            action[b] = next(a for a in range(p.shape[1]) if edges[b, a] > u * edges[b, -1])
    entropy = -np.where(p > 0, p * np.where(p > 0, log_p, 0), 0).sum(axis=1)
    return action, log_p[np.arange(rows), action], entropy


def _softmax(logits):
    """Probabilities and log-probabilities of valid rows, in float64."""
    below = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    total = np.exp(below).sum(axis=1, keepdims=True)
    return np.exp(below) / total, below - np.log(total)


def _units(seed, clock, rows):
    words = numpy_draw(seed, ACTION, np.arange(rows), clock[0])[0]
    return (words >> np.uint64(8)) / 2**24


@categorical.draws
def _draw(rng, sizes, params):
    logits = 2 * rng.normal(size=(sizes[B], sizes[A]))
    masked = rng.random(logits.shape) < 0.2
    masked[np.arange(sizes[B]), rng.integers(0, sizes[A], sizes[B])] = False
    logits[masked] = -np.inf
    return {"logits": logits}


@categorical.checks
def _check(logits, **_):
    largest = logits.max(axis=1)  # NaN where any is
    if not np.isfinite(largest).all():
        b = np.flatnonzero(~np.isfinite(largest))[0]
        raise ValueError(
            f"logits[{b}] has no softmax, its largest is {largest[b]}: leave at least one action "
            "unmasked, with finite logits"
        )


@categorical.compares
def _compare(name, got, want, arguments, allowed):
    """Where u lies within float32 rounding of an edge, the action on either side is right."""
    if name == "entropy" or arguments["greedy"]:
        np.testing.assert_allclose(got, want, rtol=0, atol=allowed, err_msg=f"categorical.{name}")
        return
    p, log_p = _softmax(arguments["logits"])
    u = _units(arguments["seed"], arguments["clock"], len(p))[:, None]
    upper = np.cumsum(p, axis=1)
    # Each of A sums and the product with u is rounded once, the exponentials to 2 ulps.
    slack = (p.shape[1] + 8) * 2.0**-24
    right = (p > 0) & (upper - p - slack <= u) & (u < upper + slack)
    if name == "action":
        assert right[np.arange(len(p)), got].all(), f"categorical.action {got}, not {want}"
    else:
        away = np.where(right, np.abs(np.where(right, log_p, 0) - got[:, None]), np.inf)
        assert (away.min(axis=1) <= allowed).all(), f"categorical.log_probability {got}, not {want}"


@categorical.on_cpu
@njit(parallel=True)
def _cpu(logits, clock, seed, greedy, action, log_probability, entropy):
    rows, actions = logits.shape
    for b in prange(rows):
        if greedy:
            action[b], log_probability[b], entropy[b] = best(logits, b, actions)
        else:
            u = unit(draw(seed, ACTION, b, clock[0])[0])
            action[b], log_probability[b], entropy[b] = drawn(logits, b, actions, u)


@launch.kernel(threads=THREADS)
def categorical_kernel(logits, clock, seed, greedy, action, log_probability, entropy):
    # A thread owns a row. Rows are short and lie one after the other, so what a warp skips in one
    # load it takes from L1 in the next.
    b = cuda.grid(1)
    if b < logits.shape[0]:
        actions = logits.shape[1]
        if greedy:
            action[b], log_probability[b], entropy[b] = best(logits, b, actions)
        else:
            u = unit(draw(seed, ACTION, b, clock[0])[0])
            action[b], log_probability[b], entropy[b] = drawn(logits, b, actions, u)


@categorical.on_cuda
def _launch(logits, clock, seed, greedy, action, log_probability, entropy, stream):
    categorical_kernel[blocks(len(logits), THREADS), THREADS, stream](
        logits, clock, seed, np.bool_(greedy), action, log_probability, entropy
    )
