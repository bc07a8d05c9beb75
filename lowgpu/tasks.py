"""What a run trains on and is evaluated on: its environment, and for the market its data."""

import bisect
import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from lowgpu import evaluate
from lowgpu.budget import beside_nbytes
from lowgpu.data import BarsError, read_csv, sample
from lowgpu.dqn import DQN
from lowgpu.envs import make
from lowgpu.pools import SHARE
from lowgpu.ppo import PPO
from lowgpu.table_file import TableFileError, element, is_table
from lowgpu.windows import Streaming

TRAINERS = {"ppo": PPO, "dqn": DQN}  # by the name that a Config has for them
# Rows of a window that is chosen: 470 MB in bfloat16, which is page-locked twice on the host. Untuned.
MOST_ROWS = 2**22
WHOLE = 1024  # it is a multiple of this


class RunError(ValueError):
    """A run that cannot be started or gone on with: one sentence that says why."""


@dataclass(frozen=True)
class Task:
    """What a trainer trains on.

    Attributes:
        env: the Env.
        table, series: its data, float32; None where it has none. A Streaming as the table brings the
            series with it.
        normalizer: {name: array} that a policy needs to be used again, empty without data.
    """

    env: object
    table: np.ndarray | Streaming | None = None
    series: np.ndarray | None = None
    normalizer: dict = field(default_factory=dict)

    @property
    def rows(self):
        """Rows of the table and the series on the device."""
        if isinstance(self.table, Streaming):
            return self.table.rows
        return 0 if self.series is None else self.series.shape[1]


def trainer_of(settings):
    """The class of a Config's trainer."""
    return TRAINERS[settings.algo]


def network_of(settings, env):
    """The Network that a Config's trainer trains for an Env."""
    return trainer_of(settings).network_of(settings.trainer, env)


def environment(settings, start="random"):
    """The Env of a Config; `start` is the market's."""
    own = settings.world
    if settings.env != "market":
        return make(settings.env, max_steps=own.max_steps, limit_terminates=own.limit_terminates)
    return make(
        "market", cost=own.cost, reward_scale=own.reward_scale, episode=own.episode, start=start
    )


def training_task(settings):
    """The Task that a Config's policy is trained on: for the market, the training split.

    Raises:
        RunError: data that cannot be used.
    """
    env = environment(settings)
    if env.series:
        return _task_of(settings, env, market_of(settings, env))
    if settings.stream.rows:
        raise RunError(f"stream.rows is for the market's table, and env is {settings.env}")
    return Task(env)


def prepared(settings, hardware):
    """The Config and the Task of a new run: a table that does not fit the device streams through it.

    Its window is said in a warning, and is part of the Config, as what is learned depends on it. A
    run that goes on takes `training_task`.

    Args:
        settings: a Config.
        hardware: the Hardware it is to run on.

    Returns:
        (settings, task)

    Raises:
        RunError: data that cannot be used.
    """
    env, stream = environment(settings), settings.stream
    if not env.series:
        return settings, training_task(settings)
    market = market_of(settings, env)
    window = stream.rows or _window(settings, env, market.rows, hardware)
    if window:
        every = _every(settings)
        settings = replace(settings, stream=replace(stream, rows=window, every=every))
        if not stream.rows:
            warnings.warn(
                f"the table's {market.rows} rows do not fit beside the other buffers on "
                f"{hardware.name}: windows of {window} rows stream through it, each for {every} "
                f"iterations (stream.rows = {window}, stream.every = {every})",
                stacklevel=2,
            )
    return settings, _task_of(settings, env, market)


def _window(settings, env, rows, hardware):
    """Rows of the windows that a table must stream in; 0 where it fits, or nothing does."""
    kind, usable = hardware.kind, SHARE * (hardware.free_nbytes or math.inf)

    def needed(rows):
        plan = trainer_of(settings).plan_of(settings.trainer, env, rows, kind)
        return plan.nbytes + beside_nbytes(kind)

    if needed(rows) <= usable:
        return 0
    sizes = range(0, min(MOST_ROWS, rows) + 1, WHOLE)
    fitting = bisect.bisect_right(sizes, usable, key=lambda window: needed(2 * window))
    return sizes[max(fitting - 1, 0)]


