"""Adam on one flat vector of parameters, with gradient clipping and a linear schedule."""

import functools
import math

import numpy as np
from numba import prange
from numba.extending import register_jitable

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, f32, i32, njit, scalar, u32
from lowgpu_kernels.device.reduce import block_sum
from lowgpu_kernels.dims import F32, I32, Float, Int, Outputs, P
from lowgpu_kernels.op import blocks, op

THREADS = 256
# Both depend on P alone, so the norm has the same bits on every GPU. 1024 blocks fill 128 SMs.
MOST_BLOCKS = 1024
CHUNK = 1024  # elements one CPU task sums in order
BELOW_ONE = 0.999999  # the largest beta: at 1 the bias correction would be 0


def span_of(parameters):
    """Elements of a block, whole rounds of its threads: one round up to MOST_BLOCKS blocks."""
    return THREADS * max(1, blocks(parameters, THREADS * MOST_BLOCKS))


def grid_of(parameters):
    """Blocks of both launches; one for an empty vector, whose norm is still written."""
    return max(1, blocks(parameters, span_of(parameters)))


@op(
    # The norm is a sum of squares: CHUNK or P / THREADS / MOST_BLOCKS terms in order, then as many
    # partial sums as there are; its root halves the relative error. The rest is a dozen roundings.
    error=lambda P, **_: 16 + min(P, CHUNK) / 2 + P / CHUNK / 2,
    changes=("parameters", "m", "v", "step"),
    scratch={
        "partials": ("float32", lambda sizes, params: (grid_of(sizes["P"]),)),
        "done": ("int32", lambda sizes, params: (1,)),
    },
    bench=("P=56008", "P=1048576", "P=16777216"),
    flops=lambda P, **_: 15 * P,
)
def adam(
    parameters: F32[P],
    gradient: F32[P],
    m: F32[P],
    v: F32[P],
    step: I32[1],
    *,
    lr: Float(0, above=True),
    beta1: Float(0, BELOW_ONE) = 0.9,
    beta2: Float(0, BELOW_ONE) = 0.999,
    eps: Float(0, above=True) = 1e-8,
    max_norm: Float(0) = 0.0,
    decay_updates: Int(0) = 0,
    decay_every: Int(1) = 1,
) -> Outputs(norm=F32[1]):
    """One Adam update of a flat vector; the step is counted on the device.

        norm = sqrt(sum(gradient^2))
        g    = gradient * min(1, max_norm / (norm + 1e-6))       or gradient when max_norm is 0
        t    = step + 1
        m    = beta1 * m + (1 - beta1) * g
        v    = beta2 * v + (1 - beta2) * g^2
        rate = lr * max(0, 1 - floor(step / decay_every) * decay_every / decay_updates)
                                                                 or lr when decay_updates is 0
        parameters -= rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        step = t

    When the norm is not finite nothing is changed, the step included: one bad minibatch must not
    destroy the parameters. The norm that comes out says so. torch would write NaN everywhere.

    1 - beta^t is -expm1(t * ln(beta)). Its relative error is at most that of t * ln(beta), since
    |x e^x / (1 - e^x)| <= 1 for x < 0: two roundings whatever t is, so nothing drifts. Betas are
    taken as the shortest decimal that reads back as their float32: 1 - 0.999 is then 0.001 to one
    rounding, as in torch, where 1 - float32(0.999) is off by 1.3e-5 of itself.

    Args:
        parameters: float32 parameters, the master copy. Where gradient, m and v are 0, unchanged.
        gradient: d loss / d parameters; not changed.
        m: running mean of the gradient, zeros before the first update.
        v: running mean of its square, zeros before the first update.
        step: updates done so far, 0 before the first, below 2^31 - 1.
        lr: learning rate, in parameter units a step, above 0.
        beta1: decay of m per step, in [0, 0.999999].
        beta2: decay of v per step, in [0, 0.999999].
        eps: added to the root of v, in gradient units, above 0.
        max_norm: largest norm a gradient is let through with, in gradient units; 0 is no clipping.
        decay_updates: updates after which the linear schedule reaches 0; 0 is a constant rate.
        decay_every: updates between two changes of the rate, such as those of one iteration.

    Changes: parameters, m, v, step.

    Returns:
        norm: of the gradient before clipping; infinite when the sum of squares passes 3.4e38.

    Raises:
        TypeError: an array of another element type, or of a library whose arrays cannot be changed.
        ValueError: shapes that disagree on P; a parameter out of range; on the CPU, a step below 0.

    Source: Kingma & Ba 2015, algorithm 1 (arXiv:1412.6980); clipping and the place of eps as in
    torch.nn.utils.clip_grad_norm_ and torch.optim.Adam.
    """
    norm = np.sqrt(np.sum(gradient * gradient))
    if np.isfinite(norm):
        beta1, beta2 = (float(str(np.float32(beta))) for beta in (beta1, beta2))
        g = gradient * min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else gradient
        rate, done = lr, int(step[0])
        if decay_updates > 0:
            rate = lr * max(0.0, 1 - done // decay_every * decay_every / decay_updates)
        m[:] = beta1 * m + (1 - beta1) * g
        v[:] = beta2 * v + (1 - beta2) * g * g
        mean, square = m / (1 - beta1 ** (done + 1)), v / (1 - beta2 ** (done + 1))
        parameters -= rate * mean / (np.sqrt(square) + eps)
        step[0] = done + 1
    return np.array([norm])


@adam.draws
def _draw(rng, sizes, params):
    return {"v": rng.normal(size=sizes[P]) ** 2, "step": rng.integers(0, 70, 1)}


@adam.checks
def _check(step, **_):
    if step[0] < 0:
        raise ValueError(f"step must be 0 or more, the updates done so far, got {step[0]}")


@functools.cache
def beta_terms(beta):
    """1 - beta and ln(beta) in float32, of the decimal that `beta` was written as."""
    decimal = float(str(beta))
    return f32(1 - decimal), f32(math.log(decimal) if decimal > 0 else -math.inf)


@scalar
def is_finite(x):
    return x - x == f32(0)


@scalar
def bias_correction(log_beta, done):
    return f32(-math.expm1((f32(done) + f32(1)) * log_beta))


@scalar
def rate_of(lr, done, decay_updates, decay_every):
    if decay_updates == 0:
        return lr
    # Unsigned, for a 32-bit division. The difference is of integers: near the end of the schedule
    # 1 - fraction would have lost its digits.
    whole = i32(u32(done) // u32(decay_every)) * decay_every
    left = max(decay_updates - whole, 0)
    return lr * (f32(left) / f32(decay_updates))


@scalar
def clip_factor(norm, max_norm):
    if max_norm == f32(0):
        return f32(1)
    return min(f32(1), max_norm / (norm + f32(1e-6)))


# A function of arrays: as a scalar function, the simulator could not call it.
@register_jitable
def update_element(i, parameters, g, m, v, take1, beta2, take2, eps, step_size, root_scale):
    """Take one element through one update; `step_size` and `root_scale` hold the corrections."""
    mean = m[i] + take1 * (g - m[i])
    square = beta2 * v[i] + take2 * g * g
    m[i] = mean
    v[i] = square
    parameters[i] -= step_size * (mean / (f32(math.sqrt(square)) * root_scale + eps))


@adam.on_cpu
def _cpu(parameters, gradient, m, v, step, lr, beta1, beta2, *rest):
    eps, max_norm, decay_updates, decay_every, norm, _, _ = rest
    rates = lr, *beta_terms(beta1), beta2, *beta_terms(beta2)
    limits = eps, max_norm, decay_updates, decay_every
    _cpu_loop(parameters, gradient, m, v, step, *rates, *limits, norm)


@njit(parallel=True)
def _cpu_loop(
    parameters,
    gradient,
    m,
    v,
    step,
    lr,
    take1,
    log1,
    beta2,
    take2,
    log2,
    eps,
    max_norm,
    decay_updates,
    decay_every,
    norm,
):
    count = parameters.shape[0]
    # Chunks do not depend on the number of threads, so neither do the bits.
    partials = np.zeros((count + CHUNK - 1) // CHUNK, np.float32)
    for chunk in prange(partials.shape[0]):
        total = f32(0)
        for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, count)):
            total += gradient[i] * gradient[i]
        partials[chunk] = total
    squares = f32(0)
    for chunk in range(partials.shape[0]):
        squares += partials[chunk]
    length = f32(math.sqrt(squares))
    norm[0] = length
    if not is_finite(length):
        return
    done = step[0]
    factor = clip_factor(length, max_norm)
    step_size = rate_of(lr, done, decay_updates, decay_every) / bias_correction(log1, done)
    root_scale = f32(1) / f32(math.sqrt(bias_correction(log2, done)))
    for i in prange(count):
        g = factor * gradient[i]
        update_element(i, parameters, g, m, v, take1, beta2, take2, eps, step_size, root_scale)
    step[0] = done + 1


@launch.kernel(threads=THREADS)
def adam_norm_kernel(gradient, step, span, partials, done):
    # A block owns `span` elements, a thread every THREADS-th of them, so a warp reads 128 B lines.
    # The step is copied here, because the next launch both reads and advances it.
    sums = cuda.shared.array(THREADS, f32)
    lane = cuda.threadIdx.x
    total = f32(0)
    first = cuda.blockIdx.x * span
    for i in range(first + lane, min(first + span, gradient.shape[0]), THREADS):
        total += gradient[i] * gradient[i]
    total = block_sum(sums, total)
    if lane == 0:
        partials[cuda.blockIdx.x] = total
        if cuda.blockIdx.x == 0:
            done[0] = step[0]


@launch.kernel(threads=THREADS)
def adam_kernel(
    parameters,
    gradient,
    m,
    v,
    step,
    lr,
    take1,
    log1,
    beta2,
    take2,
    log2,
    eps,
    max_norm,
    decay_updates,
    decay_every,
    span,
    norm,
    partials,
    done,
):
    # Every block sums all partial sums, in the same order. Then it owns `span` elements, a thread
    # every THREADS-th of them, so a warp reads and writes 128 B lines.
    sums = cuda.shared.array(THREADS, f32)
    lane = cuda.threadIdx.x
    total = f32(0)
    for block in range(lane, partials.shape[0], THREADS):
        total += partials[block]
    length = f32(math.sqrt(block_sum(sums, total)))
    finite = is_finite(length)
    before = done[0]
    if cuda.grid(1) == 0:
        norm[0] = length
        if finite:
            step[0] = before + i32(1)
    # The whole grid has one norm and leaves together.
    if not finite:
        return
    factor = clip_factor(length, max_norm)
    step_size = rate_of(lr, before, decay_updates, decay_every) / bias_correction(log1, before)
    root_scale = f32(1) / f32(math.sqrt(bias_correction(log2, before)))
    first = cuda.blockIdx.x * span
    for i in range(first + lane, min(first + span, parameters.shape[0]), THREADS):
        g = factor * gradient[i]
        update_element(i, parameters, g, m, v, take1, beta2, take2, eps, step_size, root_scale)


@adam.on_cuda
def _launch(parameters, gradient, m, v, step, *rest):
    *params, norm, partials, done, stream = rest
    grid, span = grid_of(parameters.size), np.int64(span_of(parameters.size))
    adam_norm_kernel[grid, THREADS, stream](gradient, step, span, partials, done)
    launch_update(parameters, gradient, m, v, step, *params, norm, partials, done, stream)


def launch_update(parameters, gradient, m, v, step, lr, beta1, beta2, *rest):
    """The launch that changes parameters, after one that left `partials`, sums of squares of the
    gradient, and a copy of the step in `done`."""
    eps, max_norm, decay_updates, decay_every, norm, partials, done, stream = rest
    grid, span = grid_of(parameters.size), np.int64(span_of(parameters.size))
    rates = lr, *beta_terms(beta1), beta2, *beta_terms(beta2)
    limits = eps, max_norm, decay_updates, decay_every
    adam_kernel[grid, THREADS, stream](
        parameters, gradient, m, v, step, *rates, *limits, span, norm, partials, done
    )
