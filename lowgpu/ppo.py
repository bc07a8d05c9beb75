"""Proximal policy optimisation: its memory laid out, and its iteration as a list of ops."""

from lowgpu.initialize import initial_parameters, network_of
from lowgpu.ppo_plan import STATE, expected_arrays, plan_of, settings_of
from lowgpu.training import EPISODE, Trainer, TrainingError, means
from lowgpu_kernels import (
    episode_statistics,
    gae,
    minibatch_moments,
    permutation,
    ppo_update,
    rollout,
)
from lowgpu_kernels.ops.ppo.ppo_loss import STATISTICS

__all__ = ["PPO", "TrainingError"]


class PPO(Trainer):
    """The trainer of a PPOConfig; see Trainer."""

    NAME = "ppo"
    network_of, plan_of = staticmethod(network_of), staticmethod(plan_of)
    settings_of = staticmethod(settings_of)
    expected_arrays = staticmethod(expected_arrays)

    @staticmethod
    def state_names(config):
        return STATE

    @staticmethod
    def initial(config, env):
        return {"parameters": initial_parameters(network_of(config, env), env, config.seed)}

    def _lay_out(self):
        """Views into the buffers, made once: their addresses are in the graph."""
        b, config = self.buffers, self.config
        self._rollout = (
            b.state_floats,
            b.state_ints,
            b.action,
            b.log_probability,
            b.value,
            b.reward,
            b.terminated,
            b.truncated,
            b.final_value,
            b.last_value,
        )
        # The same memory by transition: row t * E + e.
        self._states = (
            b.state_floats.reshape(config.batch, -1),
            b.state_ints.reshape(config.batch, -1),
        )
        self._taken = tuple(
            a.reshape(-1) for a in (b.action, b.log_probability, b.value, b.advantage, b.returns)
        )
        self._advantage = b.advantage.reshape(-1)
        self._minibatches = b.index.reshape(config.minibatches, config.minibatch)
        self._episodes, losses, norms = _report_views(b.report, config.updates)
        epochs = config.epochs, config.minibatches
        self._learned = list(zip(losses.reshape(*epochs, -1), norms.reshape(epochs)))
        self._graphs = {}

    def _iterate(self):
        """One iteration: act, judge, learn. Every array is there, and stays where it is."""
        b, call, data = self.buffers, self._call, self._data
        call(rollout, b.parameters, b.floats, b.ints, b.clock, *data, out=self._rollout)
        call(
            gae,
            b.reward,
            b.value,
            b.last_value,
            b.terminated,
            b.truncated,
            b.final_value,
            out=(b.advantage, b.returns, b.rollout_moments),
        )
        ended = b.reward, b.terminated, b.truncated
        call(episode_statistics, *ended, b.running_return, b.running_length, out=self._episodes)
        for epoch, learned in enumerate(self._learned):
            call(permutation, b.clock, epoch=epoch, out=b.index)
            call(minibatch_moments, self._advantage, b.index, out=b.moments)
            call(
                ppo_update,
                *(b.parameters, b.m, b.v, b.step),
                *(*self._states, *data, self._minibatches),
                *(*self._taken, b.moments),
                out=(b.gradient, *learned),
            )

    def _repeat(self):
        if self._slot not in self._graphs:
            changes = {name: getattr(self.buffers, name) for name in STATE}
            self._graphs[self._slot] = self._queue.repeatable(self._iterate, changes)
        self._graphs[self._slot]()

    def _updates(self, report, iteration):
        _, losses, norms = _report_views(report, self.config.updates)
        return (STATISTICS, losses), (("norm",), norms)

    def _figures(self, learned, iteration):
        config = self.config
        (names, losses), (_, norms) = learned
        left = 1 - (iteration - 1) / config.iterations if config.anneal else 1
        shown = means(names, losses) | means(("norm",), norms[:, None])
        del shown["non_finite_rows"]
        return shown | {"lr": config.lr * left}


def _report_views(report, updates):
    """The parts of a report: sums over episodes [4], statistics [updates, 8], norms [updates]."""
    first, last = len(EPISODE), len(EPISODE) + updates * len(STATISTICS)
    return report[:first], report[first:last].reshape(updates, -1), report[last:]
