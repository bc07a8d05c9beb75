"""Trainers whose table streams: a resident one's bits, runs that go on, nothing of a window before."""

import gc
import threading
import time
import warnings

import numba
import numpy as np
import pytest

from lowgpu.config import ConfigError, DQNConfig, PPOConfig
from lowgpu.dqn import DQN
from lowgpu.envs import make
from lowgpu.ppo import PPO
from lowgpu.stream_table import StreamedTable
from lowgpu.streams import CpuQueue
from lowgpu.table_file import open_table, save_table
from lowgpu.training import TrainingError
from lowgpu.windows import JUDGED, Streaming, Windows
from lowgpu_kernels import reset
from tests.late_device import COMPUTE, LAZY, SLOW_CONSUMER, SLOW_LINK, LateDevice

N, WINDOW, EPISODE = 331, 64, 7
ENV = make("market", features=5, episode=EPISODE)
PPO_TINY = PPOConfig(
    total_steps=2000,
    envs=6,
    rollout_steps=8,
    epochs=2,
    minibatches=3,
    hidden=(8, 8),
    seed=3,
    lr=1e-3,
)
DQN_TINY = DQNConfig(
    total_steps=2000,
    seed=3,
    envs=4,
    capacity=96,
    batch=16,
    learning_starts=24,
    train_every=8,
    rounds=5,
    target_every=30,
    hidden=(12, 8),
    lr=1e-3,
)
PRIORITIZED = {"prioritized": True, "n_steps": 3, "updates": 2}
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "bfloat16"])
KINDS = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def one_thread_and_none_left():
    """Loops of a few rows, on a machine that others use too."""
    before, running = numba.get_num_threads(), threading.enumerate()
    numba.set_num_threads(1)
    with warnings.catch_warnings():
        # Iterations of some milliseconds, on a machine that others use too.
        warnings.filterwarnings("ignore", "training waits")
        yield
    numba.set_num_threads(before)
    assert threading.enumerate() == running


