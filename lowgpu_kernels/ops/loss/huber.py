"""The Huber loss of an error, and its gradient."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, f32, njit, scalar
from lowgpu_kernels.dims import F32, Float, N, Outputs
from lowgpu_kernels.op import blocks, op

THREADS = 256  # untuned: every block size that fills an SM reads memory alike


@op(
    # A product of three factors, each rounded once, of errors no larger than delta or the input.
    error=lambda delta=1.0, **_: 4 * max(1.0, float(delta)),
    bench=("N=65536", "N=16777216"),
    flops=lambda N, **_: 5 * N,
)
def huber(error: F32[N], *, delta: Float(0, above=True) = 1.0) -> Outputs(
    loss=F32[N], gradient=F32[N]
):
    """Quadratic loss of small errors and linear loss of large ones, element by element.

        loss     = error^2 / 2                    where |error| <= delta
                   delta * (|error| - delta / 2)  elsewhere
        gradient = error clamped to [-delta, delta]

    This is torch.nn.HuberLoss. Smooth L1 with beta = delta is this divided by delta: it keeps the
    slope of the linear part at 1 where Huber keeps the curvature of the quadratic part at 1. For
    error = [-3, -0.5, 0, 1, 2, 5] and delta = 2 the loss is [4, 0.125, 0, 0.5, 2, 8] here and
    [2, 0.0625, 0, 0.25, 1, 4] in smooth L1.

    Args:
        error: prediction minus target, in any unit.
        delta: where the loss turns linear, in the error's unit, above 0.

    Returns:
        loss: not reduced, in the error's unit squared.
        gradient: d loss / d error. A NaN error gives NaN in both.

    Raises:
        TypeError: an array of another element type.
        ValueError: delta not above 0.

    Source: Huber 1964, Robust Estimation of a Location Parameter.
    """
    size = np.abs(error)
    loss = np.where(size <= delta, error * error / 2, delta * (size - delta / 2))
    return loss, np.clip(error, -delta, delta)


@scalar
def huber_loss_of(error, delta):
    size = abs(error)
    if size <= delta:
        return f32(0.5) * error * error
    return delta * (size - f32(0.5) * delta)


@scalar
def huber_gradient_of(error, delta):
    # Comparisons, not min and max: those may drop a NaN.
    if error > delta:
        return delta
    return -delta if error < -delta else error


@huber.on_cpu
@njit(parallel=True)
def _cpu(error, delta, loss, gradient):
    for n in prange(error.shape[0]):
        loss[n] = huber_loss_of(error[n], delta)
        gradient[n] = huber_gradient_of(error[n], delta)


@launch.kernel(threads=THREADS)
def huber_kernel(error, delta, loss, gradient):
    # A thread owns one element; neighbouring threads read neighbouring elements.
    n = cuda.grid(1)
    if n < error.shape[0]:
        loss[n] = huber_loss_of(error[n], delta)
        gradient[n] = huber_gradient_of(error[n], delta)


@huber.on_cuda
def _launch(error, delta, loss, gradient, stream):
    huber_kernel[blocks(error.size, THREADS), THREADS, stream](error, delta, loss, gradient)
