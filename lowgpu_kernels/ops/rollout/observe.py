"""Observation rows of states: a row of the table, then what the env works out."""

import numpy as np

from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.dims import F32, I32, REAL, B, Choice, F, G, I, N, Outputs, R, S, Static
from lowgpu_kernels.env import Env
from lowgpu_kernels.launch import WARP, from_the_wait, launch
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.rollout import example
from lowgpu_kernels.ops.rollout.cpu_env import NO_TABLE, batches, flat
from lowgpu_kernels.ops.rollout.linked import (
    env_functions,
    env_links,
    env_macros,
    require,
    rows_of,
)
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes, flat_spec

THREADS = 256  # eight warps a block, to hide the latency of scattered table rows. Untuned.
VECTOR = 16  # bytes a lane copies at a time


@op(
    # One rounding for each operation of the env, one to the precision asked for.
    error=lambda **_: 8,
    sizes=lambda params, sizes: _sizes(params["env"], sizes),
    bench=("N=262144 B=8192 R=1000000", "N=4194304 B=262144 R=1000000"),
)
def observe(
    floats: F32[N, F],
    ints: I32[N, G],
    table: REAL[R, I] | None = None,
    series: F32[S, R] | None = None,
    index: I32[B] | None = None,
    *,
    env: Static(Env, example.examples),
    precision: Choice("float32", "bfloat16") = "float32",
) -> Outputs(x=REAL[B, I]):
    """Observation rows of states, padded with zeros to a multiple of 8 columns.

        x[b] = table[env.table_row(s)] up to env.table_columns, env.observe(s), zeros
               with s = state[index[b]], or state[b] without index

    Args:
        floats, ints: states, such as those stored by a rollout.
        table: rows of env.width columns; left out where the env has none. Its columns past
            env.table_columns are not read.
        series: what the env's functions read; left out where env.series is empty.
        index: states to observe, in [0, N); all of them, in order, when left out.
        env: the environment.
        precision: element type of x, and of the table.

    Returns:
        x: float32 values rounded to the precision; the table's as they are.

    Raises:
        TypeError: a table of another element type than the precision.
        ValueError: arrays whose sizes are not the env's; table or series missing, or given and not
            read; on the CPU, an index outside [0, N). On a GPU, arrays not aligned to 16 bytes.
    """
    functions, rows = env_functions(env), i32(rows_of(series))
    chosen = range(len(floats)) if index is None else index
    x = np.zeros((len(chosen), env.width))
    for b, n in enumerate(chosen):
        if env.table_columns:
            row = functions["table_row"](floats[n], ints[n])
            x[b, : env.table_columns] = table[row, : env.table_columns]
        tail = x[b, env.table_columns :]
        functions["observe"](floats[n], ints[n], flat_spec(series), rows, tail)
    return x


def _sizes(env, sizes):
    # Without states there is nothing an index could point at.
    rows = sizes.get(B, sizes.get(N)) if sizes.get(N) else 0
    return env_sizes(env, sizes) | {I: env.width, B: rows}


@observe.draws
def _draw(rng, sizes, params):
    env, states, rows = params["env"], sizes[N], sizes[B]
    drawn = {"index": rng.integers(states, size=rows) if states else np.empty(0)}
    if rows == states and rng.random() < 0.5:
        drawn["index"] = None
    drawn["ints"] = rng.integers(sizes[R], size=(states, sizes[G]))
    if not env.table_columns:
        drawn["table"] = None
    return drawn | draw_series(rng, sizes, env)


@observe.checks
def _check(floats, index, **_):
    if index is not None:
        wrong = (index < 0) | (index >= len(floats))
        if wrong.any():
            b = int(np.argmax(wrong))
            raise ValueError(f"index must be in 0..{len(floats) - 1}, got {index[b]} at {b}")


def _require(floats, table, series, index, env, x):
    require(env, table=table, series=series)
    if index is None and len(x) != len(floats):
        raise ValueError(f"x must have {len(floats)} rows without an index, got {len(x)}")


@observe.on_cpu
def _cpu(floats, ints, table, series, index, env, precision, x):
    _require(floats, table, series, index, env, x)
    index = np.arange(len(floats), dtype="i4") if index is None else index
    table = NO_TABLE if table is None else table
    if precision == "bfloat16":
        table, x = table.astype("u2") if table is NO_TABLE else table.view("u2"), x.view("u2")
    batches(env, precision).observe(floats, ints, index, table, *flat(series), x)


def lanes_of(env, precision):
    """Lanes a row: one for each vector of the table, one more for the vectors the env shares in."""
    whole = env.table_columns * (4 if precision == "float32" else 2) // VECTOR
    return min(WARP, 1 << whole.bit_length())


def kernel_of(env, precision):
    return cuda_c(
        "rollout/observe",
        "observe_kernel",
        env_links(env),
        threads=THREADS,
        lanes=lanes_of(env, precision),
        float32=precision == "float32",
        **env_macros(env),
    )


@observe.on_cuda
def _launch(floats, ints, table, series, index, env, precision, x, stream):
    _require(floats, table, series, index, env, x)
    for name, array in (("table", table), ("x", x)):
        if array is not None and array.address % VECTOR:
            raise ValueError(f"{name} must be aligned to {VECTOR} bytes, got {array.address:#x}")
    args = floats, ints, table, series, index, i32(len(x)), i32(rows_of(series)), x
    rows_a_block = THREADS // lanes_of(env, precision)
    kernel, grid = kernel_of(env, precision), blocks(len(x), rows_a_block)
    launch(kernel, grid, THREADS, args, stream, early=from_the_wait())
