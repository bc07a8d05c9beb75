"""Uniform draws from the replay ring."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32, njit
from lowgpu_kernels.device.philox import SAMPLE, draw, numpy_draw
from lowgpu_kernels.dims import I32, SEED, U64, B, Int
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.ring import uniform_of

THREADS = 64  # few rows a block, so that a small batch spreads over the SMs. Untuned.


@op(
    error=lambda **_: 0,  # integers
    changes=("clock",),
    sizes=lambda params, sizes: {B: int(params["batch"])},
    bench=("batch=8192 envs=4096", "batch=262144 envs=4096"),
)
def replay_sample(
    head: I32[3], clock: U64[2], *, envs: Int(1), batch: Int(1), seed: SEED = 0
) -> I32[B]:
    """Transitions of a ring, each as likely as any other, with replacement.

        count  = head[1] * envs
        out[b] = floor(r[b] * count / 2^64)      r[b] = first two words of draw(seed, SAMPLE, b, clock)

    Slots are filled in order, so the transitions written are those below count. A batch may be larger
    than the ring. Of a ring with nothing in it every index is -1, which `replay_gather` turns into NaN.

    Args:
        head: of the ring; see `replay_write`.
        clock: batches drawn so far, and a count that is 0 between calls.
        envs: environments of the ring, E; with its slots below 2^31 transitions.
        batch: rows to draw, at least 1.
        seed: of the run.

    Changes: clock, by one batch, so that a replayed graph never draws the same numbers.

    Returns:
        Indices k * envs + e.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: a parameter out of range.

    Source: Lin 1992, experience replay.
    """
    count = int(head[1]) * envs
    high, low = (w.tolist() for w in numpy_draw(seed, SAMPLE, np.arange(batch), clock[0])[:2])
    clock[:] = int(clock[0]) + 1, 0
    return np.array([(h << 32 | w) * count >> 64 if count else -1 for h, w in zip(high, low)], "i4")


@replay_sample.draws
def _draw(rng, sizes, params):
    filled = rng.integers(5000)
    return {"head": [0, filled, 0], "clock": [rng.integers(2**62), 0]}


@replay_sample.on_cpu
def _cpu(head, clock, envs, batch, seed, out):
    _cpu_loop(int(head[1]) * int(envs), clock[0], seed, out)
    clock[0] += np.uint64(1)


@njit(parallel=True)
def _cpu_loop(count, clock, seed, out):
    for b in prange(len(out)):
        words = draw(seed, SAMPLE, b, clock)
        out[b] = i32(uniform_of(words[0], words[1], count)) if count > 0 else i32(-1)


@replay_sample.on_cuda
def _launch(head, clock, envs, batch, seed, out, stream):
    kernel = cuda_c("replay/replay_sample", "replay_sample_kernel", threads=THREADS)
    args = head, clock, envs, batch, seed, out
    launch.launch(kernel, blocks(batch, THREADS), THREADS, args, stream)