def _every(settings):
    """Iterations on a window."""
    chosen = trainer_of(settings).window_iterations(settings.trainer, settings.market.episode)
    return settings.stream.every or chosen


def _task_of(settings, env, market):
    with _refused():
        normalizer, window = market.normalizer(), settings.stream.rows
        if not window:
            return Task(env, *market.resident(normalizer), normalizer.to_dict())
        if window > market.rows:
            raise RunError(
                f"stream.rows must be at most the training split's {market.rows}, got {window}; without "
                "it the table stays on the device"
            )
        source, left = market.source(normalizer, settings.trainer.precision)
        streaming = Streaming(source, window, _every(settings), left)
        trainer_of(settings).check_streaming(settings.trainer, streaming)
        return Task(env, streaming, None, normalizer.to_dict())


def test_data(settings, env, figures):
    """Table, series and evaluate.Segments of the test split of a Config's data.

    Args:
        settings: a Config.
        env: its Env.
        figures: {name: array} of the normalizer that the run trained with.

    Raises:
        RunError: data that cannot be used.
    """
    market = market_of(settings, env)
    with _refused():
        from lowgpu.data.normalizer import Normalizer

        return market.tested(Normalizer.from_dict(figures))


def market_of(settings, env):
    """A Config's data in its splits: a TableFile for a table on disk, bars in memory for others.

    Raises:
        RunError: data that cannot be used.
    """
    if not _on_disk(settings):
        return _Bars(settings, env)
    with _refused():
        from lowgpu.market_tables import TableFile

        shares = settings.market.train, settings.market.validation
        return TableFile(settings.data, env, shares)


def _on_disk(settings):
    return bool(settings.data) and is_table(settings.data)


@contextmanager
def _refused():
    """Within this context data that cannot be used is a RunError."""
    try:
        yield
    except TableFileError as error:
        raise RunError(str(error)) from None
    except ImportError as error:
        raise RunError(
            f"the market's data cannot be read: {error}; pip install lowgpu[data]"
        ) from None


class _Bars:
    """Bars and their features in memory, with the methods of a TableFile."""

    def __init__(self, settings, env):
        (self._train, _, self._test), self._normalizer_of = splits_of(settings)
        self._env, self.rows = env, len(self._train)

    def normalizer(self):
        return self._normalizer_of.fit(self._train.features)

    def resident(self, normalizer):
        return arrays_of(self._env, self._train, normalizer)

    def source(self, normalizer, precision):
        from lowgpu.market_tables import HeldRows

        table, series = self.resident(normalizer)
        return HeldRows(table.astype(element(precision), copy=False), series), None

    def tested(self, normalizer):
        test = self._test
        present, starts, lengths = np.unique(test.segment, return_index=True, return_counts=True)
        segments = evaluate.Segments(
            symbols=tuple(test.symbol[s] for s in present),
            starts=starts,
            lengths=lengths,
            price=test.price,
            date=test.date,
        )
        return *arrays_of(self._env, test, normalizer), segments


def splits_of(settings):
    """The three splits of a Config's bars, and the class of their normalizer."""
    if _on_disk(settings):
        raise RunError(
            f"{settings.data} is a table of features; this needs bars as CSV: give --data"
        )
    try:
        from lowgpu.data.features import features
        from lowgpu.data.normalizer import Normalizer
        from lowgpu.data.splits import split_by_time
    except ImportError as error:
        raise RunError(f"the market needs TA-Lib ({error}): pip install lowgpu[data]") from None
    shares = settings.market.train, settings.market.validation
    try:
        bars = read_csv(settings.data) if settings.data else sample()
        splits = split_by_time(features(bars), (*shares, 1 - sum(shares)))
    except (BarsError, ValueError) as error:
        raise RunError(str(error)) from None
    return splits, Normalizer


def arrays_of(env, table, normalizer):
    """The padded table and the series of an Env, float32."""
    padded = np.zeros((len(table), env.width), np.float32)
    padded[:, : env.table_columns] = normalizer.apply(table.features)
    return padded, np.stack([getattr(table, name) for name in env.series]).astype(np.float32)
