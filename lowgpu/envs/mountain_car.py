"""A car too weak for its hill, which has to swing up: the classic control task of sparse success."""

import functools

from lowgpu_kernels.device import f32, i32
from lowgpu_kernels.device.maths import cos_f32
from lowgpu_kernels.dims import FLAG, Int
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env

FORCE = f32(0.001)  # of the motor, as a change of velocity a step
GRAVITY = f32(0.0025)  # likewise, where the valley is steepest
FASTEST = f32(0.07)  # a step
LEFT_WALL = f32(-1.2)
RIGHT_END = f32(0.6)
GOAL = f32(0.5)
FIRST_START, START_WIDTH = f32(-0.6), f32(0.2)

_MAX_STEPS = Int(1)


def mountain_car(max_steps=200, limit_terminates=False):
    """The environment of Gymnasium's MountainCar-v0, with float32 arithmetic.

        velocity = clip(velocity + (action - 1) * 0.001 - 0.0025 cos(3 position), -0.07, 0.07)
        position = clip(position + velocity, -1.2, 0.6)

    The wall at -1.2 takes the velocity of a car that runs into it. The state and the observation
    are position and velocity; an episode starts at rest, its position uniform in [-0.6, -0.4).
    Action 0 drives left, 1 coasts, 2 drives right. The reward is -1 a step, the one that ends the
    episode included. The episode terminates at a position of 0.5 or more that is not being left
    (velocity >= 0), and is truncated after `max_steps`.

    Args:
        max_steps: most steps in an episode, from 1.
        limit_terminates: whether reaching `max_steps` counts as a termination instead, as
            trainers that do not bootstrap at time limits have it.

    Returns:
        An Env; equal arguments give the same one, so it is compiled once.

    Raises:
        TypeError, ValueError: an argument out of range, by name.

    Source: Moore 1990, with the constants of Sutton & Barto 2018, example 10.1, and the start of
    Gymnasium 1.x.
    """
    return _mountain_car(
        _MAX_STEPS("max_steps", max_steps), FLAG("limit_terminates", limit_terminates)
    )


@functools.cache
def _mountain_car(max_steps, limit_terminates):
    at_limit = i32(TERMINATED if limit_terminates else TRUNCATED)

    def step(floats, ints, action, u, series, rows, reward):
        push = (f32(action) - f32(1)) * FORCE
        velocity = floats[1] + (push - cos_f32(f32(3) * floats[0]) * GRAVITY)
        velocity = min(max(velocity, -FASTEST), FASTEST)
        position = min(max(floats[0] + velocity, LEFT_WALL), RIGHT_END)
        if position == LEFT_WALL and velocity < f32(0):
            velocity = f32(0)
        floats[0] = position
        floats[1] = velocity
        ints[0] = ints[0] + i32(1)
        reward[0] = f32(-1)
        if position >= GOAL and velocity >= f32(0):
            return TERMINATED
        return at_limit if ints[0] >= max_steps else 0

    return Env(
        name="mountain_car",
        observation=2,
        actions=3,
        floats=("position", "velocity"),
        ints=("step",),
        reset=_reset,
        step=step,
        observe=_observe,
    )


def _reset(floats, ints, u, series, rows):
    floats[0] = FIRST_START + START_WIDTH * u[0]
    floats[1] = f32(0)
    ints[0] = i32(0)
    return 0


def _observe(floats, ints, series, rows, out):
    out[0] = floats[0]
    out[1] = floats[1]
    return 0
