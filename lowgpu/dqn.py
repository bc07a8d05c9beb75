"""Deep Q-learning from replay: its memory laid out, and its rounds as a list of ops."""

import warnings

import numpy as np

from lowgpu.dqn_plan import expected_arrays, plan_of, ring_of, settings_of, state_names
from lowgpu.initialize import initial_values, values_network_of
from lowgpu.training import EPISODE, Trainer, means
from lowgpu_kernels import (
    anneal_weights,
    dqn_update,
    episode_statistics,
    experience,
    priority_sample,
    priority_update,
    replay_gather,
    replay_sample,
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
        self._graphs = {
            warm: self._queue.repeatable(lambda warm=warm: self._iterate(warm), changes)
            for warm in sorted({0, *self._warm_of_all()})
        }

    def _lay_out(self):
        """Views into the buffers, made once: their addresses are in the graph."""
        b, config = self.buffers, self.config
        ring = ring_of(config, self.env)
        self._changed = ({*state_names(config)} | {*ring}) - {*UNSEEN}
        self._ring = [getattr(b, name) for name in ring]
        self._kept = [getattr(b, name) for name in ("head", *UNSEEN)]
        self._tree = (b.priority, b.sums) if config.prioritized else ()
        self._episodes, statistics, norms = _report_views(b.report, config)
        self._rows = (
            b.row_floats,
            b.row_ints,
            b.row_action,
            b.row_reward,
            b.row_discount,
            b.row_next_floats,
            b.row_next_ints,
        )
        weight = b.row_weight if config.prioritized else None
        self._windows = (*self._rows, weight)
        self._flat = [a.reshape(-1, *a.shape[2:]) for a in (*self._rows, b.row_weight)]
        self._index, self._error = b.index.reshape(-1), b.error.reshape(-1)
        self._weights = b.row_weight.reshape(-1)
        logs = b.reward, b.terminated, b.truncated
        self._rounds = []
        for r in range(config.rounds):
            ended = (log[r * config.steps : (r + 1) * config.steps] for log in logs)
            played = b.state_floats, b.state_ints, b.action, *ended, b.next_floats, b.next_ints
            self._rounds.append((played, (b.gradient, b.error, statistics[r], norms[r])))

    def _iterate(self, warm=0):
        """One iteration, of which the first `warm` rounds only fill the replay."""
        b, call = self.buffers, self._call
        for r, (played, learned) in enumerate(self._rounds):
            data = b.table, b.series
            call(experience, b.parameters, b.floats, b.ints, b.clock, *data, out=played)
            call(replay_write, *played, *self._ring)
            if r >= warm:
                self._draw()
                network = b.parameters, b.target, b.m, b.v, b.step
                call(dqn_update, *network, *self._windows, *data, out=learned)
                if self._tree:
                    call(priority_update, self._index, self._error, *self._tree, b.highest)
            if self.config.target_every:
                call(target_move, b.parameters, b.target, b.clock)
        ended = b.reward, b.terminated, b.truncated
        call(episode_statistics, *ended, b.running_return, b.running_length, out=self._episodes)

    def _draw(self):
        """The minibatches of a round: uniform ones at once, prioritized ones each over all strata."""
        b, call = self.buffers, self._call
        if not self._tree:
            call(replay_sample, b.head, b.draws, out=self._index)
            call(replay_gather, self._index, *self._kept, out=tuple(self._flat))
            return
        for k in range(self.config.updates):
            drawn = b.index[k], b.drawn[k], b.least[k]
            call(priority_sample, *self._tree, b.draws, out=drawn)
            rows = tuple(a[k] for a in (*self._rows, b.row_weight))
            call(replay_gather, b.index[k], *self._kept, b.drawn[k], b.least[k], out=rows)
        if self.config.anneals:
            call(anneal_weights, self._weights, b.clock)

    def _warm_of(self, iteration):
        """Rounds without updates of an iteration, counted from 0."""
        done = (iteration - self._filled_from) * self.config.rounds
        return min(max(self._warm_rounds - done, 0), self.config.rounds)

    def _warm_of_all(self):
        full, rest = divmod(self._warm_rounds, self.config.rounds)
        return [*([self.config.rounds] if full else []), *([rest] if rest else [])]

    def _repeat(self):
        self._graphs[self._warm_of(self.iteration)]()

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
    made = {n: a for n, a in ring_of(config, env).items() if n in ("head", "priority", "sums")}
    values = {name: np.zeros(shape, dtype) for name, (shape, dtype) in made.items()}
    return values | ({"highest": np.ones(1, np.float32)} if config.prioritized else {})


def _report_views(report, config):
    """The parts of a report: sums over episodes [4], statistics [rounds, M, 4], norms [rounds, M]."""
    updates = config.rounds, config.updates
    first = len(EPISODE)
    last = first + updates[0] * updates[1] * len(STATISTICS)
    return report[:first], report[first:last].reshape(*updates, -1), report[last:].reshape(updates)
