"""Two small envs for the tests and benches of the ops over an env."""

from lowgpu_kernels.device import f32, i32
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env

LIMIT = i32(5)


def _walk_reset(floats, ints, u, series, rows):
    floats[0] = u[0] - f32(0.5)
    ints[0] = min(i32(u[1] * f32(rows)), rows - i32(1))
    ints[1] = i32(0)
    return 0


def _walk_step(floats, ints, action, u, series, rows, reward):
    moved = series[rows + ints[0]] * f32(action - i32(1)) + u[2]
    reward[0] = moved - floats[0]
    floats[0] = moved
    ints[0] = ints[0] + i32(1) if ints[0] + i32(1) < rows else i32(0)
    ints[1] = ints[1] + i32(1)
    if ints[0] == 0:
        return TERMINATED
    return TRUNCATED if ints[1] >= LIMIT else 0


def _walk_observe(floats, ints, series, rows, out):
    out[0] = floats[0]
    out[1] = series[ints[0]] * floats[0]
    return 0


def _walk_table_row(floats, ints):
    return ints[0]


def _drift_reset(floats, ints, u, series, rows):
    for i in range(3):
        floats[i] = u[i] - u[3]
    ints[0] = i32(0)
    return 0


def _drift_step(floats, ints, action, u, series, rows, reward):
    floats[0] = floats[0] + f32(0.5) * floats[1]
    floats[1] = floats[1] + (f32(0.25) if action == 1 else f32(-0.25))
    floats[2] = u[0]
    ints[0] = ints[0] + i32(1)
    reward[0] = floats[0] * floats[2]
    return TRUNCATED if ints[0] >= LIMIT else 0


def _drift_observe(floats, ints, series, rows, out):
    for i in range(3):
        out[i] = floats[i]
    return 0


# A table whose last vector is shared with columns of the env, at either precision; two series.
WALK = Env(
    name="walk",
    observation=21,
    actions=3,
    floats=("place",),
    ints=("row", "step"),
    reset=_walk_reset,
    step=_walk_step,
    observe=_walk_observe,
    table_columns=19,
    table_row=_walk_table_row,
    series=("scale", "slope"),
)
# State alone.
DRIFT = Env(
    name="drift",
    observation=3,
    actions=2,
    floats=("place", "speed", "noise"),
    ints=("step",),
    reset=_drift_reset,
    step=_drift_step,
    observe=_drift_observe,
)


def examples():
    """Envs that tests and benches use."""
    return WALK, DRIFT
