"""The DQN trainer: intervals in env steps, what is learned when, and that a stopped run goes on."""

import dataclasses
import json
import tomllib
import warnings
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st
from typer.testing import CliRunner

from lowgpu import checkpoint, config, runs
from lowgpu.__main__ import app
from lowgpu.config import ConfigError, DQNConfig
from lowgpu.dqn import DQN, linear
from lowgpu.dqn_plan import expected_arrays, plan_of, state_names
from lowgpu.envs import make
from lowgpu.hardware import choose
from lowgpu.initialize import initial_values, values_network_of
from lowgpu.policy import Policy
from lowgpu.pools import allocate
from lowgpu_kernels import dqn_rounds, dqn_update, launch, mlp_forward, target_move
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.ops.replay.replay_write import spec_sums
from tests.test_ppo import CARTPOLE, MARKET, ROWS, data, go_on

TINY = DQNConfig(
    total_steps=10 * 40,
    seed=3,
    envs=4,
    capacity=120,
    batch=16,
    learning_starts=60,
    train_every=8,
    rounds=5,
    target_every=30,
    epsilon_steps=200,
    hidden=(12, 8),
    lr=1e-3,
)
EVERYTHING = {
    "updates": 2,
    "target_every": 0,
    "tau": 0.05,
    "n_steps": 3,
    "double": True,
    "dueling": True,
    "huber": 1.0,
    "max_norm": 0.5,
    "prioritized": True,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Loops of a few rows, on a machine that others use too."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def trainer_of(env=CARTPOLE, kind="cpu", **changes):
    settings = dataclasses.replace(TINY, **changes)
    return DQN(settings, env, *(data() if env is MARKET else ()), kind=kind)


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes(), name


CASES = pytest.mark.parametrize(
    "env, changes",
    [(CARTPOLE, {}), (CARTPOLE, EVERYTHING), (MARKET, EVERYTHING | {"precision": "bfloat16"})],
    ids=["plain", "everything", "market"],
)


@CASES
def test_five_iterations_saved_loaded_and_five_more_are_ten_bit_for_bit(env, changes, tmp_path):
    whole = trainer_of(env, **changes)
    reports = go_on(whole, 10)
    first = trainer_of(env, **changes)
    early = go_on(first, 5)
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.save(path, *first.state())
    loaded = checkpoint.load(path, expected_arrays(first.config, env))
    second = trainer_of(env, **changes)
    second.restore(loaded.arrays, loaded.document)
    assert early + go_on(second, 5) == reports
    (arrays, document), (want, want_document) = second.state(), whole.state()
    assert document == want_document
    assert set(want) == set(state_names(whole.config))
    same(arrays, want)
    assert want["step"][0] > 0 and not np.array_equal(want["parameters"], want["target"])


def test_a_restored_trainer_forgets_what_it_had_done():
    whole, used = trainer_of(**EVERYTHING), trainer_of(**EVERYTHING)
    go_on(whole, 3)
    saved = whole.state()
    want = go_on(whole, 3)
    go_on(used, 7)
    used.restore(*saved)
    assert go_on(used, 3) == want
    same(used.state()[0], whole.state()[0])


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["plain", "everything"])
def test_without_its_replay_a_run_fills_it_anew_and_says_so(changes):
    first = trainer_of(save_replay=False, **changes)
    go_on(first, 6)
    arrays, document = first.state()
    assert not any(name.startswith("kept") or name == "priority" for name in arrays)
    second = trainer_of(save_replay=False, **changes)
    go_on(second, 2)
    with pytest.warns(UserWarning, match="no replay .* filled anew for 56 env steps"):
        second.restore(arrays, document)
    assert second.buffers.head.tolist() == [0, 0, 0]
    # 56 steps are seven rounds: all five of the first iteration, and two of the second.
    (report,) = go_on(second, 1)
    assert (report.iteration, report.steps, report.figures["updates"]) == (7, 280, 0)
    assert report.figures["loss"] is None and report.figures["norm"] is None
    assert second.buffers.parameters.tobytes() == arrays["parameters"].tobytes()
    assert second.buffers.head.tolist() == [10, 10, 0]
    (report,) = go_on(second, 1)
    assert report.figures["updates"] == 3 * second.config.updates
    assert report.figures["epsilon"] == TINY.epsilon_end


@pytest.mark.parametrize("changes", [{}, {"prioritized": True}], ids=["uniform", "prioritized"])
def test_500_updates_from_one_seed_give_the_same_bits_twice(changes):
    small = {"envs": 2, "train_every": 2, "rounds": 100, "learning_starts": 0, "hidden": (8,)}
    first, second = (trainer_of(**small, **changes) for _ in range(2))
    assert go_on(first, 5) == go_on(second, 5)
    same(second.state()[0], first.state()[0])
    assert first.buffers.step[0] == 500


