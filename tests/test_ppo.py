"""The trainer: its plan, its first parameters, and that a stopped run goes on bit for bit."""

import dataclasses
import sys
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from lowgpu import checkpoint, config, pools, runs
from lowgpu.config import MarketConfig, PPOConfig
from lowgpu.envs import make
from lowgpu.initialize import initial_parameters, network_of
from lowgpu.pools import Declared, MemoryPlanError, Plan, allocate
from lowgpu.ppo import PPO, TrainingError
from lowgpu.ppo_plan import STATE, expected_arrays, plan_of
from lowgpu_kernels import launch, ppo_update

TINY = PPOConfig(
    total_steps=20 * 8 * 6,
    envs=6,
    rollout_steps=8,
    epochs=2,
    minibatches=3,
    hidden=(8, 8),
    seed=3,
    lr=1e-3,
)
ROWS = 300
MARKET = make("market", episode=7)


@pytest.fixture(autouse=True)
def one_thread():
    """Loops of a few rows, on a machine that others use too."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def data():
    rng = np.random.default_rng(5)
    table = np.zeros((ROWS, MARKET.width), "f4")
    table[:, : MARKET.table_columns] = rng.normal(size=(ROWS, MARKET.table_columns))
    last = np.zeros(ROWS, "f4")
    last[[99, ROWS - 1]] = 1
    return table, np.stack([np.exp(rng.normal(0, 0.01, ROWS).cumsum()), last]).astype("f4")


def trainer_of(env, kind="cpu", settings=TINY):
    return PPO(settings, env, *(data() if env is MARKET else ()), kind=kind)


def go_on(trainer, iterations):
    reports = [trainer.advance() for _ in range(iterations)]
    return [r for r in (*reports, trainer.drain()) if r is not None]


CARTPOLE = make("cartpole", max_steps=20)
ENVS = pytest.mark.parametrize("env", [CARTPOLE, MARKET], ids=lambda env: env.name)
KINDS = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


@KINDS
@ENVS
@PRECISIONS
def test_ten_iterations_saved_loaded_and_ten_more_are_twenty_bit_for_bit(
    env, kind, precision, tmp_path
):
    settings = dataclasses.replace(TINY, precision=precision)
    whole = trainer_of(env, kind, settings)
    reports = go_on(whole, 20)
    first = trainer_of(env, kind, settings)
    early = go_on(first, 10)
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.save(path, *first.state())
    loaded = checkpoint.load(path, expected_arrays(settings, env))
    second = trainer_of(env, kind, settings)
    second.restore(loaded.arrays, loaded.document)
    late = go_on(second, 10)
    assert early + late == reports
    (arrays, document), (want, want_document) = second.state(), whole.state()
    assert document == want_document
    assert arrays.keys() == want.keys() == set(STATE)
    for name, array in want.items():
        assert arrays[name].tobytes() == array.tobytes(), name


@KINDS
def test_a_checkpoint_in_between_changes_nothing(kind):
    plain, stopping = trainer_of(CARTPOLE, kind), trainer_of(CARTPOLE, kind)
    reports = go_on(plain, 6)
    assert [r for _ in range(6) for r in go_on(stopping, 1)] == reports
    for name, array in plain.state()[0].items():
        assert stopping.state()[0][name].tobytes() == array.tobytes(), name


def test_the_seed_is_all_that_chance_depends_on():
    same = [go_on(trainer_of(CARTPOLE), 3) for _ in range(2)]
    other = go_on(trainer_of(CARTPOLE, settings=dataclasses.replace(TINY, seed=4)), 3)
    assert same[0] == same[1]
    assert same[0] != other


def test_reports_count_iterations_steps_and_the_falling_rate():
    reports = go_on(trainer_of(CARTPOLE), 20)
    assert [r.iteration for r in reports] == list(range(1, 21))
    assert [r.steps for r in reports] == [48 * i for i in range(1, 21)]
    rates = [r.figures["lr"] for r in reports]
    assert rates == pytest.approx([1e-3 * (1 - i / 20) for i in range(20)])


def test_episodes_are_counted_over_the_borders_of_rollouts():
    # Every reward is 1, so an episode's return is its length, and they end at 20 steps at most.
    reports = go_on(trainer_of(CARTPOLE), 20)
    finished = [r.figures for r in reports if r.figures["episodes"]]
    assert all(f["return"] == f["length"] for f in finished)
    steps = sum(f["episodes"] * f["length"] for f in finished)
    assert 20 * 48 - 6 * 20 < steps <= 20 * 48
    assert max(f["length"] for f in finished) > 8


def test_training_stops_at_a_figure_that_is_not_finite():
    trainer = trainer_of(CARTPOLE)
    go_on(trainer, 2)
    trainer.buffers.parameters[3] = np.nan
    with pytest.raises(TrainingError, match=r"iteration 3: \w+ is (nan|inf) in update 1 of 6"):
        go_on(trainer, 1)


@ENVS
def test_it_learns(env):
    settings = dataclasses.replace(
        TINY, envs=16, rollout_steps=32, minibatches=4, hidden=(32,), total_steps=60 * 512, lr=3e-3
    )
    if env is MARKET:
        # The first feature is the next move: a policy that reads it earns on every bar.
        table, (price, last) = data()
        price = np.exp(np.append(0, np.where(table[:-1, 0] > 0, 0.01, -0.01)).cumsum()).astype("f4")
        trainer = PPO(settings, env, table, np.stack([price, last]))
    else:
        trainer = PPO(settings, make("cartpole", max_steps=200))
    reports = go_on(trainer, 60)
    begin, end = reports[0].mean_return, reports[-1].mean_return
    # A perfect week of 7 bars at 1 % earns 7 less a cost; the pole stood 20 steps at first.
    assert end > (5 if env is MARKET else 3 * begin)


@PRECISIONS
def test_the_plan_is_what_is_allocated(precision):
    settings = dataclasses.replace(TINY, precision=precision)
    plan = plan_of(settings, MARKET, ROWS, "cpu")
    arrays = allocate(plan, "cpu")
    assert arrays.slab.nbytes == plan.nbytes
    assert plan.nbytes == sum(b.nbytes for b in plan.declared.values())
    begins = arrays.slab.ctypes.data
    ends = begins
    for name, declared in plan.declared.items():
        array = getattr(arrays, name)
        assert (array.shape, array.dtype) == (tuple(declared.shape), declared.dtype)
        assert array.ctypes.data >= ends, "two buffers overlap"
        assert array.ctypes.data % pools.ALIGNMENT == 0
        ends = array.ctypes.data + array.nbytes
    assert ends <= begins + plan.nbytes
    real = 2 if precision == "bfloat16" else 4
    assert arrays.table.nbytes == ROWS * 56 * real
    assert arrays.table.dtype.name == precision


@pytest.mark.gpu
def test_the_plan_is_what_is_allocated_on_a_gpu():
    import cupy

    plan = plan_of(TINY, MARKET, ROWS, "cuda")
    free, _ = cupy.cuda.runtime.memGetInfo()
    arrays = allocate(plan, "cuda")
    taken = free - cupy.cuda.runtime.memGetInfo()[0]
    assert arrays.slab.nbytes == plan.nbytes
    assert taken <= max(1.1 * plan.nbytes, 4 << 20)


@pytest.mark.gpu
def test_training_takes_no_more_memory_as_it_goes():
    import cupy

    trainer = trainer_of(MARKET, "cuda")
    go_on(trainer, 2)
    free, _ = cupy.cuda.runtime.memGetInfo()
    go_on(trainer, 18)
    assert cupy.cuda.runtime.memGetInfo()[0] == free


@pytest.mark.parametrize("device", ["A100", "L4", "H200"])
def test_a_plan_for_a_gpu_holds_the_working_memory_of_every_op(device):
    settings = config.from_dict(config.PRESETS["market", "cuda"]).ppo
    with launch.recording(launch.KNOWN[device]):
        plan = plan_of(settings, make("market"), 1_000_000, "cuda")
    working = {name for name in plan.declared if "." in name}
    assert working >= {f"ppo_update.{name}" for name in ppo_update.scratch}
    assert "table" in str(plan)
    assert f"{pools.shown(plan.nbytes)}" in str(plan).splitlines()[-1]
    assert plan.declared["table"].nbytes == 112_000_000  # 56 columns of 2 bytes


def test_a_plan_that_does_not_fit_says_what_to_shrink():
    many = plan_of(dataclasses.replace(TINY, envs=12288, minibatches=96), CARTPOLE, 0, "cpu")
    with pytest.raises(MemoryPlanError, match=r"fewer ppo\.envs or ppo\.rollout_steps") as refused:
        many.check(many.nbytes, "a small GPU")
    assert "a small GPU" in str(refused.value)
    assert pools.shown(0.1 * many.nbytes) in str(refused.value)
    many.check(many.nbytes / 0.9 + 1, "a larger GPU")
    many.check(None, "a machine that does not say")
    wide = plan_of(dataclasses.replace(TINY, hidden=(512, 512)), CARTPOLE, 0, "cpu")
    with pytest.raises(MemoryPlanError, match=r"smaller ppo\.hidden"):
        wide.check(1000, "a small GPU")


def test_a_buffer_takes_whole_lines():
    plan = Plan({n: Declared((count,), np.float32, "") for n, count in (("a", 1), ("b", 65))})
    assert plan.offsets == {"a": 0, "b": 256}
    assert plan.nbytes == 256 + 512


class Refused(Exception):
    """Stands for CuPy's CUDARuntimeError."""


