"""Double DQN on the market workload, end to end in one jit, with the replay on the device.

In the shapes, E is environments, B the batch, C the replay's capacity.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bench.peers import market_jax, workload

SETTINGS = workload.DQN


@dataclass(frozen=True)
class Options:
    """Ways to run the same work. The default is the original; nothing else is measured.

    Attributes:
        packed: keep both observations of a transition in one row of 112 numbers and its three
            scalars in one row of 4 float32, so that a batch is two gathers in place of five and a
            transition's scalars share one 32-byte sector.
        unroll_step: environment steps in one trip of the device loop.
        unroll_update: updates in one trip of the device loop; it has no use at one update a step.
        generator: JAX's random generator; "rbg" and "unsafe_rbg" use the device's Philox, cheaper
            than Threefry.
        flat_optimizer: Adam on one flat vector in place of eight arrays, for fewer kernels.
        narrow_table: keep the features in the network's dtype in rows of 112 aligned bytes. The
            observations are the same, bit for bit.
        compiler_options: XLA's options for the jit, as (name, value) pairs.
    """

    packed: bool = False
    unroll_step: int = 1
    unroll_update: int = 1
    generator: str = "threefry2x32"
    flat_optimizer: bool = False
    narrow_table: bool = False
    compiler_options: tuple = ()

    def __post_init__(self):
        allowed = ("threefry2x32", "rbg", "unsafe_rbg")
        if self.generator not in allowed:
            raise ValueError(f"generator must be one of {allowed}, got {self.generator!r}")


LEAN = {"packed": True, "flat_optimizer": True, "narrow_table": True}
VARIANTS = {
    "original": {},
    "lean": LEAN,
    "lean, fast random": {**LEAN, "generator": "unsafe_rbg"},
    "lean, fast random, unrolled": {
        **LEAN,
        "generator": "unsafe_rbg",
        "unroll_step": 2,
        "unroll_update": 4,
    },
}


class Transitions(NamedTuple):
    """Observations [B, 56] in the network's dtype, the rest [B]; `done` is float32."""

    observation: Any
    action: Any
    reward: Any
    done: Any
    next_observation: Any


class Carry(NamedTuple):
    """All that an iteration reads and writes."""

    parameters: Any
    target: Any
    optimizer_state: Any
    state: Any
    replay: Any
    at: Any
    key: Any


def packed(transitions):
    """Both observations [B, 112], and action, reward, done and a zero in one row [B, 4]."""
    pair = jnp.concatenate([transitions.observation, transitions.next_observation], -1)
    action = transitions.action.astype(jnp.float32)
    columns = [action, transitions.reward, transitions.done, jnp.zeros_like(action)]
    return pair, jnp.stack(columns, -1)


def unpacked(pair, scalars):
    """The inverse of `packed`; small whole actions are exact in float32."""
    action, reward, done, _ = scalars.T
    observation, next_observation = jnp.split(pair, 2, -1)
    return Transitions(observation, action.astype(jnp.int32), reward, done, next_observation)


def action_values(parameters, observation, dtype):
    """The values [B, 3] of the three actions."""
    return market_jax.forward(parameters, observation, dtype)[:, : workload.ACTIONS]


def loss(parameters, target, batch, dtype):
    """The Huber loss against the double-DQN target."""

    def chosen(values, action):
        return jnp.take_along_axis(values, action[:, None], 1)[:, 0]

    value = chosen(action_values(parameters, batch.observation, dtype), batch.action)
    best = action_values(parameters, batch.next_observation, dtype).argmax(-1)
    next_value = chosen(action_values(target, batch.next_observation, dtype), best)
    wanted = batch.reward + SETTINGS["gamma"] * (1 - batch.done) * next_value
    wanted = jax.lax.stop_gradient(wanted)
    return optax.huber_loss(value, wanted, delta=SETTINGS["huber"]).mean()


