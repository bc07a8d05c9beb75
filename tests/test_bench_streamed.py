"""What bench/streamed.py measures is the same training on both sides, and can be split as runs do."""

import time
from types import SimpleNamespace

import numba
import pytest

from bench import busy, streamed
from lowgpu import config
from lowgpu.envs import make
from lowgpu.hardware import DeviceError
from lowgpu.market_tables import TableFile
from lowgpu.streams import CpuCopies, CpuQueue

SMALL = {
    "ppo": {
        "envs": 8,
        "rollout_steps": 256,
        "minibatches": 2,
        "epochs": 1,
        "hidden": [8],
        "precision": "float32",
    },
    "dqn": {
        "envs": 8,
        "train_every": 2048,
        "rounds": 2,
        "capacity": 4096,
        "batch": 64,
        "updates": 1,
        "hidden": [8],
        "precision": "float32",
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    """As the program does for itself."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:training waits")
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_both_sides_train_as_much_on_the_same_rows(algo, tmp_path, no_thread_is_left):
    pair = streamed.Pair(algo, "cpu", tmp_path, 512, SMALL[algo])
    row = streamed.training(pair, algo, 512, windows=2, rounds=2)
    assert row.ratio > 0 and row.bar_ratio == 0.95 and "env steps/s; throughput" in row.note
    assert len(row.ours.seconds) == len(row.peer.seconds) == 2
    assert pair.streamed.iteration == pair.resident.iteration == 3 * 2 * pair.every
    assert pair.streamed.windows.number_of(pair.streamed.iteration) == 6
    updates = pair.streamed.state()[0]["step"][0]
    assert updates == pair.resident.state()[0]["step"][0] > 0
    pair.streamed.close()


class Event:
    """Time of the host, which is a CPU's."""

    def record(self, stream):
        self.at = time.perf_counter()


class TimedCpuCopies(CpuCopies):
    def __init__(self):
        self.spans = []

    def mark(self, stream=None):
        with streamed.feed.Timed(CUPY, None, self.spans):
            return super().mark(stream)


CUPY = SimpleNamespace(
    cuda=SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: 1e3 * (b.at - a.at))
)


@pytest.mark.filterwarnings("ignore:training waits")
def test_a_timeline_has_every_iteration_and_leaves_the_trainer_as_it_was(
    tmp_path, monkeypatch, no_thread_is_left
):
    monkeypatch.setattr(streamed.feed, "TimedCopies", TimedCpuCopies)
    monkeypatch.setattr(CpuQueue, "stream", None, raising=False)
    pair = streamed.Pair("ppo", "cpu", tmp_path, 512, SMALL["ppo"])
    lanes = streamed.timeline(CUPY, pair.streamed, windows=3)
    assert len(lanes["iterations"]) == pair.streamed.iteration == 3 * pair.every
    assert lanes["copies"]
    ends = [time for span in lanes["iterations"] for time in span]
    assert ends[0] > 0 and ends == sorted(ends)
    assert "_repeat" not in vars(pair.streamed) and "copies" not in pair.streamed.windows.feed


def test_the_bars_of_a_watched_run_can_be_split_and_streamed(tmp_path):
    streamed.save_bars(tmp_path / "bars", 8 * 64)
    file = TableFile(tmp_path / "bars", make("market"), (0.7, 0.1))
    source, left = file.source(file.normalizer(), "bfloat16")
    assert source.rows > 5 * 64 and left is None


@pytest.mark.parametrize("settings", [[], ["updates=3", "rounds=2"]])
def test_a_run_of_dqn_to_watch_is_as_long_as_the_config_allows(settings):
    def run_of(steps):
        given = (config.setting(text, ("dqn", "market")) for text in settings)
        asked = {"algo": "dqn", "dqn": {"total_steps": steps}}
        preset = config.preset_of("market", "dqn", "cuda")
        return config.from_dict(config.merge(preset, *given, asked)).dqn

    steps = busy.longest("market", settings, "dqn")
    own = run_of(steps)
    assert own.iterations * own.rounds * own.updates > 2**30
    with pytest.raises(config.ConfigError, match=r"below 2\^31 updates"):
        run_of(steps + 1)


def test_without_a_gpu_it_ends_with_one_sentence(monkeypatch):
    def refuse(asked):
        raise DeviceError(f"device {asked} cannot be used")

    monkeypatch.setattr(streamed.hardware, "choose", refuse)
    with pytest.raises(SystemExit, match=r"bench\.streamed measures a GPU: device cuda cannot"):
        streamed.main()
