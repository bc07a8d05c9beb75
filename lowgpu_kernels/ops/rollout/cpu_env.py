"""An env's functions over batches on the CPU: njit loops, made once for each Env."""

import functools
from typing import NamedTuple

import numpy as np
from numba import njit, types

from lowgpu_kernels.device import f32, i32, scalar, u32
from lowgpu_kernels.device.philox import RESET, STEP, draw, unit
from lowgpu_kernels.ops.rollout.linked import TYPES, env_functions

_NUMBA_TYPES = {
    "int32": types.int32,
    "int32*": types.CPointer(types.int32),
    "float32*": types.CPointer(types.float32),
}
NO_TABLE = np.empty((0, 0), f32)
NO_SERIES = np.empty(0, f32)


class Batches(NamedTuple):
    """njit loops over states `floats` [n, F] and `ints` [n, G], in this order of arguments.

    Attributes:
        reset: (floats, ints, where, series, rows, seed, clock): states where the flag is set.
        step: (floats, ints, action, series, rows, seed, clock, reward, ended): `ended` is what the
            env's step returned, 0, TERMINATED or TRUNCATED.
        observe: (floats, ints, index, table, series, rows, out): row b observes state index[b].
        table_rows: (floats, ints, out): the table's row of each state; None without a table.

    `series` is flat, `rows` int32, `seed` and `clock` uint64; NO_TABLE and NO_SERIES stand for what
    an env does not read. `table` and `out` are float32, or the bits of bfloat16 as uint16.
    """

    reset: object
    step: object
    observe: object
    table_rows: object


@functools.cache
def compiled(function, name):
    """An env's function compiled for pointers: what it does on a GPU, it does here."""
    signature = types.int32(*(_NUMBA_TYPES[t] for t in TYPES[name]))
    # A GPU gives infinity where Python raises ZeroDivisionError.
    return njit(signature, error_model="numpy")(function)


@scalar
def bfloat16_bits(x):
    """The upper half of a float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = f32(x).view(u32)
    if x != x:
        return np.uint16((bits >> u32(16)) | u32(0x40))
    return np.uint16((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@scalar
def draw_units(seed, purpose, index, clock, u):
    words = draw(seed, purpose, index, clock)
    for k in range(4):
        u[k] = unit(words[k])


@functools.cache
def batches(env, precision="float32"):
    """The Batches of an env whose observations are float32 or bfloat16."""
    functions = {name: compiled(f, name) for name, f in env_functions(env).items()}
    env_reset, env_step, env_observe = (functions[n] for n in ("reset", "step", "observe"))
    env_table_row = functions.get("table_row")
    columns, observation, width = env.table_columns, env.observation, env.width

    @njit(nogil=True)
    def reset(floats, ints, where, series, rows, seed, clock):
        u = np.empty(4, f32)
        for e in range(floats.shape[0]):
            if where[e]:
                draw_units(seed, RESET, e, clock, u)
                env_reset(floats[e].ctypes, ints[e].ctypes, u.ctypes, series.ctypes, rows)

    @njit(nogil=True)
    def step(floats, ints, action, series, rows, seed, clock, reward, ended):
        u = np.empty(4, f32)
        for e in range(floats.shape[0]):
            draw_units(seed, STEP, e, clock, u)
            ended[e] = env_step(
                floats[e].ctypes,
                ints[e].ctypes,
                action[e],
                u.ctypes,
                series.ctypes,
                rows,
                reward[e:].ctypes,
            )

    @njit(nogil=True)
    def table_rows(floats, ints, out):
        for e in range(floats.shape[0]):
            out[e] = env_table_row(floats[e].ctypes, ints[e].ctypes)

    @njit(nogil=True)
    def observe(floats, ints, index, table, series, rows, out):
        for b in range(out.shape[0]):
            state = index[b]
            if columns > 0:
                row = env_table_row(floats[state].ctypes, ints[state].ctypes)
                out[b, :columns] = table[row, :columns]
            out[b, observation:] = f32(0)
            env_observe(
                floats[state].ctypes,
                ints[state].ctypes,
                series.ctypes,
                rows,
                out[b, columns:].ctypes,
            )

    @njit(nogil=True)
    def observe_bfloat16(floats, ints, index, table, series, rows, out):
        wide = np.zeros(width - columns, f32)
        for b in range(out.shape[0]):
            state = index[b]
            if columns > 0:
                row = env_table_row(floats[state].ctypes, ints[state].ctypes)
                out[b, :columns] = table[row, :columns]
            env_observe(floats[state].ctypes, ints[state].ctypes, series.ctypes, rows, wide.ctypes)
            for c in range(columns, width):
                out[b, c] = bfloat16_bits(wide[c - columns])

    return Batches(
        reset,
        step,
        observe if precision == "float32" else observe_bfloat16,
        table_rows if columns else None,
    )


def flat(series):
    """What a loop is given for series [S, R] that may be left out, and the rows as int32."""
    return (NO_SERIES, i32(0)) if series is None else (series.reshape(-1), i32(series.shape[1]))
