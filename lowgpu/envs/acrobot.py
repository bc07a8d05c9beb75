"""Two links hanging from a fixed pivot, swung up by a motor between them: a classic control task."""

import functools
import math

from lowgpu_kernels.device import f32, i32, scalar
from lowgpu_kernels.device.maths import (
    HALF_PI_HIGH,
    HALF_PI_LOW,
    HALF_PI_MIDDLE,
    ROUNDER,
    cos_f32,
    sin_f32,
)
from lowgpu_kernels.dims import FLAG, Int
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env

# Links of 1 kg and 1 m, with their centre of mass in the middle and a moment of inertia of 1 kg m^2.
GRAVITY_1 = f32(14.7)  # N m, of the upper link's middle and of the joint: 9.8 * (0.5 + 1)
GRAVITY_2 = f32(4.9)  # N m, of the lower link's middle: 9.8 * 0.5
SECONDS = f32(0.2)  # a step
HALF_SECONDS = f32(0.1)
SIXTH_SECONDS = f32(0.2 / 6)
PI = f32(math.pi)
TURNS_A_RADIAN = f32(0.5 / math.pi)
FASTEST_1 = f32(4 * math.pi)  # rad/s
FASTEST_2 = f32(9 * math.pi)  # rad/s
LARGEST_START = f32(0.1)

_MAX_STEPS = Int(1)


def acrobot(max_steps=500, limit_terminates=False):
    """The environment of Gymnasium's Acrobot-v1, with float32 arithmetic.

    With c = cos(theta_2), s = sin(theta_2), the accelerations solve

        (3.5 + c)      theta_acc_1 + (1.25 + c / 2) theta_acc_2 = -phi_1
        (1.25 + c / 2) theta_acc_1 + 1.25           theta_acc_2 = torque - phi_2 - s theta_dot_1^2 / 2

        phi_2 = 4.9 sin(theta_1 + theta_2)
        phi_1 = 14.7 sin(theta_1) + phi_2 - s theta_dot_2 (theta_dot_2 / 2 + theta_dot_1)

    and a step is one of the classic fourth-order Runge-Kutta method, of 0.2 s. Then angles are
    wrapped to [-pi, pi], and velocities clipped to 4 pi and 9 pi rad/s. The state is theta_1 and
    theta_2 (rad; from straight down, and from the upper link) and their velocities theta_dot_1 and
    theta_dot_2, each uniform in [-0.1, 0.1) at the start. The observation is cos(theta_1),
    sin(theta_1), cos(theta_2), sin(theta_2), theta_dot_1, theta_dot_2. Actions 0, 1 and 2 are a
    torque of -1, 0 and 1 N m between the links. The reward is -1 a step, and 0 for the one after
    which the tip is more than 1 m above the pivot, which terminates the episode:

        -cos(theta_1) - cos(theta_1 + theta_2) > 1

    The episode is truncated after `max_steps`.

    Args:
        max_steps: most steps in an episode, from 1.
        limit_terminates: whether reaching `max_steps` counts as a termination instead, as
            trainers that do not bootstrap at time limits have it.

    Returns:
        An Env; equal arguments give the same one, so it is compiled once.

    Raises:
        TypeError, ValueError: an argument out of range, by name.

    Source: Sutton & Barto 1998, section 11.3, whose equations these are, solved for both
    accelerations at once; constants, wrapping and start as in Gymnasium 1.x.
    """
    return _acrobot(_MAX_STEPS("max_steps", max_steps), FLAG("limit_terminates", limit_terminates))


@scalar
def accelerations(theta_1, theta_2, theta_dot_1, theta_dot_2, torque):
    """(theta_acc_1, theta_acc_2) in rad/s^2."""
    sine, cosine = sin_f32(theta_2), cos_f32(theta_2)
    inertia_1 = f32(3.5) + cosine
    coupling = f32(1.25) + f32(0.5) * cosine
    # inertia_1 * 1.25 - coupling^2, without what cancels.
    determinant = f32(2.8125) - f32(0.25) * (cosine * cosine)
    phi_2 = GRAVITY_2 * sin_f32(theta_1 + theta_2)
    whirl = sine * (theta_dot_2 * (f32(0.5) * theta_dot_2 + theta_dot_1))
    phi_1 = (GRAVITY_1 * sin_f32(theta_1) + phi_2) - whirl
    push = (torque - phi_2) - f32(0.5) * (sine * (theta_dot_1 * theta_dot_1))
    inverse = f32(1) / determinant
    return (
        -(f32(1.25) * phi_1 + coupling * push) * inverse,
        (inertia_1 * push + coupling * phi_1) * inverse,
    )


@scalar
def wrapped(angle):
    """The same angle in [-pi, pi], which rounding may pass by 2^-23 of the angle given.

    An angle that is in there is kept as it is.
    """
    if -PI <= angle <= PI:
        return angle
    quarters = f32(4) * ((angle * TURNS_A_RADIAN + ROUNDER) - ROUNDER)
    return ((angle - quarters * HALF_PI_HIGH) - quarters * HALF_PI_MIDDLE) - quarters * HALF_PI_LOW


@functools.cache
def _acrobot(max_steps, limit_terminates):
    at_limit = i32(TERMINATED if limit_terminates else TRUNCATED)

    def step(floats, ints, action, u, series, rows, reward):
        torque = f32(action) - f32(1)
        theta_1, theta_2, dot_1, dot_2 = floats[0], floats[1], floats[2], floats[3]
        # k: a stage's change of state a second. sum: of k, weighted 1, 2, 2, 1.
        k_1, k_2, k_3, k_4 = f32(0), f32(0), f32(0), f32(0)
        sum_1, sum_2, sum_3, sum_4 = f32(0), f32(0), f32(0), f32(0)
        for stage in range(4):
            ahead = f32(0) if stage == 0 else SECONDS if stage == 3 else HALF_SECONDS
            weight = f32(2) if stage == 1 or stage == 2 else f32(1)
            at_1, at_2 = theta_1 + ahead * k_1, theta_2 + ahead * k_2
            k_1, k_2 = dot_1 + ahead * k_3, dot_2 + ahead * k_4
            k_3, k_4 = accelerations(at_1, at_2, k_1, k_2, torque)
            sum_1, sum_2 = sum_1 + weight * k_1, sum_2 + weight * k_2
            sum_3, sum_4 = sum_3 + weight * k_3, sum_4 + weight * k_4
        theta_1 = wrapped(theta_1 + SIXTH_SECONDS * sum_1)
        theta_2 = wrapped(theta_2 + SIXTH_SECONDS * sum_2)
        floats[0] = theta_1
        floats[1] = theta_2
        floats[2] = min(max(dot_1 + SIXTH_SECONDS * sum_3, -FASTEST_1), FASTEST_1)
        floats[3] = min(max(dot_2 + SIXTH_SECONDS * sum_4, -FASTEST_2), FASTEST_2)
        ints[0] = ints[0] + i32(1)
        if -cos_f32(theta_1) - cos_f32(theta_1 + theta_2) > f32(1):
            reward[0] = f32(0)
            return TERMINATED
        reward[0] = f32(-1)
        return at_limit if ints[0] >= max_steps else 0

    return Env(
        name="acrobot",
        observation=6,
        actions=3,
        floats=("theta_1", "theta_2", "theta_dot_1", "theta_dot_2"),
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
    out[0] = cos_f32(floats[0])
    out[1] = sin_f32(floats[0])
    out[2] = cos_f32(floats[1])
    out[3] = sin_f32(floats[1])
    out[4] = floats[2]
    out[5] = floats[3]
    return 0
