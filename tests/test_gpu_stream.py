"""Tables that stream through a GPU while it trains: repeatable, as on a CPU, and in memory that stays."""

import numpy as np
import pytest

from lowgpu.config import from_dict, merge, preset_of
from lowgpu.envs import make
from lowgpu.table_file import open_table, save_table
from lowgpu.tasks import TRAINERS
from lowgpu.windows import Streaming

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_thread_is_left")]
ROWS, WINDOW = 20_000, 4096
SMALL = {
    "ppo": {"envs": 256, "rollout_steps": 32, "minibatches": 8},
    "dqn": {
        "envs": 256,
        "train_every": 256,
        "capacity": 2**14,
        "batch": 512,
        "updates": 4,
        "learning_starts": 2048,
        "rounds": 8,
    },
}
ALGOS = pytest.mark.parametrize("algo", ["ppo", "dqn", "prioritized"])
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{precision: the rows of a folder}."""
    env, made = make("market", episode=50), {}
    rng = np.random.default_rng(0)
    features = rng.normal(size=(ROWS, 51)).astype("f4")
    price = np.exp(np.cumsum(1e-3 * rng.normal(size=ROWS))).astype("f4")
    last = np.zeros(ROWS, "f4")
    last[[999, ROWS - 1]] = 1
    for precision in ("float32", "bfloat16"):
        folder = tmp_path_factory.mktemp(precision)
        save_table(folder, env, features, np.stack([price, last]), precision=precision)
        made[precision] = open_table(folder, env)
    return made


def trainer_of(rows, algo, precision="bfloat16", kind="cuda", every=2, **changes):
    name = "ppo" if algo == "ppo" else "dqn"
    own = SMALL[name] | {"precision": precision} | changes
    if algo == "prioritized":
        own["prioritized"] = True
    settings = from_dict(merge(preset_of("market", name, "cuda"), {name: own}, {"algo": name}))
    env = make("market", episode=50)
    return TRAINERS[name](
        settings.trainer, env, Streaming(rows[precision], WINDOW, every), kind=kind
    )


def after(trainer, iterations):
    for _ in range(iterations):
        trainer.advance()
    trainer.drain()
    return trainer.state()[0]


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes(), name


@ALGOS
@PRECISIONS
def test_the_same_seed_gives_the_same_bits_and_goes_on_with_them(algo, precision, rows):
    whole, again, half, other = (trainer_of(rows, algo, precision) for _ in range(4))
    want = after(whole, 11)
    assert want["step"][0] > 0
    same(after(again, 11), want)
    after(half, 5)
    other.restore(*half.state())
    same(after(other, 6), want)
    for trainer in (whole, again, half, other):
        trainer.close()


@PRECISIONS
def test_every_window_starts_from_the_bits_that_it_starts_from_on_a_cpu(precision, rows):
    few = {"envs": 64, "rollout_steps": 4, "minibatches": 4, "hidden": [16]}
    gpu, cpu = (
        trainer_of(rows, "ppo", precision, kind, every=1, **few) for kind in ("cuda", "cpu")
    )
    for _ in range(12):
        found = []
        for trainer in (gpu, cpu):
            after(trainer, 1)
            b, (table, series) = trainer.buffers, trainer.windows.slots[trainer.windows.slot]
            bits = table.view(np.uint16 if precision == "bfloat16" else np.uint32)
            arrays = {"table": bits, "series": series}
            arrays |= {"floats": b.state_floats[0], "ints": b.state_ints[0]}
            found.append(trainer.queue.read(arrays))
        same(*found)
    gpu.close(), cpu.close()


@ALGOS
def test_three_hundred_windows_keep_device_memory_where_it_is(algo, rows):
    import cupy

    trainer = trainer_of(rows, algo)
    after(trainer, 6)
    before = cupy.cuda.runtime.memGetInfo()[0]
    after(trainer, 600)
    assert cupy.cuda.runtime.memGetInfo()[0] == before
    trainer.close()


def test_a_window_that_is_trained_on_is_not_written_to(rows):
    """Its sum, taken on the device before and after the iterations on it."""
    trainer = trainer_of(rows, "ppo", every=4)

    def sums():
        # Read while its stream is the current one: a number waits for that alone.
        with trainer.queue.running():
            table, series = trainer.windows.slots[trainer.windows.slot]
            return int(table.view(np.uint16).sum()), int(series.sum())

    for _ in range(20):
        trainer.advance()
        start = sums()
        for _ in range(3):
            trainer.advance()
        assert sums() == start
        trainer.drain()
    trainer.close()
