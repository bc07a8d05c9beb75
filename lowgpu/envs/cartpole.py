"""A pole on a cart, pushed left or right: the classic control task."""

import functools
import math

from lowgpu_kernels.device import f32, i32
from lowgpu_kernels.device.maths import cos_f32, sin_f32
from lowgpu_kernels.dims import FLAG, Int
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env

GRAVITY = f32(9.8)  # m/s^2
POLE_MASS = f32(0.1)  # kg
TOTAL_MASS = f32(1.1)  # kg, cart and pole
HALF_LENGTH = f32(0.5)  # m, from the pivot to the pole's centre of mass
POLE_MOMENT = f32(0.05)  # kg m, pole mass times half length
FORCE = f32(10)  # N
SECONDS = f32(0.02)  # a step
TRACK = f32(2.4)  # m, from the middle to either end
LARGEST_ANGLE = f32(math.radians(12))
LARGEST_START = f32(0.05)

_MAX_STEPS = Int(1)


def cartpole(max_steps=500, limit_terminates=False):
    """The environment of Gymnasium's CartPole-v1, with float32 arithmetic.

        temp      = (force + POLE_MOMENT * theta_dot^2 * sin(theta)) / TOTAL_MASS
        theta_acc = (g sin(theta) - cos(theta) temp)
                    / (HALF_LENGTH * (4/3 - POLE_MASS * cos(theta)^2 / TOTAL_MASS))
        x_acc     = temp - POLE_MOMENT * theta_acc * cos(theta) / TOTAL_MASS

    followed by one explicit Euler step of 0.02 s. The state and the observation are x (m), x_dot
    (m/s), theta (rad) and theta_dot (rad/s), each uniform in [-0.05, 0.05) at the start. Action 0
    pushes left, 1 right. The reward is 1 a step, the one that ends the episode included. The
    episode terminates outside |x| <= 2.4 m and |theta| <= 12 degrees, and is truncated after
    `max_steps`.

    Args:
        max_steps: most steps in an episode, from 1.
        limit_terminates: whether reaching `max_steps` counts as a termination instead, as
            trainers that do not bootstrap at time limits have it.

    Returns:
        An Env; equal arguments give the same one, so it is compiled once.

    Raises:
        TypeError, ValueError: an argument out of range, by name.

    Source: Barto, Sutton & Anderson 1983, with the corrected equations of Florian 2007 (eq. 23, 24
    without friction), as in Gymnasium 1.x.
    """
    return _cartpole(_MAX_STEPS("max_steps", max_steps), FLAG("limit_terminates", limit_terminates))


@functools.cache
def _cartpole(max_steps, limit_terminates):
    at_limit = i32(TERMINATED if limit_terminates else TRUNCATED)

    def step(floats, ints, action, u, series, rows, reward):
        x, x_dot, theta, theta_dot = floats[0], floats[1], floats[2], floats[3]
        force = FORCE if action == 1 else -FORCE
        sine, cosine = sin_f32(theta), cos_f32(theta)
        temp = (force + POLE_MOMENT * (theta_dot * theta_dot) * sine) / TOTAL_MASS
        inertia = HALF_LENGTH * (f32(4 / 3) - POLE_MASS * (cosine * cosine) / TOTAL_MASS)
        theta_acc = (GRAVITY * sine - cosine * temp) / inertia
        x_acc = temp - POLE_MOMENT * theta_acc * cosine / TOTAL_MASS
        floats[0] = x + SECONDS * x_dot
        floats[1] = x_dot + SECONDS * x_acc
        floats[2] = theta + SECONDS * theta_dot
        floats[3] = theta_dot + SECONDS * theta_acc
        ints[0] = ints[0] + i32(1)
        reward[0] = f32(1)
        if abs(floats[0]) > TRACK or abs(floats[2]) > LARGEST_ANGLE:
            return TERMINATED
        return at_limit if ints[0] >= max_steps else 0

    return Env(
        name="cartpole",
        observation=4,
        actions=2,
        floats=("x", "x_dot", "theta", "theta_dot"),
        ints=("step",),
        reset=_reset,
        step=step,
        observe=_observe,
    )


def _reset(floats, ints, u, series, rows):
    for i in range(4):
        floats[i] = (u[i] - f32(0.5)) * (f32(2) * LARGEST_START)
    ints[0] = i32(0)
    return 0


def _observe(floats, ints, series, rows, out):
    for i in range(4):
        out[i] = floats[i]
    return 0
