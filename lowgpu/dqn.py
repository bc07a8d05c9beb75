"""Deep Q-learning from replay: its memory laid out, and its rounds as a list of ops."""

import warnings

import numpy as np

from lowgpu.dqn_plan import expected_arrays, plan_of, ring_of, settings_of, state_names
from lowgpu.initialize import initial_values, values_network_of
from lowgpu.section import ConfigError
from lowgpu.training import EPISODE, Trainer, means
from lowgpu_kernels import (
    anneal_weights,
    dqn_rounds,
    dqn_update,
    episode_statistics,
    experience,
    priority_gather,
    priority_update,
    replay_write,
    target_move,
)
from lowgpu_kernels.ops.dqn.dqn_update import STATISTICS

# Written round after round and read only below the head: what a first run leaves there is not seen.
UNSEEN = (
    "kept_floats",
    "kept_ints",
    "kept_next_floats",
    "kept_next_ints",
    "kept_reward",
    "kept_mark",
)
# The values of an empty replay, where it has them.
EMPTY = {"head": 0, "priority": 0, "sums": 0, "highest": 1}


class DQN(Trainer):
    """The trainer of a DQNConfig; see Trainer.

    The first rounds fill the replay and learn nothing. An iteration in which learning starts is a
    graph of its own, so updates begin with the very round that `learning_starts` says.
    """

    NAME = "dqn"
    network_of, plan_of = staticmethod(values_network_of), staticmethod(plan_of)
    settings_of, expected_arrays = staticmethod(settings_of), staticmethod(expected_arrays)
    state_names = staticmethod(state_names)

    @staticmethod
    def initial(config, env):
        parameters = initial_values(config, env)
        return {"parameters": parameters, "target": parameters} | _empty(config, env)

    def __init__(self, config, env, table=None, series=None, kind="cpu"):
        super().__init__(config, env, table, series, kind)
        # The first iteration that fills the replay, and the rounds it takes.
        self._filled_from, self._warm_rounds = 0, config.warm_rounds
        changes = {n: a for n, a in vars(self.buffers).items() if n in self._changed}
        warms, self._graphs = sorted({0, *self._warm_of_all()}), {}
        for slot in reversed(range(1 if self.windows is None else 2)):
            self._slot = slot
            for warm in warms:
                self._graphs[slot, warm] = self._queue.repeatable(
                    lambda warm=warm: self._iterate(warm), changes
                )

    def _lay_out(self):
        """Views into the buffers, made once: their addresses are in the graph."""
        b, config = self.buffers, self.config
        ring = ring_of(config, self.env)
        self._changed = ({*state_names(config)} | {*ring}) - {*UNSEEN}
        self._ring = [getattr(b, name) for name in ring]
        self._kept = [getattr(b, name) for name in ("head", *UNSEEN)]
        self._network = b.parameters, b.target, b.m, b.v, b.step
        self._logs = b.reward, b.terminated, b.truncated
        self._episodes, *self._report_parts = _report_views(b.report, config)
        if config.prioritized:
            self._lay_out_rounds()

    def _lay_out_rounds(self):
        """What ops of a round hand to each other, where a round is not one op."""
        b, config = self.buffers, self.config
        self._tree = b.priority, b.sums
        self._rows = (
            b.row_floats,
            b.row_ints,
            b.row_action,
            b.row_reward,
            b.row_discount,
            b.row_next_floats,
            b.row_next_ints,
            b.row_weight,
        )
        self._index, self._error = b.index.reshape(-1), b.error.reshape(-1)
        self._weights = b.row_weight.reshape(-1)
        statistics, norms = self._report_parts
        self._rounds = []
        for r in range(config.rounds):
            ended = (log[r * config.steps : (r + 1) * config.steps] for log in self._logs)
            played = b.state_floats, b.state_ints, b.action, *ended, b.next_floats, b.next_ints
            self._rounds.append((played, (b.gradient, b.error, statistics[r], norms[r])))

    def _iterate(self, warm=0):
        """One iteration, of which the first `warm` rounds only fill the replay."""
        b, call = self.buffers, self._call
        if self.config.prioritized:
            self._prioritized_rounds(warm)
        else:
            statistics, norms = (a[warm:] for a in self._report_parts)
            learned = statistics.reshape(-1, len(STATISTICS)), norms.reshape(-1)
            states = b.floats, b.ints, b.clock, *self._kept, b.draws, *self._data
            out = b.gradient, *self._logs, *learned
            call(dqn_rounds, *self._network, *states, out=out, warm=warm)
        running = b.running_return, b.running_length
        call(episode_statistics, *self._logs, *running, out=self._episodes)

    def _prioritized_rounds(self, warm):
        b, call, data = self.buffers, self._call, self._data
        for r, (played, learned) in enumerate(self._rounds):
            call(experience, b.parameters, b.floats, b.ints, b.clock, *data, out=played)
            call(replay_write, *played, *self._ring)
            if r >= warm:
                self._draw()
                call(dqn_update, *self._network, *self._rows, *data, out=learned)
                call(priority_update, self._index, self._error, *self._tree, b.highest)
            if self.config.target_every:
                call(target_move, b.parameters, b.target, b.clock)

    def _draw(self):
        """The minibatches of a round, each over all strata."""
        b, call = self.buffers, self._call
        for k in range(self.config.updates):
            rows = tuple(a[k] for a in (b.index, *self._rows))
            call(priority_gather, *self._tree, b.draws, *self._kept, out=rows)
        if self.config.anneals:
            call(anneal_weights, self._weights, b.clock)

    def _warm_of(self, iteration):
        """Rounds without updates of an iteration, counted from 0."""
        first = self._filled_from
        if self.windows is not None:
            first = max(first, self.windows.first_of(iteration))
        done = (iteration - first) * self.config.rounds
        return min(max(self._warm_rounds - done, 0), self.config.rounds)

    def _warm_of_all(self):
        full, rest = divmod(self._warm_rounds, self.config.rounds)
        return [*([self.config.rounds] if full else []), *([rest] if rest else [])]

    def _repeat(self):
        self._graphs[self._slot, self._warm_of(self.iteration)]()

    def _forget(self):
        super()._forget()
        # Its transitions point at rows that the next window is copied over.
        for name, value in EMPTY.items():
            if hasattr(self.buffers, name):
                getattr(self.buffers, name).fill(value)

    @classmethod
    def window_iterations(cls, config, episode):
        # It fills the replay once, and has time to learn from it.
        steps = max(config.capacity, 2 * config.learning_starts)
        filled = -(-steps // config.iteration_steps)
        return max(filled, super().window_iterations(config, episode))

    @classmethod
    def check_streaming(cls, config, streaming):
        steps = streaming.every * config.iteration_steps
        if not streaming.alone and config.warm_rounds * config.train_every >= steps:
            raise ConfigError(
                "stream.every must give a window more env steps than dqn.learning_starts = "
                f"{config.learning_starts}, as the replay is filled anew on each, got {streaming.every} "
                f"iterations of {config.iteration_steps}; give more, or a smaller learning_starts"
            )

    def skip_warm_up(self):
        self._warm_rounds = 0

    def _updates(self, report, iteration):
        _, statistics, norms = _report_views(report, self.config)
        warm = self._warm_of(iteration - 1)
        rows = statistics[warm:].reshape(-1, len(STATISTICS))
        return (STATISTICS, rows), (("norm",), norms[warm:].reshape(-1))

    def _figures(self, learned, iteration):
        config, now = self.config, iteration * self.config.iteration_steps
        (names, statistics), (_, norms) = learned
        shown = means(names, statistics) | means(("norm",), norms[:, None])
        del shown["non_finite_rows"]
        shown |= {"lr": config.lr, "updates": len(norms)}
        ends = config.epsilon_start, config.epsilon_end, config.epsilon_steps
        shown["epsilon"] = linear(now, *ends)
        if config.prioritized:
            shown["beta"] = linear(now, config.beta_start, config.beta_end, config.total_steps)
        return shown

    def change_data(self, table, series):
        super().change_data(table, series)
        self._filled_from = self.iteration

    def restore(self, arrays, document):
        super().restore(arrays, document)
        if self.config.save_replay:
            return
        self._filled_from = self.iteration
        self._queue.write(vars(self.buffers), _empty(self.config, self.env))
        if self.iteration:
            warnings.warn(
                "the checkpoint holds no replay (dqn.save_replay is false): it is filled anew for "
                f"{self._warm_rounds * self.config.train_every} env steps before updates go on",
                stacklevel=2,
            )


def linear(now, start, end, duration):
    """A schedule's value at an env step: from start to end in a straight line, then end."""
    return start + (end - start) * (now / duration) if now < duration else end


def _empty(config, env):
    """What makes a replay an empty one."""
    ring = ring_of(config, env)
    return {n: np.full(ring[n][0], v, ring[n][1]) for n, v in EMPTY.items() if n in ring}


def _report_views(report, config):
    """The parts of a report: sums over episodes [4], statistics [rounds, M, 4], norms [rounds, M]."""
    updates = config.rounds, config.updates
    first = len(EPISODE)
    last = first + updates[0] * updates[1] * len(STATISTICS)
    return report[:first], report[first:last].reshape(*updates, -1), report[last:].reshape(updates)