def data():
    rng = np.random.default_rng(5)
    features = rng.normal(size=(N, 5)).astype("f4")
    last = np.zeros(N, "f4")
    last[[99, N - 1]] = 1
    return features, np.stack([np.exp(rng.normal(0, 0.01, N).cumsum()), last]).astype("f4")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{precision: the rows of a folder}."""
    made = {}
    for precision in ("float32", "bfloat16"):
        folder = tmp_path_factory.mktemp(precision)
        save_table(folder, ENV, *data(), precision=precision)
        made[precision] = open_table(folder, ENV)
    return made


def settings_of(algo, precision="float32", **changes):
    kind, tiny = {"ppo": (PPO, PPO_TINY), "dqn": (DQN, DQN_TINY)}[algo]
    return kind, type(tiny)(**{**vars(tiny), "precision": precision, **changes})


def streamed(rows, algo, precision="float32", kind="cpu", window=WINDOW, every=2, **changes):
    make_one, settings = settings_of(algo, precision, **changes)
    return make_one(settings, ENV, Streaming(rows[precision], window, every), kind=kind)


def resident(algo, precision="float32", kind="cpu", **changes):
    make_one, settings = settings_of(algo, precision, **changes)
    features, series = data()
    table = np.zeros((N, ENV.width), "f4")
    table[:, :5] = features
    return make_one(settings, ENV, table, series, kind=kind)


def go_on(trainer, iterations):
    reports = [trainer.advance() for _ in range(iterations)]
    return [r for r in (*reports, trainer.drain()) if r is not None]


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes(), name


CASES = pytest.mark.parametrize(
    "algo, changes",
    [("ppo", {}), ("dqn", {}), ("dqn", PRIORITIZED)],
    ids=["ppo", "dqn", "prioritized"],
)


@KINDS
@CASES
@PRECISIONS
def test_a_window_of_the_whole_table_trains_the_bits_of_a_resident_one(
    algo, changes, precision, kind, rows
):
    whole = resident(algo, precision, kind, **changes)
    window = streamed(rows, algo, precision, kind, window=N, every=2, **changes)
    want = go_on(whole, 7)
    for got, its in zip(go_on(window, 7), want, strict=True):
        assert got.figures == its.figures | {"window": 0}
    same(window.state()[0], whole.state()[0])
    window.close()


@KINDS
@CASES
@pytest.mark.parametrize("at", [3, 4], ids=["within a window", "between two"])
def test_a_run_goes_on_bit_for_bit(algo, changes, at, kind, rows):
    """On the other of the two places, as it begins with the first."""
    whole = streamed(rows, algo, kind=kind, **changes)
    reports = go_on(whole, 9)
    first = streamed(rows, algo, kind=kind, **changes)
    early = go_on(first, at)
    saved = first.state()
    first.close()
    second = streamed(rows, algo, kind=kind, **changes)
    go_on(second, 1)
    second.restore(*saved)
    assert early + go_on(second, 9 - at) == reports
    assert [r.figures["window"] for r in reports] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    same(second.state()[0], whole.state()[0])
    whole.close(), second.close()


# What a checkpoint holds that is another window's: episodes under way, and the replay.
OLD = {"running_return": 0, "running_length": 0, "head": 0, "priority": 0, "sums": 0, "highest": 1}


@KINDS
@CASES
def test_each_window_of_the_seed_trains_as_if_it_were_the_whole_table(algo, changes, kind, rows):
    """So no row of another window is read, and no transition from one is drawn."""
    trainer = streamed(rows, algo, kind=kind, every=3, **changes)
    make_one, settings = settings_of(algo, **changes)
    saved = None
    with StreamedTable(rows["float32"], ENV, WINDOW, seed=3, kind="cpu") as stream:
        for number in range(5):
            window = stream.next_window()
            alone = make_one(settings, ENV, window.table, window.series, kind=kind)
            if saved:
                arrays = saved[0]
                for name in arrays.keys() & OLD.keys():
                    arrays[name][...] = OLD[name]
                state = arrays["floats"], arrays["ints"]
                reset(*state, window.series, arrays["clock"], env=ENV, seed=settings.seed)
                alone.restore(*saved)
                alone._filled_from = alone.iteration
            want = [r.figures | {"window": number} for r in go_on(alone, 3)]
            assert [r.figures for r in go_on(trainer, 3)] == want
            saved = trainer.state()
            same(saved[0], alone.state()[0])
    if algo == "dqn":
        # Three iterations of five rounds, of which the first two of each window fill the replay.
        assert saved[0]["step"][0] == 5 * 13 * settings.updates
    trainer.close()


@KINDS
@CASES
def test_what_a_window_leaves_behind_is_not_seen(algo, changes, kind, rows):
    """In debug a place is filled with NaN and rows of -1 as soon as its window is over."""
    plain, poisoned = (streamed(rows, algo, kind=kind, **changes) for _ in range(2))
    poisoned.windows.feed["debug"] = True
    assert go_on(poisoned, 7) == go_on(plain, 7)
    same(poisoned.state()[0], plain.state()[0])
    plain.close(), poisoned.close()


class LateQueue(CpuQueue):
    """A queue whose work is done when a LateDevice does it, in whichever thread."""

    def __init__(self, device):
        self.device, self.bound = device, threading.local()

    def later(self, work, slot):
        def done():
            self.bound.slot = slot
            work()

        self.device.work(done)

    def repeatable(self, work, changes):
        # A graph knows the addresses that its capture saw.
        slot = self.trainer._slot
        return lambda: self.later(work, slot)

    def copy_out(self, source, target):
        self.device.work(lambda: np.copyto(target, source))
        mark = self.device.mark(COMPUTE)
        return lambda: self.device.wait(mark)

    def read(self, arrays):
        self.device.wait(self.device.mark(COMPUTE))
        return super().read(arrays)


def late(algo, device, rows, monkeypatch, **changes):
    """A streamed trainer whose work and copies happen as late, or as early, as their marks allow."""
    monkeypatch.setattr("lowgpu.training.queue_of", lambda kind: LateQueue(device))
    kind, settings = settings_of(algo, **changes)

    class Late(kind):
        def _lay_out(self):
            self._queue.trainer = self
            super()._lay_out()

        @property
        def _data(self):
            return self._places[self._queue.bound.slot]

        def _start(self):
            self._queue.later(super()._start, self._slot)

        def _forget(self):
            self._queue.later(super()._forget, self._slot)

    trainer = Late(settings, ENV, Streaming(rows["float32"], WINDOW, 1))
    trainer.windows.feed |= {"copies": device, "stream": COMPUTE, "debug": True}
    return trainer


NOT_WARM = {"dqn": {"learning_starts": 0}, "ppo": {}}


@CASES
@pytest.mark.parametrize(
    "device",
    [{"eager": SLOW_CONSUMER}, {"eager": SLOW_LINK}, {"eager": LAZY}, {"seed": 1}],
    ids=["slow consumer", "slow link", "lazy", "at random"],
)
def test_a_device_that_is_behind_trains_to_the_same_bits(algo, changes, device, rows, monkeypatch):
    changes = NOT_WARM[algo] | changes
    plain = streamed(rows, algo, every=1, **changes)
    want = go_on(plain, 12)
    trainer = late(algo, LateDevice(**device), rows, monkeypatch, **changes)
    assert go_on(trainer, 12) == want
    same(trainer.state()[0], plain.state()[0])
    plain.close(), trainer.close()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize(
    "forget, eager, lingers",
    # The thread that reads is late with a copy, or goes on while the trainer lingers.
    [("copied", SLOW_LINK, 0), ("released", SLOW_CONSUMER, 0.02)],
    ids=["copied", "released"],
)
def test_a_wait_left_out_is_seen(forget, eager, lingers, rows, monkeypatch):
    plain = streamed(rows, "ppo", every=1)
    want = go_on(plain, 12)
    plain.close()

    def strays():
        trainer = late("ppo", LateDevice(eager, forget=forget), rows, monkeypatch)
        # Rows of NaN may not be walked on, and a figure that is not finite is seen as well.
        trainer.windows.feed["debug"] = False
        enter = trainer.windows.enter

        def enter_and_linger(iteration):
            new = enter(iteration)
            time.sleep(lingers)
            return new

        monkeypatch.setattr(trainer.windows, "enter", enter_and_linger)
        try:
            return go_on(trainer, 12) != want
        except TrainingError:
            trainer.drain()
            return True
        finally:
            trainer.close()

    # Threads may happen to be in time where nobody waits for them, but not again and again.
    assert any(strays() for _ in range(8))


@pytest.mark.parametrize("way", ["close", "throw away"])
def test_the_thread_that_reads_ends_with_its_trainer(way, rows):
    trainer, before = streamed(rows, "ppo"), threading.active_count()
    go_on(trainer, 3)
    assert threading.active_count() == before + 1
    if way == "close":
        trainer.close()
    else:
        del trainer
        gc.collect()
    assert threading.active_count() == before


def test_a_trainer_that_was_closed_goes_on_with_the_same_bits(rows):
    whole, part = (streamed(rows, "ppo") for _ in range(2))
    want = go_on(whole, 7)
    early = go_on(part, 3)
    part.close()
    assert early + go_on(part, 4) == want
    whole.close(), part.close()


def test_one_window_that_is_the_whole_table_is_read_once(rows):
    trainer, before = streamed(rows, "ppo", window=N), threading.active_count()
    go_on(trainer, 2)
    assert threading.active_count() == before
    trainer.close()


def test_two_windows_are_all_that_the_plan_has_of_the_table(rows):
    trainer = streamed(rows, "ppo", precision="bfloat16")
    declared = trainer.plan.declared
    assert declared["table"].shape == (2 * WINDOW, 8) and declared["series"].shape == (
        2,
        2 * WINDOW,
    )
    places = [array for slot in trainer.windows.slots for array in slot]
    for array, name in zip(places, ("table", "series") * 2):
        assert np.shares_memory(array, getattr(trainer.buffers, name))
    assert not any(np.shares_memory(a, b) for a, b in (places[::2], places[1::2]))


class Source:
    """Rows that break, or take their time, at a number of reads."""

    rows, dtype, ready = N, np.dtype(np.float32), True

    def __init__(self, read):
        self._read, self.reads = read, 0
        self._table, self._series = np.zeros((N, 8), np.float32), data()[1]

    def read(self, start, stop):
        self.reads += 1
        self._read(self.reads)
        return self._table[start:stop], self.read_series(start, stop)

    def read_series(self, start, stop):
        return self._series[:, start:stop]


def test_a_window_that_cannot_be_read_ends_training_with_its_cause():
    def breaks(number):
        if number > 2:
            raise OSError("the disk is gone")

    trainer = PPO(PPO_TINY, ENV, Streaming(Source(breaks), WINDOW, 2))
    with pytest.raises(TrainingError, match=r"iteration 5: .* OSError: the disk is gone"):
        go_on(trainer, 9)
    trainer.close()


class Late:
    """A table whose windows take as long as they are told, on a clock of its own."""

    def __init__(self, wait):
        self.now, self.wait, self.count = 0.0, wait, 0

    def monotonic(self):
        return self.now

    def next_window(self):
        self.now += self.wait
        self.count += 1
        return type("Window", (), {"number": self.count - 1, "slot": 0})

    def close(self):
        pass


@pytest.mark.filterwarnings("default:training waits")
@pytest.mark.parametrize("share, said", [(0.04, 0), (0.06, 1)])
def test_waits_for_windows_are_said_once_where_they_are_much(share, said, rows, monkeypatch):
    late = Late(share)
    monkeypatch.setattr("lowgpu.windows.time", late)
    monkeypatch.setattr("lowgpu.windows.StreamedTable", lambda *_, **__: late)
    windows = streamed(rows, "ppo", every=1).windows
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for iteration in range(4 * JUDGED):
            assert windows.enter(iteration)
            late.now += 1 - share
    assert [str(w.message)[:34] for w in seen] == ["training waits for its windows 6% "] * said


def test_windows_too_short_for_the_replay_are_refused(rows):
    with pytest.raises(
        ConfigError, match=r"more env steps than dqn.learning_starts = 81, .* got 2 it"
    ):
        streamed(rows, "dqn", learning_starts=80 + 1, every=2)
    streamed(rows, "dqn", learning_starts=80, every=2)
    # It is not filled anew where one window is the whole table.
    streamed(rows, "dqn", learning_starts=200, every=2, window=N)


def test_an_environment_plays_to_the_end_of_a_place_with_no_window_yet():
    series = Windows.blank(ENV, 5)
    for place in series.reshape(2, 2, 5):
        assert place.tolist() == [[1.0] * 5, [0, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    "algo, changes, episode, want",
    [
        ("ppo", {"envs": 6, "rollout_steps": 8}, 16, 2),
        ("ppo", {"envs": 6, "rollout_steps": 8}, 17, 3),
        ("ppo", {"envs": 6, "rollout_steps": 8}, 1, 1),
        # 40 env steps an iteration, 10 of each environment.
        ("dqn", {"learning_starts": 0}, 40, 4),
        ("dqn", {"learning_starts": 0}, 7, 3),
        ("dqn", {"learning_starts": 100}, 7, 5),
    ],
)
def test_a_window_lasts_for_whole_episodes_and_fills_a_replay(algo, changes, episode, want):
    kind, settings = settings_of(algo, **changes)
    assert kind.window_iterations(settings, episode) == want
