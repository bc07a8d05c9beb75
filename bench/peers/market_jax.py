"""The market environment and network in JAX, shared by the PPO and the DQN peer.

In the shapes, R is table rows, E environments, B any batch.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.peers import workload


class Table(NamedTuple):
    """`features` [R, 51], or [R, 56] once narrowed, and `price` float32 [R]."""

    features: Any
    price: Any


class State(NamedTuple):
    """One entry an environment, each [E]: `row`, `position`, `entry_price` and episode `step`."""

    row: Any
    position: Any
    entry_price: Any
    step: Any


def device_table(rows, narrow_to=None):
    """The workload's table on the device.

    `narrow_to` stores the features in that dtype in rows of 56 with a zero tail. Rounding an
    element before it is gathered or after gives the same number, so observations do not change;
    a row becomes 112 aligned bytes instead of 204.
    """
    features, price = map(jnp.asarray, workload.table(rows))
    if narrow_to is not None:
        features = jnp.pad(features, ((0, 0), (0, workload.PADDED - workload.FEATURES)))
        features = features.astype(narrow_to)
    return Table(features, price)


def initial_parameters(key, initializer):
    """Four layers of (weight [inputs, outputs], bias [outputs]) in float32."""
    sizes = list(pairwise(workload.LAYERS))
    keys = jax.random.split(key, len(sizes))
    return [(initializer(k, size), jnp.zeros(size[1])) for k, size in zip(keys, sizes, strict=True)]


def forward(parameters, observation, dtype):
    """The 8 outputs, float32 [B, 8], of the network run in `dtype`."""
    hidden = observation.astype(dtype)
    for layer, (weight, bias) in enumerate(parameters):
        hidden = hidden @ weight.astype(dtype) + bias.astype(dtype)
        if layer < len(parameters) - 1:
            hidden = jax.nn.relu(hidden)
    return hidden.astype(jnp.float32)


def reset(key, envs, rows):
    """Flat environments, each at a random row that leaves room for a whole episode."""
    row = jax.random.randint(key, (envs,), 0, rows - workload.EPISODE - 1)
    return State(row, jnp.zeros(envs), jnp.ones(envs), jnp.zeros(envs, jnp.int32))


def observe(table, state, dtype):
    """Observations [E, 56] in `dtype`."""
    price = table.price[state.row]
    unrealised = jnp.where(state.position != 0, state.position * (price / state.entry_price - 1), 0)
    portfolio = jnp.stack([state.position, unrealised, state.step / workload.EPISODE], -1)
    if table.features.shape[1] == workload.PADDED:
        tail = workload.PADDED - workload.STATE
        placed = jnp.pad(portfolio.astype(dtype), ((0, 0), (workload.FEATURES, tail)))
        return table.features[state.row].astype(dtype) + placed
    padding = jnp.zeros((state.row.shape[0], workload.PADDED - workload.STATE))
    return jnp.concatenate([table.features[state.row], portfolio, padding], -1).astype(dtype)


def step(table, state, action, key):
    """One step of every environment.

    Returns:
        final: the state after the step, before any reset.
        state: the same, with the environments whose episode ended started again.
        reward: float32 [E].
        done: bool [E].
    """
    position = (action - 1).astype(jnp.float32)
    price = table.price[state.row]
    gain = position * (table.price[state.row + 1] / price - 1)
    cost = workload.COST * jnp.abs(position - state.position)
    entry_price = jnp.where(position != state.position, price, state.entry_price)
    final = State(state.row + 1, position, entry_price, state.step + 1)
    done = final.step >= workload.EPISODE
    fresh = reset(key, state.row.shape[0], table.price.shape[0])
    restarted = State(*(jnp.where(done, new, old) for new, old in zip(fresh, final, strict=True)))
    return final, restarted, (gain - cost) * workload.REWARD_SCALE, done