class DQN:
    """Double DQN: each iteration steps every environment into the replay, then updates.

    An update draws `batch` transitions uniformly and is followed by a soft target update. The
    carry is donated, so the replay is written in place. The table is an argument of the jit, so
    200 MB of constants are not compiled into it.

    Args:
        envs, batch, capacity: E, B and C, in transitions; E must divide C.
        updates: updates an iteration.
        rows: rows of the market table.
        float32: run the network in float32 in place of bf16.
        options: see `Options`.

    Attributes:
        flops: floating-point operations of the network an iteration: the acting pass, and per
            update three forward passes and a backward pass of two.
        parameters, target: four (weight, bias) each, as they stand.
        mean_reward: of each iteration of the last run, on the device.
    """

    def __init__(
        self,
        envs=4096,
        batch=8192,
        updates=1,
        capacity=1 << 20,
        rows=1_000_000,
        float32=False,
        seed=0,
        **options,
    ):
        if capacity % envs:
            raise ValueError(f"capacity must be a multiple of {envs} environments, got {capacity}")
        self.envs, self.batch, self.updates = envs, batch, updates
        self.capacity, self.rows = capacity, rows
        self.options = Options(**options)
        self.flops = (envs + 5 * updates * batch) * workload.FLOPS_FORWARD
        self.dtype = jnp.float32 if float32 else jnp.bfloat16
        self.dtype_name = "float32" if float32 else "bfloat16"
        self.mean_reward = None

        self._table = market_jax.device_table(
            rows, self.dtype if self.options.narrow_table else None
        )
        optimizer = optax.adam(SETTINGS["lr"], eps=SETTINGS["adam_eps"])
        self._optimizer = optax.flatten(optimizer) if self.options.flat_optimizer else optimizer
        self._carry = self._initial(jax.random.key(seed, impl=self.options.generator))
        self._run = jax.jit(
            self._iterations,
            static_argnums=2,
            donate_argnums=1,
            compiler_options=dict(self.options.compiler_options) or None,
        )

    @property
    def parameters(self):
        return self._carry.parameters

    @property
    def target(self):
        return self._carry.target

    def warm(self, iterations=200):
        """Compile for that many iterations and run them; the replay starts at zero.

        They run twice: a second call on the first one's outputs must not compile again.
        """
        self.run(iterations)
        self.run(iterations)

    def run(self, iterations=200):
        """Run that many iterations in one call, and block until done."""
        self._carry, self.mean_reward = self._run(self._table, self._carry, iterations)
        jax.block_until_ready((self._carry, self.mean_reward))

    def _initial(self, key):
        """The carry before the first step, with an empty replay."""
        parameters = market_jax.initial_parameters(key, jax.nn.initializers.he_uniform())
        observations = jnp.zeros((self.capacity, workload.PADDED), self.dtype)
        numbers = jnp.zeros(self.capacity)
        actions = jnp.zeros(self.capacity, jnp.int32)
        replay = Transitions(observations, actions, numbers, numbers, observations)
        if self.options.packed:
            replay = packed(replay)
        # Donated buffers must be distinct: what starts out shared is copied.
        target, replay = jax.tree.map(jnp.copy, (parameters, replay))
        return Carry(
            parameters,
            target,
            self._optimizer.init(parameters),
            market_jax.reset(key, self.envs, self.rows),
            replay,
            jnp.int32(0),
            jnp.copy(key),
        )

    def _act(self, parameters, observation, uniform_key, action_key):
        """Epsilon-greedy actions [E]."""
        explore = jax.random.uniform(uniform_key, (self.envs,)) < SETTINGS["exploration"]
        random = jax.random.randint(action_key, (self.envs,), 0, workload.ACTIONS)
        greedy = action_values(parameters, observation, self.dtype).argmax(-1)
        return jnp.where(explore, random, greedy).astype(jnp.int32)

    def _update(self, carry, replay, key):
        """One gradient update of `batch` samples and one soft target update."""
        parameters, target, optimizer_state = carry
        index = jax.random.randint(key, (self.batch,), 0, self.capacity)
        batch = jax.tree.map(lambda x: x[index], replay)
        if self.options.packed:
            batch = unpacked(*batch)
        gradient = jax.grad(loss)(parameters, target, batch, self.dtype)
        change, optimizer_state = self._optimizer.update(gradient, optimizer_state)
        parameters = optax.apply_updates(parameters, change)
        target = jax.tree.map(
            lambda old, new: old + SETTINGS["tau"] * (new - old), target, parameters
        )
        return parameters, target, optimizer_state

    def _iteration(self, table, carry, key):
        """One step of every environment into the replay, then the updates."""
        uniform_key, action_key, reset_key, update_key = jax.random.split(key, 4)
        observation = market_jax.observe(table, carry.state, self.dtype)
        action = self._act(carry.parameters, observation, uniform_key, action_key)
        final, state, reward, done = market_jax.step(table, carry.state, action, reset_key)
        new = Transitions(
            observation,
            action,
            reward,
            done.astype(jnp.float32),
            market_jax.observe(table, final, self.dtype),
        )
        if self.options.packed:
            new = packed(new)
        replay = jax.tree.map(
            lambda old, rows: jax.lax.dynamic_update_slice_in_dim(old, rows, carry.at, 0),
            carry.replay,
            new,
        )
        (parameters, target, optimizer_state), _ = jax.lax.scan(
            lambda learned, key: (self._update(learned, replay, key), None),
            (carry.parameters, carry.target, carry.optimizer_state),
            jax.random.split(update_key, self.updates),
            unroll=self.options.unroll_update,
        )
        at = (carry.at + self.envs) % self.capacity
        carry = Carry(parameters, target, optimizer_state, state, replay, at, carry.key)
        return carry, reward.mean()

    def _iterations(self, table, carry, iterations):
        """The pure function behind `run`."""
        key, run_key = jax.random.split(carry.key)
        return jax.lax.scan(
            lambda carry, key: self._iteration(table, carry, key),
            carry._replace(key=key),
            jax.random.split(run_key, iterations),
            unroll=self.options.unroll_step,
        )
