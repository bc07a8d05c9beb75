"""Importance weights to the power that a schedule gives, so that a replayed graph follows it."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, njit, scalar
from lowgpu_kernels.device.maths import exp_f32, log_f32
from lowgpu_kernels.dims import F32, U64, B, Float, Int
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.dqn.experience import epsilon_at

THREADS = 64  # few rows a block, so that a small batch spreads over the SMs. Untuned.


@op(
    # exp(beta log w): |log w| is at most 22, so its rounding counts as many times.
    error=lambda **_: 64,
    changes=("weight",),
    bench=("B=8192", "B=262144"),
    flops=lambda B, **_: 40 * B,
)
def anneal_weights(
    weight: F32[B],
    clock: U64[1],
    *,
    beta_start: Float(0, 1) = 0.4,
    beta_end: Float(0, 1) = 1.0,
    beta_steps: Int(0, 2**63 - 1, np.uint64) = 0,
):
    """Raise a minibatch's importance weights to the power of now.

        beta   = start + (end - start) * clock / beta_steps     while clock < beta_steps, else end
        weight = weight^beta

    Weights that `replay_gather` made with beta=1 are least / drawn, so these are (least / drawn)^beta.

    Args:
        weight: in (0, 1], the largest of the batch 1.
        clock: steps of every environment done so far; not changed.
        beta_start, beta_end: exponent at clock 0 and from beta_steps on, in [0, 1].
        beta_steps: steps of the clock; 0 gives the end at once.

    Changes: weight.

    Raises:
        TypeError: an array of another element type, or of a library whose arrays cannot be changed.
        ValueError: a parameter out of range.

    Source: Schaul et al. 2016, section 3.4 (arXiv:1511.05952).
    """
    beta, now = beta_end, int(clock[0])
    if now < beta_steps:
        beta = beta_start + (beta_end - beta_start) * (now / int(beta_steps))
    weight[:] = weight**beta


@anneal_weights.draws
def _draw(rng, sizes, params):
    return {
        "weight": 2.0 ** rng.uniform(-32, 0, size=sizes[B]),
        "clock": rng.integers(2 ** (4 if rng.random() < 0.5 else 40), size=1),
    }


@scalar
def to_power(weight, beta):
    return exp_f32(beta * log_f32(weight))


@anneal_weights.on_cpu
@njit(parallel=True)
def _cpu(weight, clock, beta_start, beta_end, beta_steps):
    beta = epsilon_at(clock[0], beta_start, beta_end, beta_steps)
    for b in prange(len(weight)):
        weight[b] = to_power(weight[b], beta)


@launch.kernel(threads=THREADS)
def anneal_weights_kernel(weight, clock, beta_start, beta_end, beta_steps):
    # A thread owns a row, a warp reads and writes whole lines.
    b = cuda.grid(1)
    if b < weight.shape[0]:
        beta = epsilon_at(clock[0], beta_start, beta_end, beta_steps)
        weight[b] = to_power(weight[b], beta)


@anneal_weights.on_cuda
def _launch(weight, clock, beta_start, beta_end, beta_steps, stream):
    args = weight, clock, beta_start, beta_end, beta_steps
    anneal_weights_kernel[blocks(len(weight), THREADS), THREADS, stream](*args)
