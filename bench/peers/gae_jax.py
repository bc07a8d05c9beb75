"""Generalised advantage estimation in JAX: a reverse scan, and an associative scan.

In the shapes, T is steps and E environments. Source of the recursion: Schulman et al. 2016,
equation 16, with the bootstrap cut where an episode ended.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers import workload

VARIANTS = {
    "original": {"form": "associative"},
    "scan": {"form": "scan"},
    "scan unrolled": {"form": "scan", "unroll": 8},
}


def terms(reward, value, done, gamma, lam):
    """The one-step errors and the decays of `advantage[t] = delta[t] + decay[t] advantage[t+1]`.

    Args:
        reward: [T, E].
        value: [T + 1, E]; the last row is the value after the last step.
        done: [T, E], 1 where the episode ended with that step.
    """
    alive = 1 - done
    return reward + gamma * value[1:] * alive - value[:-1], gamma * lam * alive


def by_scan(reward, value, done, gamma, lam, unroll=1):
    """Advantages [T, E] by one `lax.scan` from the last step to the first."""

    def back(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    start = jnp.zeros_like(value[0])
    steps = terms(reward, value, done, gamma, lam)
    return jax.lax.scan(back, start, steps, reverse=True, unroll=unroll)[1]


def by_associative_scan(reward, value, done, gamma, lam):
    """Advantages [T, E] by `lax.associative_scan` over the maps x -> delta + decay x."""

    def compose(later, earlier):
        later_decay, later_delta = later
        earlier_decay, earlier_delta = earlier
        return later_decay * earlier_decay, earlier_decay * later_delta + earlier_delta

    delta, decay = terms(reward, value, done, gamma, lam)
    return jax.lax.associative_scan(compose, (decay, delta), reverse=True)[1]


class GAE:
    """Advantages of random float32 data, T x E.

    The inputs are random, and about one step in a hundred ends an episode: constant inputs would
    hide mistakes and can run faster.

    Variants: `unroll` runs that many steps of the scan in one trip of the device loop, which
    divides the loop's own cost a step.

    Attributes:
        steps, envs: T and E.
        inputs: `reward` [T, E], `value` [T + 1, E] and `done` [T, E], float32 on the device.
        advantage: the last result, [T, E].
        nbytes: reward, value and done read once and the advantages written once.
    """

    def __init__(self, steps, envs, form="associative", unroll=1, seed=0):
        if form not in ("associative", "scan"):
            raise ValueError(f"form must be 'associative' or 'scan', got {form!r}")
        self.steps, self.envs, self.form, self.unroll = steps, envs, form, unroll
        self.nbytes = 4 * envs * (4 * steps + 1)
        random = np.random.default_rng(seed)
        done = random.random((steps, envs), dtype=np.float32) < 0.01
        self.inputs = (
            jnp.asarray(random.standard_normal((steps, envs), dtype=np.float32)),
            jnp.asarray(random.standard_normal((steps + 1, envs), dtype=np.float32)),
            jnp.asarray(done.astype(np.float32)),
        )
        self.advantage = None
        gamma, lam = workload.PPO["gamma"], workload.PPO["lam"]

        def advantages(reward, value, done):
            if form == "associative":
                return by_associative_scan(reward, value, done, gamma, lam)
            return by_scan(reward, value, done, gamma, lam, unroll)

        self._advantages = jax.jit(advantages)

    def warm(self):
        """Compile, and run once."""
        self.run()

    def run(self, calls=1):
        """Queue the work `calls` times, then block until the last is done.

        A blocking call costs some tens of microseconds of host time, more than the work at small
        sizes. Many calls a sample, divided by their number, leave the device's time.
        """
        for _ in range(calls):
            self.advantage = self._advantages(*self.inputs)
        jax.block_until_ready(self.advantage)