def test_the_seed_is_all_that_chance_depends_on():
    assert go_on(trainer_of(seed=4), 4) != go_on(trainer_of(seed=5), 4)


@pytest.mark.parametrize(
    "learning_starts, done",
    # Rounds end at 8, 16 and so on; an iteration is five of them.
    [(0, [5, 10]), (8, [5, 10]), (9, [4, 9]), (60, [0, 3]), (64, [0, 3]), (65, [0, 2])],
)
def test_learning_starts_with_the_round_that_reaches_it(learning_starts, done):
    trainer = trainer_of(learning_starts=learning_starts)
    for updates in done:
        go_on(trainer, 1)
        assert trainer.buffers.step[0] == updates


def moves_of(**changes):
    """Clocks at which an iteration's calls of target_move changed the target.

    Where replay is prioritized a round is op after op; dqn_rounds gives what these give.
    """
    trainer = trainer_of(learning_starts=0, prioritized=True, **changes)
    b, at = trainer.buffers, []

    def watched(op, *arrays, **given):
        before = b.target.copy()
        op(*arrays, **given)
        if op is target_move and not np.array_equal(before, b.target):
            assert b.target.tobytes() == b.parameters.tobytes()
            at.append(int(b.clock[0]))
        elif op is dqn_update:
            assert b.target.tobytes() == before.tobytes(), "an update moved the target"

    trainer.walk(watched)
    return at


