"""The target network's move towards the parameters, due by env steps and not by updates."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, f32, njit, scalar, u64
from lowgpu_kernels.dims import F32, U64, Float, Int, P
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.tree import high_product

THREADS = 256  # a thread an element: the parameters are few. Untuned.
STEPS = Int(1, 2**50, np.uint64)


@op(
    # A difference, a product and a sum.
    error=lambda **_: 4,
    changes=("target",),
    bench=("P=56008", "P=1048576"),
    flops=lambda P, **_: 3 * P,
)
def target_move(
    parameters: F32[P],
    target: F32[P],
    clock: U64[1],
    *,
    envs: Int(1),
    ahead: STEPS,
    every: STEPS,
    tau: Float(0, 1, above=True) = 1.0,
):
    """Move the target if a move falls due before the next update; leave it alone otherwise.

        now     = clock * envs                            env steps done
        due     = a multiple of every, above 0, is in [now, now + ahead)
        target += tau * (parameters - target)             where due; a copy where tau is 1

    Called after the updates at `now`, with the next ones `ahead` env steps later. Parameters stay as
    they are in between, so the moves of those steps can be made at once, and one move stands for
    several copies. Neither the interval nor what is trained in it has to divide the other: over 5010
    steps a target that moves every 501 moves 10 times, however often there are updates.

    Args:
        parameters: of the network, flat.
        target: those that goals are worked out with.
        clock: steps of every environment done so far; not changed.
        envs: environments, each of which makes an env step in a step of the clock.
        ahead: env steps from now to the next update.
        every: env steps between two moves.
        tau: share of the way that the target goes, in (0, 1].

    Changes: target.

    Raises:
        TypeError: an array of another element type, or of a library whose arrays cannot be changed.
        ValueError: shapes that disagree on P; a parameter out of range.

    Source: Mnih et al. 2015, algorithm 1 (doi:10.1038/nature14236).
    """
    now = int(clock[0]) * int(envs)
    if any(s > 0 and s % int(every) == 0 for s in range(now, now + int(ahead))):
        target[:] = parameters if tau == 1 else target + tau * (parameters - target)


@target_move.draws
def _draw(rng, sizes, params):
    return {"clock": rng.integers(2 ** rng.choice((3, 12)), size=1)}


def inverse_of(every):
    """2^64 / every, rounded down: a GPU divides 64-bit numbers by a call."""
    return u64((2**64 - 1) // int(every))


@scalar
def is_due(clock, envs, ahead, every, inverse):
    """Whether a positive multiple of `every` is in [now, now + ahead), now = clock * envs; uint64."""
    now = u64(clock) * u64(envs)
    before = now - u64(1) if now > u64(0) else u64(0)
    # The inverse is short by less than 1 / before of itself, so the quotient by less than one.
    rest = before - high_product(before, inverse) * every
    rest = rest - every if rest >= every else rest
    return rest + (now + ahead - u64(1) - before) >= every


@scalar
def moved(parameter, target, tau):
    """A target's element one move on; a copy is exact."""
    return parameter if tau == f32(1) else target + tau * (parameter - target)


@target_move.on_cpu
def _cpu(parameters, target, clock, envs, ahead, every, tau):
    _cpu_loop(parameters, target, clock, envs, ahead, every, inverse_of(every), tau)


@njit(parallel=True)
def _cpu_loop(parameters, target, clock, envs, ahead, every, inverse, tau):
    if is_due(clock[0], envs, ahead, every, inverse):
        for i in prange(len(target)):
            target[i] = moved(parameters[i], target[i], tau)


@launch.kernel(threads=THREADS)
def target_move_kernel(parameters, target, clock, envs, ahead, every, inverse, tau):
    # A thread owns an element, a warp reads and writes whole lines; all of them leave or none.
    i = cuda.grid(1)
    if i < target.shape[0] and is_due(clock[0], envs, ahead, every, inverse):
        target[i] = moved(parameters[i], target[i], tau)


@target_move.on_cuda
def _launch(parameters, target, clock, envs, ahead, every, tau, stream):
    args = parameters, target, clock, envs, ahead, every, inverse_of(every), tau
    target_move_kernel[blocks(len(target), THREADS), THREADS, stream](*args)
