"""The next epoch's data: the same as inline, and no thread is left."""

import signal
import threading
import time

import numpy as np
import pytest

from lowgpu.background import Background, FeedError
from lowgpu.config import DQNConfig, PPOConfig
from lowgpu.data import BarsError, sample
from lowgpu.dqn import DQN
from lowgpu.envs import make
from lowgpu.ppo import PPO
from lowgpu.prefetch import EpochPrefetcher, EpochWindows

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
LENGTH = 700


def bits(epoch):
    table, by = epoch.table, epoch.normalizer
    arrays = table.features, table.price, table.last, table.date, table.segment, table.row
    return [a.tobytes() for a in (*arrays, by.mean, by.std)]


@pytest.mark.filterwarnings("ignore:features")
@pytest.mark.parametrize("ahead", [1, 3])
def test_prefetched_epochs_have_the_bits_of_computing_them_inline(ahead):
    windows = EpochWindows(sample(), LENGTH, seed=5)
    fetched = list(EpochPrefetcher(windows, 3, first=2, ahead=ahead))
    inline = list(EpochPrefetcher(windows, 3, first=2, ahead=0))
    called = [windows(epoch) for epoch in (2, 3, 4)]
    assert [epoch.number for epoch in fetched] == [2, 3, 4]
    for one, two, three in zip(fetched, inline, called, strict=True):
        assert bits(one) == bits(two) == bits(three)


@pytest.mark.filterwarnings("ignore:features")
def test_a_window_is_the_features_of_its_bars_alone_normalized_by_their_own_figures():
    from lowgpu.data.features import WARMUP, features

    bars = sample()
    epoch = EpochWindows(bars, LENGTH, seed=5)(1)
    whole = features(bars)
    for s, symbol in enumerate(bars.symbol):
        start, stop = epoch.rows[symbol]
        assert bars.rows(s).start <= start and stop <= bars.rows(s).stop
        own = epoch.table.segment == s
        assert own.sum() == stop - start - WARMUP
        price = whole.price[(whole.row >= start + WARMUP) & (whole.row < stop)]
        assert epoch.table.price[own].tobytes() == price.tobytes()
    std = epoch.table.features.std(axis=0)
    # Clipping at 10 takes a little off heavy tails.
    assert ((std > 0.5) | (epoch.normalizer.std == 0)).all()
    assert np.abs(epoch.table.features.mean(axis=0)).max() < 0.1


ENV = make("market", episode=64)
TRAINERS = {
    "ppo": lambda *data: PPO(
        PPOConfig(total_steps=10**6, envs=4, rollout_steps=16, minibatches=2, hidden=(8,)),
        ENV,
        *data,
    ),
    "dqn": lambda *data: DQN(
        DQNConfig(envs=4, capacity=200, batch=8, learning_starts=24, train_every=8, rounds=4),
        ENV,
        *data,
    ),
}


@pytest.mark.filterwarnings("ignore:features")
@pytest.mark.parametrize("algo", TRAINERS)
def test_a_trainer_goes_on_with_each_epoch_and_ends_the_same_as_inline(algo):
    windows, ends = EpochWindows(sample(), LENGTH, seed=5), []
    for ahead in (1, 0):
        trainer = TRAINERS[algo](*windows(0).arrays(ENV))
        before, kept = trainer.buffers.parameters.copy(), []
        for epoch in EpochPrefetcher(windows, 3, ahead=ahead):
            trainer.change_data(*epoch.arrays(ENV))
            assert not trainer.buffers.running_length.any()
            assert trainer.buffers.table[:, :51].tobytes() == epoch.table.features.tobytes()
            if algo == "dqn":
                assert trainer.buffers.head[1] == 0  # nothing kept of the window before
            for _ in range(3):
                trainer.advance()
            trainer.drain()
            kept.append(trainer.buffers.step[0])
        # As many updates on each window: DQN fills its replay anew.
        assert kept == [kept[0], 2 * kept[0], 3 * kept[0]] and kept[0] > 0
        assert not np.array_equal(before, trainer.buffers.parameters)
        ends.append({n: a.tobytes() for n, a in trainer.state()[0].items()})
    assert ends[0] == ends[1]


@pytest.mark.filterwarnings("ignore:features")
def test_data_that_cannot_be_changed_to_is_refused():
    windows = EpochWindows(sample(), LENGTH)
    table, series = windows(0).arrays(ENV)
    trainer = TRAINERS["ppo"](table, series)
    with pytest.raises(ValueError, match=r"table must have shape \(.*for market, got"):
        trainer.change_data(table[:-1], series)
    with pytest.raises(ValueError, match="series must have shape"):
        trainer.change_data(table, None)
    trainer.advance()
    with pytest.raises(RuntimeError, match=r"call drain\(\) first"):
        trainer.change_data(table, series)


