"""Values brought to mean 0 and standard deviation 1."""

from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, njit, scalar
from lowgpu_kernels.dims import F32, Float, N
from lowgpu_kernels.op import blocks, op

THREADS = 256  # Untuned.


@op(
    # A difference, a sum and a quotient, each rounded once.
    error=lambda **_: 4,
    bench=("N=524288", "N=8388608"),
    flops=lambda N, **_: 3 * N,
)
def normalize(x: F32[N], moments: F32[2], *, eps: Float(1e-12, 1) = 1e-8) -> F32[N]:
    """Values less their mean, over their standard deviation.

        out = (x - mean) / (std + eps)      where N > 1
        out = x                             where N = 1: one value has no deviation

    Values that are all equal give zeros. `out` may be `x` itself.

    Args:
        x: values.
        moments: (mean, std) as `moments` gives them, std >= 0; not read where N = 1.
        eps: added to the deviation, in the unit of x, in [1e-12, 1].

    Returns:
        Values without unit.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: eps out of range.

    Source: advantage normalisation of Stable-Baselines3's PPO, which leaves a single value as it is.
    """
    return x.copy() if len(x) == 1 else (x - moments[0]) / (moments[1] + eps)


@normalize.draws
def _draw(rng, sizes, params):
    return {"moments": [rng.normal(), rng.uniform(0.1, 2)]}


@scalar
def normalized(x, mean, deviation, eps):
    return (x - mean) / (deviation + eps)


@normalize.on_cpu
@njit(parallel=True)
def _cpu(x, moments, eps, out):
    if len(x) == 1:
        out[0] = x[0]
    else:
        for i in prange(len(x)):
            out[i] = normalized(x[i], moments[0], moments[1], eps)


@launch.kernel(threads=THREADS)
def normalize_kernel(x, moments, eps, out):
    # A thread owns a value, a warp reads and writes whole lines.
    i = cuda.grid(1)
    if i < x.shape[0]:
        alone = x.shape[0] == 1
        out[i] = x[i] if alone else normalized(x[i], moments[0], moments[1], eps)


@normalize.on_cuda
def _launch(x, moments, eps, out, stream):
    normalize_kernel[blocks(len(x), THREADS), THREADS, stream](x, moments, eps, out)