def test_a_target_that_moves_every_501_steps_moves_10_times_in_5010_steps_of_training_every_10():
    small = {"envs": 1, "train_every": 10, "rounds": 501, "hidden": (8,)}
    at = moves_of(**small, target_every=501)
    assert len(at) == 10
    # Made at once after the last update before 501, 1002 and so on up to 5010.
    assert at == [501 * k // 10 * 10 for k in range(1, 11)]


def test_intervals_count_the_steps_of_all_environments():
    # Steps 30, 60, 90 and 120, of four environments each; moved after the updates at 24, 56, 88, 120.
    assert moves_of(rounds=15, target_every=30) == [6, 14, 22, 30]


@rules(deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 3))
def test_the_target_is_that_of_a_loop_that_looks_at_every_step(rounds_apart, every, envs):
    train, seen, wanted = rounds_apart * envs, [], []
    updates, target = 0, 0
    for step in range(1, 121):
        if step % train == 0:
            wanted.append(target)
            updates += 1
        if step % every == 0:
            target = updates
    learned, held = np.zeros(1, "f4"), np.zeros(1, "f4")
    for done in range(train, 121, train):
        seen.append(held[0])
        learned[0] += 1
        clock = np.array([done // envs], "u8")
        target_move(learned, held, clock, envs=envs, ahead=train, every=every)
    assert seen == wanted


BIG = st.one_of(st.integers(1, 100), st.integers(1, 2**50))


@rules(deadline=None)
@given(st.one_of(st.integers(0, 100), st.integers(0, 2**40)), st.integers(1, 4096), BIG, BIG)
def test_a_target_s_moves_are_due_exactly_however_many_steps_were_done(clock, envs, ahead, every):
    target, now = np.zeros(1, "f4"), clock * envs
    given = {"envs": envs, "ahead": ahead, "every": every}
    target_move(np.ones(1, "f4"), target, np.array([clock], "u8"), **given)
    assert target[0] == ((now + ahead - 1) // every > (max(now, 1) - 1) // every)


def test_epsilon_is_the_published_line_and_its_end_for_a_duration_of_0():
    line = [linear(t, 1.0, 0.05, 10) for t in (0, 1, 5, 9, 10, 11)]
    assert line == pytest.approx([1, 0.905, 0.525, 0.145, 0.05, 0.05])
    assert linear(0, 1.0, 0.05, 0) == 0.05


def test_epsilon_is_reported_and_is_what_all_environments_act_by():
    # Action 1 is worth more everywhere. Ten steps of four environments are an iteration.
    def explored(steps):
        trainer = trainer_of(epsilon_steps=steps, epsilon_end=0.0, learning_starts=400)
        b = trainer.buffers
        b.parameters[:] = 0
        _, _, bias = list(trainer.network.views(b.parameters))[-1]
        bias[1] = 1
        epsilons = [r.figures["epsilon"] for r in go_on(trainer, 3)]
        return epsilons, [int((b.kept_mark[k : k + 10] >> 2 == 0).sum()) for k in (0, 10, 20)]

    with pytest.warns(UserWarning, match="learning_starts"):
        assert explored(0) == ([0, 0, 0], [0, 0, 0])
        epsilons, (first, *later) = explored(40)
        assert epsilons == [0, 0, 0] and first > 3 and later == [0, 0]
        epsilons, counts = explored(120)
        assert epsilons == pytest.approx([2 / 3, 1 / 3, 0]) and min(counts) > 0


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_batch_larger_than_the_replay_is_drawn_with_replacement(prioritized):
    small = {"envs": 1, "train_every": 3, "capacity": 3, "batch": 8, "rounds": 1}
    trainer = trainer_of(**small, learning_starts=3, prioritized=prioritized)
    reports = go_on(trainer, 5)
    assert all(np.isfinite(r.figures["loss"]) for r in reports) and trainer.buffers.step[0] == 5
    if prioritized:
        index = trainer.buffers.index
        assert index.shape == (1, 8) and set(index.ravel()) <= {0, 1, 2}


def test_importance_weights_follow_the_schedule_of_the_run():
    trainer = trainer_of(**EVERYTHING, learning_starts=0)
    b, seen = trainer.buffers, []

    def watched(op, *arrays, **given):
        op(*arrays, **given)
        if op is dqn_update:
            beta = 0.4 + 0.6 * int(b.clock[0]) / 100
            drawn = b.priority[b.index]
            want = (drawn.min(axis=1, keepdims=True) / drawn) ** beta
            np.testing.assert_allclose(b.row_weight, want, 1e-4)
            assert arrays[12] is b.row_weight
            seen.append(b.row_weight.min())

    for _ in range(4):
        trainer.walk(watched)
    assert len(seen) == 20 and min(seen) < 0.95
    np.testing.assert_array_equal(b.sums, spec_sums(b.priority.astype("f8")))
    assert (b.priority[:120] > 0).all() and len(set(b.priority[:120])) > 30


@pytest.mark.parametrize("dueling", [False, True])
def test_hidden_widths_are_rounded_up_with_units_that_nothing_reaches(dueling):
    settings = dataclasses.replace(TINY, hidden=(12, 5), dueling=dueling)
    network, env = values_network_of(settings, CARTPOLE), CARTPOLE
    assert network.towers == ((16, 8, 2 + dueling),)
    trainer = trainer_of(hidden=(12, 5), dueling=dueling, learning_starts=0)
    go_on(trainer, 3)
    begun = initial_values(settings, env)
    for parameters in (begun, trainer.buffers.parameters):
        (_, w1, b1), (_, w2, b2), (_, w3, b3) = network.views(parameters)
        assert (w1[:, 4:] == 0).all()
        for weight, bias, after, real in ((w1, b1, w2, 12), (w2, b2, w3, 5)):
            assert (weight[real:] == 0).all() and (bias[real:] == 0).all()
            assert (after[:, real:] == 0).all()
            assert (weight[:real, : 4 if real == 12 else 12] != 0).all()
    assert not np.array_equal(begun, trainer.buffers.parameters)
    (_, w1, b1), (_, w2, b2), (_, w3, b3) = network.views(begun)
    for array, fan_in in ((w1, 4), (b1, 4), (w2, 12), (b2, 12), (w3, 5), (b3, 5)):
        assert 0.25 / fan_in**0.5 < abs(array).max() <= np.float32(1 / fan_in**0.5)


def test_cleanrl_s_network_is_computed_as_it_is():
    settings = DQNConfig(seed=1)
    network = values_network_of(settings, CARTPOLE)
    (_, w1, b1), (_, w2, b2), (_, w3, b3) = network.views(initial_values(settings, CARTPOLE))
    x = np.zeros((3, 8), "f4")
    x[:, :4] = np.random.default_rng(0).normal(size=(3, 4))
    hidden = np.maximum(x[:, :4] @ w1[:120, :4].T + b1[:120], 0)
    hidden = np.maximum(hidden @ w2[:84, :120].T + b2[:84], 0)
    y = mlp_forward(x, initial_values(settings, CARTPOLE), network=network).y
    np.testing.assert_allclose(y[:, :2], hidden @ w3[:, :84].T + b3, 1e-4, 1e-5)


REFUSED = [
    ({"envs": 3}, "capacity must be a multiple of envs = 3, got 10000; 10002 is one"),
    ({"envs": 4}, "train_every must be a multiple of envs = 4, got 10; 12 is one"),
    ({"target_every": 5, "tau": 0.5}, "at least train_every = 10 where tau is below 1, got 5"),
    ({"total_steps": 2**40}, "a run has below 2^31 updates"),
    ({"batch": 2**22, "updates": 2**10}, "updates * batch must be below 2^31"),
    ({"gamma": 1.1}, "gamma must be in"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_settings_that_cannot_be_met_are_refused(changes, message):
    with pytest.raises(ConfigError) as refused:
        DQNConfig(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("env", ["cartpole", "acrobot"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_presets_of_classic_control_are_the_published_ones(env, device):
    preset = config.preset_of(env, "dqn", device)
    chosen = config.from_dict(config.merge(preset, {"env": env, "algo": "dqn", "device": device}))
    own = dataclasses.asdict(chosen.trainer)
    ours = "seed", "rounds", "checkpoints", "save_replay", "huber", "alpha", "priority_eps"
    for name in (*ours, "accumulate"):
        del own[name]
    assert own == {
        "total_steps": 500_000,
        "envs": 1,
        "capacity": 10_000,
        "batch": 128,
        "learning_starts": 10_000,
        "train_every": 10,
        "updates": 1,
        "target_every": 500,
        "tau": 1.0,
        "gamma": 0.99,
        "n_steps": 1,
        "double": False,
        "dueling": False,
        "lr": 2.5e-4,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "max_norm": 0.0,
        "epsilon_start": 1.0,
        "epsilon_end": 0.05,
        "epsilon_steps": 250_000,
        "prioritized": False,
        "beta_start": 0.4,
        "beta_end": 1.0,
        "hidden": (120, 84),
        "activation": "relu",
        "precision": "float32",
    }
    assert chosen.trainer.huber == 0
    assert (chosen.world.max_steps, chosen.world.limit_terminates) == (500, False)


def test_learning_that_starts_after_epsilon_s_end_or_the_run_s_is_warned_of():
    with pytest.warns(UserWarning, match="learning_starts = 1000 is past dqn.epsilon_steps = 100"):
        DQNConfig(learning_starts=1000, epsilon_steps=100)
    with pytest.warns(UserWarning, match="total_steps = 10: nothing is learned"):
        DQNConfig(learning_starts=11, total_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DQNConfig(learning_starts=100, epsilon_steps=100, total_steps=100)
        DQNConfig(learning_starts=1000, epsilon_steps=0, epsilon_start=0.1, epsilon_end=0.1)


def test_the_target_interval_survives_saving_and_loading_four_times():
    settings = config.from_dict({"dqn": {"envs": 4, "train_every": 4, "target_every": 2500}})
    for _ in range(4):
        settings = config.from_dict(tomllib.loads(config.to_toml(config.to_dict(settings))))
        ops = DQN.settings_of(settings.dqn, CARTPOLE, values_network_of(settings.dqn, CARTPOLE))
        assert settings.dqn.target_every == ops[dqn_rounds]["target_every"] == 2500


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_plan_is_what_is_allocated(changes):
    settings = dataclasses.replace(TINY, precision="bfloat16", **changes)
    plan = plan_of(settings, MARKET, ROWS, "cpu")
    arrays = allocate(plan, "cpu")
    assert arrays.slab.nbytes == plan.nbytes
    for name, declared in plan.declared.items():
        array = getattr(arrays, name)
        assert (array.shape, array.dtype) == (tuple(declared.shape), declared.dtype)
    assert arrays.table.dtype.name == "bfloat16"
    for name, (shape, dtype) in expected_arrays(settings, MARKET).items():
        assert (plan.declared[name].shape, plan.declared[name].dtype) == (shape, dtype)


def test_a_plan_for_a_gpu_holds_37_bytes_a_transition_and_the_working_memory_of_every_op():
    settings = config.from_dict(config.preset_of("market", "dqn", "cuda")).dqn
    with launch.recording(launch.KNOWN["H200"]):
        plan = plan_of(settings, make("market"), 1_000_000, "cuda")
    assert {n for n in plan.declared if "." in n} >= {f"dqn_rounds.{n}" for n in dqn_rounds.scratch}
    kept = sum(b.nbytes for n, b in plan.declared.items() if n.startswith("kept"))
    assert kept == 37 * 2**20
    large = dataclasses.replace(settings, capacity=100_003_840)
    whole = plan_of(large, make("market"), 0, "cpu")
    with pytest.raises(ValueError, match=r"a smaller dqn\.capacity: 3\.. GB depend on it"):
        whole.check(whole.nbytes, "a small GPU")


@CASES
def test_a_gpu_s_launches_take_the_working_memory_that_was_planned(env, changes):
    trainer, launched = trainer_of(env, **changes), []
    with launch.recording(launch.KNOWN["H200"]):
        plan = plan_of(trainer.config, env, ROWS if env is MARKET else 0, "cuda")

    def there(array):
        return None if array is None else Buffer(array.ctypes.data, array.shape, array.dtype)

    def recorded(op, *arrays, out=None, **given):
        out = out if isinstance(out, tuple) else () if out is None else (out,)
        bound = op.signature.bind_partial(*arrays, **given).arguments
        params, inputs = op.checked_params(bound), [bound.get(name) for name in op.inputs]
        shown = zip([*op.inputs.values(), *op.outputs.values()], [*inputs, *out], strict=True)
        sizes = {d: n for spec, a in shown if a is not None for d, n in zip(spec.shape, a.shape)}
        named = {str(d): n for d, n in op.sizes_of(sizes, params).items()}
        with launch.recording(launch.KNOWN["H200"]) as made:
            work = []
            for name, wanted in op.scratch_specs(named, params, trainer.config.precision).items():
                planned = plan.declared[f"{op}.{name}"]
                assert (planned.shape, planned.dtype) == (tuple(wanted[0]), np.dtype(wanted[1]))
                work.append(Buffer(0x7E0000000000, planned.shape, planned.dtype))
            op.cuda(*map(there, inputs), *params.values(), *map(there, out), *work, 0)
        launched.append((str(op), len(made)))

    trainer.walk(recorded)
    called = {str(op) for op in trainer._settings}
    assert {name for name, count in launched if count} == called


def test_it_learns():
    table, (price, last) = data()
    # The first feature is the next move: action values that read it earn on every bar.
    price = np.exp(np.append(0, np.where(table[:-1, 0] > 0, 0.01, -0.01)).cumsum()).astype("f4")
    changes = {"envs": 16, "train_every": 16, "capacity": 3200, "batch": 64, "hidden": (32,)}
    changes |= {"epsilon_steps": 1600, "epsilon_end": 0.0, "gamma": 0.5, "rounds": 20, "lr": 3e-3}
    settings = dataclasses.replace(TINY, total_steps=9600, target_every=64, **changes)
    reports = go_on(DQN(settings, MARKET, table, np.stack([price, last])), settings.iterations)
    # A perfect week of 7 bars at 1 % earns 6 less a cost.
    assert reports[-1].mean_return > 4 > 2 > reports[0].mean_return


SMALL = (
    *("--algo", "dqn", "--device", "cpu", "--steps", "400", "--set", "envs=4"),
    *("--set", "train_every=8", "--set", "rounds=5", "--set", "capacity=120"),
    *("--set", "batch=16", "--set", "learning_starts=60", "--set", "hidden=[12]"),
    *("--set", "epsilon_steps=200", "--set", "prioritized=true"),
)


@pytest.mark.parametrize("env", ["cartpole", "acrobot", "market"])
def test_a_stopped_run_goes_on_from_the_command_line_and_is_evaluated(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = () if env == "market" else ("--set", "max_steps=20", "--set", f"{env}.episodes=5")

    def cli(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    printed = json.loads(cli("train", "--env", env, *SMALL, *own, "--run", "whole", "--json"))
    assert (printed["iterations"], printed["steps"]) == (10, 400)
    assert json.loads(cli("evaluate", "whole", "--json")) == printed["evaluation"]

    settings = runs.opened("whole")
    stop = SimpleNamespace(asked=False)
    before = DQN.advance

    def advance(self):
        stop.asked = self.iteration == 3
        return before(self)

    monkeypatch.setattr(DQN, "advance", advance)
    task = runs.training_task(settings)
    runs.train(runs.create("part", settings), settings, task, choose("cpu"), False, stop)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert checkpoint.load("part/checkpoint.safetensors").document["iteration"] == 4
    text = cli("train", "--run", "part", "--resume")
    assert "dqn_update" not in text and "kept_floats" in text
    done = [checkpoint.load(f"{run}/checkpoint.safetensors") for run in ("whole", "part")]
    same(done[1].arrays, done[0].arrays)
    assert done[0].document == done[1].document
    lines = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "part")
    ]
    assert {"epsilon", "beta", "updates", "loss", "norm"} <= lines[0][-1].keys()
    for whole, part in zip(*lines, strict=True):
        assert part == whole | {"seconds": part["seconds"]}
    policy = Policy.of_run("part", device="cpu")
    action, _, _ = policy.act(np.zeros((2, policy.network.inputs), "f4"))
    assert ((action >= 0) & (action < 3)).all()