def test_where_windows_lie_is_a_function_of_seed_and_epoch_alone_and_reaches_everywhere():
    bars = sample()
    windows = EpochWindows(bars, LENGTH, seed=5)
    lie = [windows.windows(epoch) for epoch in range(400)]
    assert lie == [EpochWindows(bars, LENGTH, seed=5).windows(epoch) for epoch in range(400)]
    assert lie != [EpochWindows(bars, LENGTH, seed=6).windows(epoch) for epoch in range(400)]
    for s in range(len(bars.symbol)):
        rows = bars.rows(s)
        starts = np.array([epoch[s][0] for epoch in lie])
        places = max(rows.stop - rows.start - LENGTH, 0)
        assert starts.min() >= rows.start and starts.max() <= rows.start + places
        assert starts.min() <= rows.start + 0.1 * places
        assert starts.max() >= rows.start + 0.9 * places
    assert len({epoch[0] for epoch in lie}) > 300


def test_a_symbol_shorter_than_a_window_gives_all_it_has():
    bars = sample()
    windows = EpochWindows(bars, 10**6).windows(3)
    whole = [bars.rows(s) for s in range(len(bars.symbol))]
    assert windows == [(rows.start, rows.stop) for rows in whole]


def test_the_next_epoch_is_computed_while_this_one_is_used_and_no_further_ahead():
    begun, computed = [], threading.Semaphore(0)

    def compute(epoch):
        begun.append(epoch)
        computed.release()
        return epoch

    for used, epoch in enumerate(EpochPrefetcher(compute, 20)):
        assert epoch == used
        if used < 19:
            for _ in range(2 if used == 0 else 1):
                assert computed.acquire(timeout=30)
        time.sleep(1e-3)
        assert len(begun) <= used + 2
    assert begun == list(range(20))


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_is_raised_where_its_epoch_would_come_with_its_cause(ahead):
    def compute(epoch):
        if epoch == 3:
            raise BarsError("AAA has 5 bars")
        return epoch

    seen = []
    with pytest.raises(FeedError, match="epoch 3 failed: BarsError: AAA has 5 bars") as raised:
        for epoch in EpochPrefetcher(compute, 10, ahead=ahead):
            seen.append(epoch)
    assert isinstance(raised.value.__cause__, BarsError)
    assert raised.value.__cause__.__traceback__ is not None
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_the_trainer_ends_the_thread_and_the_next_loop_goes_on(error, ahead):
    prefetcher = EpochPrefetcher(lambda epoch: epoch, 10, ahead=ahead)
    with pytest.raises(error):
        for epoch in prefetcher:
            if epoch == 4:
                raise error
    assert not [t for t in threading.enumerate() if t.name == "lowgpu-epochs"]
    assert list(prefetcher) == [5, 6, 7, 8, 9]


def test_a_kept_iterator_is_ended_by_the_with_block():
    with EpochPrefetcher(lambda epoch: epoch, 10) as prefetcher:
        epochs = iter(prefetcher)
        assert next(epochs) == 0
        with pytest.raises(RuntimeError, match="gone through already"):
            next(iter(prefetcher))
    assert not [t for t in threading.enumerate() if t.name == "lowgpu-epochs"]


def test_ctrl_c_reaches_a_trainer_that_waits_for_an_epoch_and_ends_the_thread():
    begun, release = threading.Event(), threading.Event()

    def compute(epoch):
        begun.set()
        release.wait(60)
        return epoch

    def press():
        begun.wait(60)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.05)
        release.set()

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        list(EpochPrefetcher(compute, 3))
    pressing.join()
    assert not [t for t in threading.enumerate() if t.name == "lowgpu-epochs"]


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"compute": 3}, TypeError, "compute must be a function, got int"),
        ({"epochs": -1}, ValueError, "epochs must be in"),
        ({"first": 1.5}, TypeError, "first must be an integer"),
        ({"ahead": -2}, ValueError, "ahead must be in"),
    ],
)
def test_arguments_out_of_range_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        EpochPrefetcher(**{"compute": abs, "epochs": 3, **given})


def test_a_window_too_short_for_the_features_is_refused():
    with pytest.raises(ValueError, match=r"length must be at least .* warm the features up, got 3"):
        EpochWindows(sample(), 3)


def test_a_thread_that_ends_by_more_than_an_exception_is_not_waited_for_forever():
    def items():
        yield 1
        raise SystemExit("enough")

    running = Background(items(), 1, "lowgpu-test")
    assert next(running) == 1
    with pytest.raises(SystemExit, match="enough"):
        next(running)
    with pytest.raises(StopIteration):
        next(running)
    running.close()


def test_the_generator_is_closed_on_its_own_thread():
    where = []

    def items():
        try:
            while True:
                yield threading.current_thread().name
        finally:
            where.append(threading.current_thread().name)

    running = Background(items(), 2, "lowgpu-test")
    assert next(running) == "lowgpu-test"
    running.close()
    running.close()
    assert where == ["lowgpu-test"]
