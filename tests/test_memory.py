"""Memory stays where it is in 10,000 updates of `lowgpu train`, and less of it gives the same bits."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from lowgpu import runs
from lowgpu.config import from_dict, merge, preset_of
from lowgpu.envs import make
from lowgpu.hardware import choose

UPDATES = 10_000
HOST_NBYTES = 5_000_000
STATM = Path("/proc/self/statm")

pytestmark = pytest.mark.skipif(
    not STATM.exists(), reason="the system does not say what is resident"
)

TINY = {
    "ppo": {"envs": 4, "rollout_steps": 8, "minibatches": 4, "hidden": [8]},
    "dqn": {"envs": 4, "capacity": 400, "batch": 8, "learning_starts": 40, "train_every": 4}
    | {"rounds": 10, "updates": 2, "hidden": [8], "epsilon_steps": 400},
}
CASES = [("ppo", {}), ("dqn", {}), ("dqn", {"prioritized": True, "n_steps": 3})]
IDS = "ppo", "dqn", "prioritized"


@pytest.fixture(autouse=True)
def one_thread():
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def resident():
    """Bytes of this process in memory."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(settings, task, machine, folder, monkeypatch, free=lambda: 0):
    """(updates, host bytes, device bytes) between a tenth of a run and its end."""
    kind, seen = runs.trainer_of(settings), []
    iterations, own = settings.trainer.iterations, kind.advance

    def advance(self):
        report = own(self)
        if self.iteration in (iterations // 10, iterations):
            seen.append(
                (int(self.queue.read({"n": self.buffers.step})["n"][0]), resident(), free())
            )
        return report

    monkeypatch.setattr(kind, "advance", advance)
    stop = SimpleNamespace(asked=False)
    runs.train(runs.create(folder / "run", settings), settings, task, machine, False, stop)
    (first, *before), (last, *after) = seen
    return last - first, after[0] - before[0], before[1] - after[1]


def long_enough(algo, settings):
    """The settings with steps for UPDATES and the tenth before that is not counted."""
    own = from_dict(settings).trainer
    updates = own.updates * (own.rounds if algo == "dqn" else 1)
    iterations = -(-UPDATES * 10 // (9 * updates)) + (own.warm_rounds if algo == "dqn" else 0) + 1
    return from_dict(merge(settings, {algo: {"total_steps": iterations * own.iteration_steps}}))


@pytest.mark.parametrize("algo, more", CASES, ids=IDS)
def test_ten_thousand_updates_on_a_cpu_take_less_than_5_mb(algo, more, tmp_path, monkeypatch):
    settings = long_enough(algo, {"env": "cartpole", "algo": algo, algo: TINY[algo] | more})
    task = runs.Task(make("cartpole"))
    updates, host, _ = growth(settings, task, choose("cpu"), tmp_path, monkeypatch)
    assert updates >= UPDATES
    assert host < HOST_NBYTES


def market(rows=5_000):
    rng = np.random.default_rng(0)
    env = make("market", episode=50)
    table = np.zeros((rows, env.width), np.float32)
    table[:, : env.table_columns] = rng.normal(size=(rows, env.table_columns))
    price = np.exp(np.cumsum(1e-3 * rng.normal(size=rows)))
    last = np.zeros(rows)
    last[[999, rows - 1]] = 1
    return runs.Task(env, table, np.stack([price, last]).astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("algo, more", CASES, ids=IDS)
def test_ten_thousand_updates_on_a_gpu_take_no_device_memory_and_less_than_5_mb_of_the_host_s(
    algo, more, tmp_path, monkeypatch
):
    from cupy.cuda import runtime

    settings = merge(preset_of("market", algo, "cuda"), {"algo": algo, algo: more})
    settings, machine = long_enough(algo, settings), choose("cuda")

    def free():
        return runtime.memGetInfo()[0]

    seen = updates, host, device = growth(settings, market(), machine, tmp_path, monkeypatch, free)
    assert updates >= UPDATES
    assert (device, host < HOST_NBYTES) == (0, True), seen


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_on_a_gpu_minibatches_in_parts_train_to_the_same_bits_in_less_memory(algo, precision):
    task, small = market(), {"precision": precision, "envs": 256, "seed": 3}
    small |= (
        {"rollout_steps": 64, "minibatches": 2}
        if algo == "ppo"
        else {"train_every": 256, "capacity": 2**14, "batch": 8192, "learning_starts": 1024}
    )
    settings = merge(preset_of("market", algo, "cuda"), {"algo": algo, algo: small})
    states, nbytes = [], []
    for accumulate in (1, 4):
        chosen = from_dict(merge(settings, {algo: {"accumulate": accumulate}}))
        trainer = runs.trainer_of(chosen)(chosen.trainer, task.env, task.table, task.series, "cuda")
        for _ in range(3):
            trainer.advance()
        trainer.drain()
        states.append(trainer.state()[0])
        nbytes.append(trainer.plan.nbytes)
    whole, parts = states
    assert whole["step"][0] > 0
    for name, array in whole.items():
        assert parts[name].tobytes() == array.tobytes(), name
    # In bfloat16 sm_90a makes all updates in one launch, whose memory does not grow.
    assert nbytes[1] < nbytes[0] or precision == "bfloat16"