def test_without_page_locked_memory_ordinary_memory_is_used_and_said(monkeypatch):
    def refuse(nbytes):
        if nbytes > 65536:
            raise Refused("cudaErrorMemoryAllocation")
        return bytearray(nbytes)

    cuda = SimpleNamespace(
        alloc_pinned_memory=refuse, runtime=SimpleNamespace(CUDARuntimeError=Refused)
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    assert pools.staging((16384,), np.float32, "cuda").tolist() == [0] * 16384
    with pytest.warns(UserWarning, match="no page-locked memory"):
        array = pools.staging((16385,), np.float32, "cuda")
    assert array.tolist() == [0] * 16385


@pytest.mark.parametrize("shared", [True, False])
@ENVS
def test_first_parameters_are_orthogonal_with_the_published_gains(env, shared):
    settings = dataclasses.replace(TINY, hidden=(64, 16), shared=shared)
    network = network_of(settings, env)
    parameters = initial_parameters(network, env, 7)
    used = np.zeros(len(parameters), bool)
    heads = []
    for (layer, weight, bias), (_, uses_weight, uses_bias) in zip(
        network.views(parameters), network.views(used)
    ):
        uses_weight[:], uses_bias[:] = True, True
        assert (bias == 0).all()
        if layer.source < 0:
            assert (weight[:, env.observation :] == 0).all()
            weight = weight[:, : env.observation]
        if layer.head:
            heads += list(weight)
            continue
        small = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        assert small == pytest.approx(2 * np.eye(len(small)), abs=1e-5)
    assert (parameters[~used] == 0).all()
    logits, (value,) = np.array(heads[:-1]), heads[-1:]
    assert logits @ logits.T == pytest.approx(1e-4 * np.eye(env.actions), abs=1e-9)
    assert value @ value == pytest.approx(1, abs=1e-5)
    assert initial_parameters(network, env, 7).tobytes() == parameters.tobytes()
    assert initial_parameters(network, env, 8).tobytes() != parameters.tobytes()


def test_data_that_does_not_fit_the_environment_is_refused():
    table, series = data()
    with pytest.raises(ValueError, match=r"table must have shape \(300, 56\)"):
        PPO(TINY, MARKET, table[:, :48], series)
    with pytest.raises(ValueError, match="table must have shape"):
        PPO(TINY, MARKET, None, series)
    with pytest.raises(ValueError, match="table must have shape None for cartpole"):
        PPO(TINY, CARTPOLE, table)


@pytest.mark.gpu
def test_a_replayed_graph_does_what_single_calls_do():
    replayed, single = trainer_of(MARKET, "cuda"), trainer_of(MARKET, "cuda")
    go_on(replayed, 5)
    with single._queue.running():
        for _ in range(5):
            single._iterate()
    there = replayed.state()[0]
    for name, array in single.state()[0].items():
        assert there[name].tobytes() == array.tobytes(), name


def test_the_market_trains_on_the_oldest_bars_only():
    settings = config.from_dict({"market": dataclasses.asdict(MarketConfig(train=0.5))})
    task = runs.training_task(settings)
    whole = runs.training_task(config.from_dict({"market": {"train": 0.85}}))
    assert 0.55 < task.rows / whole.rows < 0.62
    assert task.normalizer["mean"].shape == (51,)
    assert (task.table[:, 54:] == 0).all()
    assert abs(task.table[:, :51].mean()) < 0.01
