"""The first state of an episode, for every environment."""

import numpy as np

from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.device.philox import RESET, numpy_draw
from lowgpu_kernels.dims import F32, I32, SEED, U64, E, F, G, R, S, Static
from lowgpu_kernels.env import Env
from lowgpu_kernels.launch import launch
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.rollout import example
from lowgpu_kernels.ops.rollout.cpu_env import batches, flat
from lowgpu_kernels.ops.rollout.linked import (
    env_functions,
    env_links,
    env_macros,
    require,
    rows_of,
)

THREADS = 128  # a thread an environment; little work each, so many blocks. Untuned.


@op(
    # One rounding for each operation of the env; the examples make fewer than eight.
    error=lambda **_: 8,
    changes=("floats", "ints"),
    sizes=lambda params, sizes: env_sizes(params["env"], sizes),
    bench=("E=4096 R=1000000", "E=131072 R=1000000"),
)
def reset(
    floats: F32[E, F],
    ints: I32[E, G],
    series: F32[S, R] | None,
    clock: U64[1],
    *,
    env: Static(Env, example.examples),
    seed: SEED = 0,
):
    """Put every environment in the first state of an episode.

        u         = unit floats of draw(seed, RESET, e, clock)
        state[e]  = env.reset(u)

    Args:
        floats, ints: state of the environments, written whole.
        series: what the env's functions read; left out where env.series is empty.
        clock: global step, on the same device; read, not advanced.
        env: the environment.
        seed: of the run.

    Changes: floats, ints.

    Raises:
        ValueError: arrays whose sizes are not the env's; series missing, or given and not read.
    """
    function, rows = env_functions(env)["reset"], rows_of(series)
    for e, u in enumerate(spec_units(seed, RESET, len(floats), clock)):
        function(floats[e], ints[e], u, flat_spec(series), i32(rows))


def env_sizes(env, sizes):
    """The dimensions that follow from an env; a table and series have at least one row."""
    derived = {F: len(env.floats), G: len(env.ints), S: len(env.series)}
    return derived | {R: max(1, sizes.get(R, 1))}


def spec_units(seed, purpose, envs, clock):
    """Four unit floats an environment, float32 [envs, 4], as a spec draws them."""
    words = numpy_draw(seed, purpose, np.arange(envs), clock[0])
    return ((words >> np.uint64(8)).astype("f4") * np.float32(2.0**-24)).T


def flat_spec(series):
    return None if series is None else series.reshape(-1)


@reset.draws
def _draw(rng, sizes, params):
    return {"clock": [rng.integers(2**63)]} | draw_series(rng, sizes, params["env"])


def draw_series(rng, sizes, env):
    """Series for an example env, or None."""
    return {"series": rng.normal(size=(sizes[S], sizes[R])) if env.series else None}


@reset.on_cpu
def _cpu(floats, ints, series, clock, env, seed):
    require(env, series=series)
    every = np.ones(len(floats), bool)
    batches(env).reset(floats, ints, every, *flat(series), seed, clock[0])


def kernel_of(env):
    links, macros = env_links(env), env_macros(env)
    return cuda_c("rollout/reset", "reset_kernel", links, threads=THREADS, **macros)


@reset.on_cuda
def _launch(floats, ints, series, clock, env, seed, stream):
    require(env, series=series)
    envs = len(floats)
    args = floats, ints, series, clock, seed, i32(envs), i32(rows_of(series))
    launch(kernel_of(env), blocks(envs, THREADS), THREADS, args, stream)
