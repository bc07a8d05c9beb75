"""Action values in a network's output row. Twin of include/action_values.cuh.

A row holds the values of all actions, or as many advantages and then the state's value: action a is then
worth V + A[a] - mean(A).
"""

import numpy as np

from lowgpu_kernels.device import f32, i32, njit
from lowgpu_kernels.ops.rollout.acting import require_heads

LOWEST = f32(-np.inf)


@njit
def best_action(y, row, actions):
    """The first action of the largest value, which a NaN never is; 0 where none is above -inf."""
    best, largest = i32(0), LOWEST
    for a in range(actions):
        if y[row, a] > largest:
            best, largest = i32(a), y[row, a]
    return best


@njit
def value_offset(y, row, actions, duels):
    """What is added to column a of a row to make it the value of action a."""
    if not duels:
        return f32(0)
    total = f32(0)
    for a in range(actions):
        total += y[row, a]
    return y[row, actions] - total / f32(actions)


def require_values(env, network):
    """Refuse a network that does not read the env's rows or gives other than its action values."""
    named = f"{env.actions} action values or as many advantages and a value"
    require_heads(env, network, (env.actions, env.actions + 1), named)


def duels(env, network):
    """Whether the network gives advantages and a value."""
    return sum(t[-1] for t in network.towers) == env.actions + 1
