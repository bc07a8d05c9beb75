"""PPO on the market workload, end to end in one jit, in the style of PureJaxRL.

In the shapes, T is steps, E environments, B = T * E and M the minibatch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bench.peers import gae_jax, market_jax, workload

SETTINGS = workload.PPO


@dataclass(frozen=True)
class Options:
    """Ways to run the same iteration. The default is the original; nothing else is measured.

    Every option keeps the work: as many network passes, updates, random draws of the same kind
    and samples. Only `generator`, `sampling` and `shuffle` change which numbers are drawn.

    Attributes:
        donate: give the old parameters, optimizer state and environments to the jit, which may
            then write in place. They are under 2 MB, so little is expected; the trajectory, the
            large part, lives inside the jit either way.
        unroll_rollout, unroll_advantage, unroll_update: steps of each scan in one trip of the
            device loop. It divides the loop's cost a step and lets kernels of neighbouring steps
            be captured together; it costs compile time.
        advantage: "scan", or "associative" for log2(T) wide passes in place of T narrow ones.
        gather: how a minibatch is collected by permuted index. "columns" gathers each of the six
            arrays; a random 4-byte element costs a 32-byte sector, five times a sample. "packed"
            keeps the five scalars of a sample in one 32-byte row, so they cost one sector and one
            gather. "epoch" reorders the whole batch once an epoch, as PureJaxRL does, and the
            minibatches are then contiguous slices: fewer kernels an update, one more pass over
            the batch. Observations are gathered in the network's dtype, bf16, in all three.
        shuffle: "permutation" is `jax.random.permutation`, which sorts twice at these sizes;
            "sort" orders by one draw of 32 random bits. Ties, 128 pairs in a million, keep their
            order.
        generator: JAX's random generator. Threefry costs many integer operations a number; "rbg"
            and "unsafe_rbg" use the device's Philox.
        sampling: "gumbel" draws three uniforms and takes six logarithms an action; "inverse" draws
            one uniform and compares it with the cumulative probabilities.
        flat_optimizer: clip and Adam on one flat vector in place of eight arrays, for fewer
            kernels an update.
        narrow_table: keep the features in the network's dtype in rows of 112 aligned bytes. The
            observations are the same, bit for bit.
        compiler_options: XLA's options for the jit, as (name, value) pairs; for example
            `(("xla_gpu_enable_command_buffer", "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE"),)`
            asks for whole loops in CUDA graphs.
    """

    donate: bool = False
    unroll_rollout: int = 1
    unroll_advantage: int = 1
    unroll_update: int = 1
    advantage: str = "scan"
    gather: str = "columns"
    shuffle: str = "permutation"
    generator: str = "threefry2x32"
    sampling: str = "gumbel"
    flat_optimizer: bool = False
    narrow_table: bool = False
    compiler_options: tuple = ()

    def __post_init__(self):
        for name, allowed in (
            ("advantage", ("scan", "associative")),
            ("gather", ("columns", "packed", "epoch")),
            ("shuffle", ("permutation", "sort")),
            ("generator", ("threefry2x32", "rbg", "unsafe_rbg")),
            ("sampling", ("gumbel", "inverse")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")


# The lean set first, then what it adds up to; the loops are unrolled last because that costs the
# most compile time.
LEAN = {
    "donate": True,
    "gather": "packed",
    "shuffle": "sort",
    "flat_optimizer": True,
    "narrow_table": True,
}
FAST_RANDOM = {"generator": "unsafe_rbg", "sampling": "inverse"}
UNROLLED = {"unroll_rollout": 4, "unroll_advantage": 8, "unroll_update": 4}
VARIANTS = {
    "original": {},
    "lean": LEAN,
    "lean, fast random": {**LEAN, **FAST_RANDOM},
    "lean, fast random, epoch gather": {**LEAN, **FAST_RANDOM, "gather": "epoch"},
    "lean, fast random, unrolled": {**LEAN, **FAST_RANDOM, **UNROLLED},
}


class Trajectory(NamedTuple):
    """One rollout, each [T, E], observations [T, E, 56] in the network's dtype."""

    observation: Any
    action: Any
    log_probability: Any
    value: Any
    reward: Any
    done: Any


class Samples(NamedTuple):
    """What an update reads, each [B] or [M], observations [B, 56] in the network's dtype."""

    observation: Any
    action: Any
    log_probability: Any
    value: Any
    advantage: Any
    target: Any


