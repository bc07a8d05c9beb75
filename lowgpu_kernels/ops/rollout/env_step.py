"""One step of every environment."""

import numpy as np

from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.device.philox import STEP
from lowgpu_kernels.dims import BOOL, F32, I32, SEED, U64, E, F, G, Outputs, R, S, Static
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env
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
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes, flat_spec, spec_units

THREADS = 128  # a thread an environment; little work each, so many blocks. Untuned.


@op(
    # One rounding for each operation of the env; the examples make fewer than eight.
    error=lambda **_: 8,
    changes=("floats", "ints"),
    sizes=lambda params, sizes: env_sizes(params["env"], sizes),
    bench=("E=4096 R=1000000", "E=131072 R=1000000"),
)
def env_step(
    floats: F32[E, F],
    ints: I32[E, G],
    action: I32[E],
    series: F32[S, R] | None,
    clock: U64[1],
    *,
    env: Static(Env, example.examples),
    seed: SEED = 0,
) -> Outputs(reward=F32[E], terminated=BOOL[E], truncated=BOOL[E]):
    """Step every environment once, leaving ended episodes in their last state.

        u                    = unit floats of draw(seed, STEP, e, clock)
        state[e], reward[e]  = env.step(state[e], action[e], u)

    Args:
        floats, ints: state of the environments.
        action: what each does, in [0, env.actions).
        series: what the env's functions read; left out where env.series is empty.
        clock: global step, on the same device; read, not advanced.
        env: the environment.
        seed: of the run.

    Changes: floats, ints.

    Returns:
        reward: in the env's own unit.
        terminated: whether the episode ended for good; nothing follows.
        truncated: whether it was cut by a limit; the value of the state it reached goes on.

    Raises:
        ValueError: arrays whose sizes are not the env's; series missing, or given and not read; on
            the CPU, an action outside [0, env.actions). A GPU trusts its actions.
    """
    function, rows, envs = env_functions(env)["step"], rows_of(series), len(floats)
    reward, ended = np.zeros(envs), np.zeros(envs, int)
    for e, u in enumerate(spec_units(seed, STEP, envs, clock)):
        state = floats[e], ints[e]
        ended[e] = function(*state, action[e], u, flat_spec(series), i32(rows), reward[e:])
    return reward, ended == TERMINATED, ended == TRUNCATED


@env_step.draws
def _draw(rng, sizes, params):
    env, envs = params["env"], sizes[E]
    drawn = {"clock": [rng.integers(2**63)], "action": rng.integers(env.actions, size=envs)}
    # The first int of an example env is a row where it has a table.
    last = sizes[R] if env.series else 4
    drawn["ints"] = rng.integers(last, size=(envs, sizes[G])) % np.array([last, 5][: sizes[G]])
    return drawn | draw_series(rng, sizes, env)


@env_step.checks
def _check(action, env, **_):
    wrong = (action < 0) | (action >= env.actions)
    if wrong.any():
        e = int(np.argmax(wrong))
        raise ValueError(f"action must be in 0..{env.actions - 1}, got {action[e]} at {e}")


@env_step.on_cpu
def _cpu(floats, ints, action, series, clock, env, seed, reward, terminated, truncated):
    require(env, series=series)
    ended = np.empty(len(floats), np.int32)
    batches(env).step(floats, ints, action, *flat(series), seed, clock[0], reward, ended)
    np.equal(ended, TERMINATED, out=terminated)
    np.equal(ended, TRUNCATED, out=truncated)


def kernel_of(env):
    links, macros = env_links(env), env_macros(env)
    return cuda_c("rollout/env_step", "env_step_kernel", links, threads=THREADS, **macros)


@env_step.on_cuda
def _launch(floats, ints, action, series, clock, env, seed, *outputs_and_stream):
    *outputs, stream = outputs_and_stream
    require(env, series=series)
    envs = len(floats)
    scalars = seed, i32(envs), i32(rows_of(series))
    args = floats, ints, action, series, clock, *scalars, *outputs
    launch(kernel_of(env), blocks(envs, THREADS), THREADS, args, stream)