def advantages(reward, value, done, last_value, gamma, lam, unroll=1):
    """Advantages [T, E] by one reverse scan that reads the rollout as it was written.

    Args:
        reward, value: float32 [T, E].
        done: bool [T, E].
        last_value: float32 [E], the value after the last step.
    """

    def back(carry, step):
        advantage, next_value = carry
        value, reward, done = step
        alive = 1.0 - done
        delta = reward + gamma * next_value * alive - value
        advantage = delta + gamma * lam * alive * advantage
        return (advantage, value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(back, start, (value, reward, done), reverse=True, unroll=unroll)[1]


def loss(parameters, samples, dtype):
    """The clipped PPO loss of one minibatch, advantages normalised within it."""
    outputs = market_jax.forward(parameters, samples.observation, dtype)
    logits, value = outputs[:, : workload.ACTIONS], outputs[:, workload.ACTIONS]
    clip = SETTINGS["clip"]
    log_probabilities = jax.nn.log_softmax(logits)
    ratio = jnp.exp(chosen(log_probabilities, samples.action) - samples.log_probability)
    advantage = samples.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    near = samples.value + jnp.clip(value - samples.value, -clip, clip)
    errors = jnp.maximum((value - samples.target) ** 2, (near - samples.target) ** 2)
    entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
    return policy_loss + SETTINGS["value"] * 0.5 * errors.mean() - SETTINGS["entropy"] * entropy


def chosen(values, action):
    """The entry of each row of [B, 3] that the action names, [B]."""
    return jnp.take_along_axis(values, action[:, None], 1)[:, 0]


def packed(samples):
    """Observations [B, 56] and the five scalars of a sample in one row of 8 float32."""
    scalars = [x.astype(jnp.float32) for x in samples[1:]]
    return samples.observation, jnp.stack([*scalars, *[jnp.zeros_like(scalars[0])] * 3], -1)


def unpacked(observation, scalars):
    """The inverse of `packed`; small whole actions are exact in float32."""
    action, *rest = scalars[:, :5].T
    return Samples(observation, action.astype(jnp.int32), *rest)


class PPO:
    """The whole of PPO on E environments, T steps an iteration.

    The table is an argument of the jit, so 200 MB of constants are not compiled into it.

    Args:
        envs, steps, minibatch: E, T and M; M must divide T * E.
        rows: rows of the market table.
        float32: run the network in float32 in place of bf16.
        options: see `Options`.

    Attributes:
        env_steps: T * E an iteration.
        updates: minibatch updates an iteration.
        flops: floating-point operations of the network an iteration, a backward pass as two
            forward passes.
        parameters: four (weight, bias), as they stand.
        mean_reward: of the last iteration, on the device.
        trajectory: of the last `rollout()`.
    """

    def __init__(self, envs, steps, minibatch, rows=1_000_000, float32=False, seed=0, **options):
        if (envs * steps) % minibatch:
            raise ValueError(f"minibatch must divide {envs * steps} samples, got {minibatch}")
        self.envs, self.steps, self.minibatch, self.rows = envs, steps, minibatch, rows
        self.options = Options(**options)
        self.epochs = SETTINGS["epochs"]
        self.env_steps = envs * steps
        self.updates = self.epochs * self.env_steps // minibatch
        passes = self.env_steps + envs + 3 * self.epochs * self.env_steps
        self.flops = passes * workload.FLOPS_FORWARD
        self.dtype = jnp.float32 if float32 else jnp.bfloat16
        self.dtype_name = "float32" if float32 else "bfloat16"

        key = jax.random.key(seed, impl=self.options.generator)
        self._table = market_jax.device_table(
            rows, self.dtype if self.options.narrow_table else None
        )
        self._optimizer = self._make_optimizer()
        self.parameters = market_jax.initial_parameters(key, jax.nn.initializers.orthogonal(2**0.5))
        self._optimizer_state = self._optimizer.init(self.parameters)
        self._state = market_jax.reset(key, envs, rows)
        self._key = key
        self.mean_reward = self.trajectory = None

        compiler_options = dict(self.options.compiler_options) or None
        self._iterate = jax.jit(
            self._iteration,
            donate_argnums=(1, 2, 3) if self.options.donate else (),
            compiler_options=compiler_options,
        )
        self._roll = jax.jit(self._rollout, compiler_options=compiler_options)

    def warm(self):
        """Compile the iteration and the rollout, and run each.

        The iteration runs twice: a second call on the first one's outputs must not compile again.
        """
        self.iteration()
        self.iteration()
        self.rollout()

    def iteration(self):
        """One whole iteration: rollout, advantages, every epoch of updates. Blocks until done."""
        self.run(1)

    def run(self, iterations):
        """Iterations one after the other, queued while the ones before run. Blocks until done."""
        for _ in range(iterations):
            result = self._iterate(
                self._table, self.parameters, self._optimizer_state, self._state, self._key
            )
            self.parameters, self._optimizer_state, self._state, self._key, self.mean_reward = (
                result
            )
        jax.block_until_ready(result)

    def rollout(self):
        """T steps of every environment alone, from where they stand. Blocks until done."""
        _, self.trajectory = self._roll(self._table, self.parameters, self._state, self._key)
        jax.block_until_ready(self.trajectory)

    def _make_optimizer(self):
        """Clip by the global norm, then Adam."""
        optimizer = optax.chain(
            optax.clip_by_global_norm(SETTINGS["max_grad_norm"]),
            optax.adam(SETTINGS["lr"], eps=SETTINGS["adam_eps"]),
        )
        return optax.flatten(optimizer) if self.options.flat_optimizer else optimizer

    def _policy(self, parameters, observation):
        """Logits [E, 3] and values [E]."""
        outputs = market_jax.forward(parameters, observation, self.dtype)
        return outputs[:, : workload.ACTIONS], outputs[:, workload.ACTIONS]

    def _sample(self, key, logits):
        """Actions [E] drawn from the softmax of the logits."""
        if self.options.sampling == "gumbel":
            return jax.random.categorical(key, logits)
        uniform = jax.random.uniform(key, (self.envs, 1))
        below = jnp.cumsum(jax.nn.softmax(logits), -1)[:, :-1] <= uniform
        return below.sum(-1, dtype=jnp.int32)

    def _rollout(self, table, parameters, state, key):
        """The final state and the trajectory of T steps."""

        def one_step(state, key):
            action_key, reset_key = jax.random.split(key)
            observation = market_jax.observe(table, state, self.dtype)
            logits, value = self._policy(parameters, observation)
            action = self._sample(action_key, logits)
            log_probability = chosen(jax.nn.log_softmax(logits), action)
            _, state, reward, done = market_jax.step(table, state, action, reset_key)
            return state, Trajectory(observation, action, log_probability, value, reward, done)

        keys = jax.random.split(key, self.steps)
        return jax.lax.scan(one_step, state, keys, unroll=self.options.unroll_rollout)

    def _advantages(self, trajectory, last_value):
        """Advantages [T, E]."""
        gamma, lam = SETTINGS["gamma"], SETTINGS["lam"]
        reward, value, done = trajectory.reward, trajectory.value, trajectory.done
        if self.options.advantage == "associative":
            value = jnp.concatenate([value, last_value[None]])
            return gae_jax.by_associative_scan(reward, value, done.astype(jnp.float32), gamma, lam)
        return advantages(
            reward, value, done, last_value, gamma, lam, self.options.unroll_advantage
        )

    def _permutation(self, key):
        """A random order of the B samples."""
        if self.options.shuffle == "permutation":
            return jax.random.permutation(key, self.env_steps)
        return jnp.argsort(jax.random.bits(key, (self.env_steps,)))

    def _minibatches(self, samples, key):
        """The epoch's minibatches as something to scan, and how one becomes `Samples`."""
        order = self._permutation(key)
        if self.options.gather == "epoch":
            shape = (-1, self.minibatch)
            moved = jax.tree.map(lambda x: x[order].reshape(*shape, *x.shape[1:]), samples)
            return moved, lambda minibatch: minibatch
        order = order.reshape(-1, self.minibatch)
        if self.options.gather == "packed":
            return order, lambda index: unpacked(*(x[index] for x in samples))
        return order, lambda index: jax.tree.map(lambda x: x[index], samples)

    def _iteration(self, table, parameters, optimizer_state, state, key):
        """The pure function behind `iteration`."""
        key, rollout_key, update_key = jax.random.split(key, 3)
        state, trajectory = self._rollout(table, parameters, state, rollout_key)
        observation = market_jax.observe(table, state, self.dtype)
        _, last_value = self._policy(parameters, observation)
        advantage = self._advantages(trajectory, last_value)
        columns = (*trajectory[:4], advantage, advantage + trajectory.value)
        samples = Samples(*(x.reshape(self.env_steps, *x.shape[2:]) for x in columns))
        if self.options.gather == "packed":
            samples = packed(samples)

        def epoch(carry, key):
            minibatches, collect = self._minibatches(samples, key)

            def update(carry, minibatch):
                parameters, optimizer_state = carry
                gradient = jax.grad(loss)(parameters, collect(minibatch), self.dtype)
                change, optimizer_state = self._optimizer.update(gradient, optimizer_state)
                return (optax.apply_updates(parameters, change), optimizer_state), None

            unroll = self.options.unroll_update
            return jax.lax.scan(update, carry, minibatches, unroll=unroll)[0], None

        keys = jax.random.split(update_key, self.epochs)
        (parameters, optimizer_state), _ = jax.lax.scan(epoch, (parameters, optimizer_state), keys)
        return parameters, optimizer_state, state, key, trajectory.reward.mean()
