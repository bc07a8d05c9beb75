"""The peers do the work they claim, at small sizes on a CPU; and the clock that compares them."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from bench import peers, timing
from bench.peers import workload

EPS = float(np.finfo(np.float32).eps)


@pytest.fixture
def ppo_jax():
    pytest.importorskip("jax", reason="the JAX peers need jax")
    pytest.importorskip("optax", reason="the JAX peers need optax")
    return peers.ppo_jax


@pytest.fixture
def dqn_jax():
    pytest.importorskip("jax", reason="the JAX peers need jax")
    pytest.importorskip("optax", reason="the JAX peers need optax")
    return peers.dqn_jax


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="the PyTorch peers need torch")


def gae_in_float64(reward, value, done, gamma, lam):
    """The recursion as it is written in the paper. `value` has one row more than `reward`."""
    reward, value, done = (np.asarray(x, np.float64) for x in (reward, value, done))
    advantage, after = np.empty_like(reward), 0.0
    for t in reversed(range(len(reward))):
        error = reward[t] + gamma * value[t + 1] * (1 - done[t]) - value[t]
        after = error + gamma * lam * (1 - done[t]) * after
        advantage[t] = after
    return advantage


def gae_tolerance(steps, value, reward):
    """Six roundings a step, each of a number under the sum of |error| along the recursion."""
    largest = float(np.abs(value).max() * 2 + np.abs(reward).max())
    settings = workload.PPO
    return 6 * steps * EPS * largest / (1 - settings["gamma"] * settings["lam"])


def arrays(layers):
    return [np.array(x, np.float64) for layer in layers for x in layer]


def distance(before, after):
    return max(np.abs(a - b).max() for a, b in zip(before, after, strict=True))


# The workload


def test_the_table_repeats_and_its_price_is_a_walk_of_a_thousandth_a_step():
    features, price = workload.table(rows=4000)
    again, _ = workload.table(rows=4000)
    np.testing.assert_array_equal(features, again)
    assert features.shape == (4000, 51) and features.dtype == price.dtype == np.float32
    assert np.std(np.diff(np.log(price))) == pytest.approx(1e-3, rel=0.05)
    assert workload.FLOPS_FORWARD == 2 * (56 * 256 + 256 * 128 + 128 * 64 + 64 * 8)


def test_naming_the_peers_imports_no_heavy_library_and_keeps_xla_from_taking_the_device():
    program = (
        "import os, sys; from bench import peers, timing;"
        "assert not {'jax', 'torch', 'pytorch_forecasting'} & set(sys.modules);"
        "print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    )
    root = os.path.dirname(os.path.dirname(peers.__path__[0]))
    environment = {**os.environ, "PYTHONPATH": root}
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "false", done.stderr


# JAX


def test_a_ppo_iteration_of_the_peer_runs_and_changes_every_parameter(ppo_jax):
    ppo = ppo_jax.PPO(envs=8, steps=8, minibatch=16, rows=2000)
    assert (ppo.env_steps, ppo.updates) == (64, 16)
    before = arrays(ppo.parameters)
    ppo.iteration()
    after = arrays(ppo.parameters)
    assert all(np.isfinite(x).all() for x in after)
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    ppo.rollout()
    assert ppo.trajectory.observation.shape == (8, 8, workload.PADDED)
    assert (np.asarray(ppo.trajectory.observation[..., workload.STATE :], float) == 0).all()


def test_the_options_that_draw_the_same_numbers_end_at_the_same_parameters(ppo_jax):
    sizes = {"envs": 8, "steps": 8, "minibatch": 16, "rows": 2000, "float32": True}
    same = {
        "donate": True,
        "advantage": "associative",
        "gather": "packed",
        "flat_optimizer": True,
        "narrow_table": True,
        "unroll_advantage": 2,
        "unroll_update": 2,
    }
    original, changed = ppo_jax.PPO(**sizes), ppo_jax.PPO(**sizes, **same)
    original.iteration()
    changed.iteration()
    # Adam moves a parameter by about its learning rate, however a rounding error is amplified
    # before: what must agree is far below one such step.
    allowed = workload.PPO["lr"] / 10
    assert distance(arrays(original.parameters), arrays(changed.parameters)) < allowed


def test_the_variants_that_draw_other_numbers_run(ppo_jax):
    options = ppo_jax.VARIANTS["lean, fast random, epoch gather"]
    ppo = ppo_jax.PPO(envs=8, steps=4, minibatch=16, rows=2000, **options)
    before = arrays(ppo.parameters)
    ppo.iteration()
    assert np.isfinite(float(ppo.mean_reward))
    assert distance(before, arrays(ppo.parameters)) > 0


def test_inverse_sampling_draws_an_action_as_often_as_its_probability(ppo_jax):
    import jax
    import jax.numpy as jnp

    envs = 20_000
    ppo = ppo_jax.PPO(envs=envs, steps=1, minibatch=envs, rows=2000, sampling="inverse")
    probabilities = np.array([0.2, 0.5, 0.3])
    logits = jnp.broadcast_to(jnp.log(probabilities), (envs, 3))
    action = np.asarray(ppo._sample(jax.random.key(1), logits))
    counts = np.bincount(action, minlength=3)
    # Five standard deviations of a binomial count.
    allowed = 5 * np.sqrt(envs * probabilities * (1 - probabilities))
    assert (np.abs(counts - envs * probabilities) < allowed).all()


def test_the_gae_of_the_ppo_peer_equals_the_recursion_in_float64(ppo_jax):
    random = np.random.default_rng(3)
    steps, envs = 31, 5
    reward = random.standard_normal((steps, envs)).astype(np.float32)
    value = random.standard_normal((steps + 1, envs)).astype(np.float32)
    done = random.random((steps, envs)) < 0.2
    got = ppo_jax.advantages(reward, value[:-1], done, value[-1], 0.99, 0.95)
    want = gae_in_float64(reward, value, done, 0.99, 0.95)
    np.testing.assert_allclose(got, want, rtol=0, atol=gae_tolerance(steps, value, reward))


@pytest.mark.parametrize("variant", ["original", "scan", "scan unrolled"])
def test_the_gae_peers_in_jax_equal_the_recursion_in_float64(ppo_jax, variant):
    gae = peers.gae_jax.GAE(steps=131, envs=7, **peers.gae_jax.VARIANTS[variant])
    gae.run(calls=2)
    reward, value, done = gae.inputs
    assert (done != 0).any()
    want = gae_in_float64(reward, value, done, 0.99, 0.95)
    np.testing.assert_allclose(gae.advantage, want, rtol=0, atol=gae_tolerance(131, value, reward))


def test_a_minibatch_that_leaves_samples_over_is_refused(ppo_jax):
    with pytest.raises(ValueError, match="minibatch must divide 64 samples, got 24"):
        ppo_jax.PPO(envs=8, steps=8, minibatch=24, rows=2000)


@pytest.mark.parametrize("variant", ["original", "lean, fast random"])
def test_the_dqn_peer_fills_its_replay_and_its_target_follows_the_network(dqn_jax, variant):
    options = dqn_jax.VARIANTS[variant]
    dqn = dqn_jax.DQN(envs=8, batch=16, updates=2, capacity=64, rows=2000, **options)
    before, target_before = arrays(dqn.parameters), arrays(dqn.target)
    assert distance(before, target_before) == 0
    dqn.run(iterations=4)
    moved, followed = (
        distance(before, arrays(dqn.parameters)),
        distance(target_before, arrays(dqn.target)),
    )
    # Eight soft updates of half a percent follow by less than eight times that.
    assert 0 < followed < 8 * workload.DQN["tau"] * moved
    assert all(np.isfinite(x).all() for x in arrays(dqn.parameters))
    observations = np.asarray(dqn._carry.replay[0], np.float32)
    assert (observations[:32] != 0).any(1).all() and (observations[32:] == 0).all()


def test_a_packed_dqn_replay_learns_the_same_as_columns(dqn_jax):
    sizes = {"envs": 8, "batch": 16, "capacity": 64, "rows": 2000, "float32": True}
    columns, rows = dqn_jax.DQN(**sizes), dqn_jax.DQN(**sizes, packed=True)
    columns.run(iterations=3)
    rows.run(iterations=3)
    assert distance(arrays(columns.parameters), arrays(rows.parameters)) < workload.DQN["lr"] / 10


# PyTorch


@pytest.mark.parametrize("form", ["autocast", "fresh_gradients", "bf16_weights"])
def test_a_torch_ppo_update_changes_every_parameter_the_same_way_in_each_form(torch, form):
    update = peers.updates_torch.PPOUpdate(64, device="cpu", mode="eager", form=form)
    before = [w.detach().clone() for w in update.model.master]
    update.run()
    moves = [(w.detach() - b).abs().max() for w, b in zip(update.model.master, before, strict=True)]
    assert all(m > 0 for m in moves)
    # One step of Adam from rest moves a parameter by its learning rate, up or down.
    assert max(moves) <= workload.PPO["lr"] * 1.01
    same = peers.updates_torch.PPOUpdate(64, device="cpu", mode="eager")
    same.run()
    # Both ran their network in bf16, 8 bits of precision.
    assert float(update.loss) == pytest.approx(float(same.loss), rel=2**-7)


@pytest.mark.parametrize("form", ["autocast", "bf16_weights"])
def test_a_torch_dqn_update_learns_and_its_target_follows_softly(torch, form):
    update = peers.updates_torch.DQNUpdate(32, capacity=256, device="cpu", mode="eager", form=form)
    before = [w.detach().clone() for w in update.model.master]
    target = [w.detach().clone() for w in update.target.master]
    update.run()
    for weight, old in zip(update.model.master, before, strict=True):
        assert (weight.detach() != old).any()
    for new, old, weight in zip(update.target.master, target, update.model.master, strict=True):
        want = torch.lerp(old, weight.detach(), workload.DQN["tau"])
        torch.testing.assert_close(new.detach(), want)


@pytest.mark.parametrize("fused", [False, True])
def test_the_gae_peer_in_torch_equals_the_recursion_in_float64(torch, fused):
    gae = peers.gae_torch.GAE(steps=131, envs=7, device="cpu", mode="eager", fused=fused)
    gae.run()
    reward, value, done = (x.numpy() for x in gae.inputs)
    assert (done != 0).any()
    want = gae_in_float64(reward, value, done, 0.99, 0.95)
    np.testing.assert_allclose(gae.advantage, want, rtol=0, atol=gae_tolerance(131, value, reward))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_mlp_with_its_relu_fused_gives_what_the_plain_one_gives(torch, precision):
    plain, fused = (
        peers.mlp_torch.MLP(33, precision, device="cpu", mode="eager", form=form)
        for form in ("sequential", "fused_relu")
    )
    plain.run()
    fused.run()
    assert plain.output.shape == (33, workload.OUTPUTS)
    torch.testing.assert_close(fused.output, plain.output)


def test_prioritized_replay_samples_by_priority_and_updates_what_it_drew(torch):
    for stratified in (False, True):
        replay = peers.per_torch.PrioritizedReplay(
            capacity=128, batch=32, device="cpu", mode="eager", stratified=stratified
        )
        replay.priority[:] = 1e-9
        replay.priority[40:44] = 1.0
        replay.run()
        assert set(replay.index.tolist()) == {40, 41, 42, 43}
        assert float(replay.weight.max()) == 1.0
        torch.testing.assert_close(replay.gathered, replay.observation[replay.index])
        assert (replay.priority[replay.index] != 1.0).all()


def test_the_int8_peers_multiply_exactly_and_requantize_alike(torch):
    gemm = peers.int8_torch.Gemm(33, 16, 64, device="cpu", mode="eager")
    gemm.run()
    assert (gemm.result == gemm.a.int() @ gemm.b.int()).all()
    outputs = []
    for form in ("plain", "fewer_passes"):
        network = peers.int8_torch.MLP(33, device="cpu", mode="eager", form=form)
        network.run()
        outputs.append(network.output)
    assert (outputs[0] == outputs[1]).all()


def test_the_ceilings_do_the_work_they_count(torch):
    copy = peers.ceilings_torch.Copy(count=1000, device="cpu")
    copy.destination.fill_(float("nan"))
    copy.run()
    assert (copy.destination == copy.source).all() and copy.nbytes == 8000
    gemm = peers.ceilings_torch.Gemm(size=32, device="cpu")
    gemm.run()
    assert gemm.result.isfinite().all() and gemm.flops == 65536


def test_the_tft_peer_computes_the_same_without_the_handling_of_lengths(torch):
    pytest.importorskip("pytorch_forecasting", reason="the TFT peer needs pytorch-forecasting")
    sizes = {"batch": 3, "hidden": 8, "heads": 2, "encoder": 7, "decoder": 3}
    outputs = []
    for full_lengths in (False, True):
        tft = peers.tft_torch.TFT(
            **sizes, precision="float32", device="cpu", full_lengths=full_lengths
        )
        tft.run()
        outputs.append(tft.output)
    torch.testing.assert_close(*outputs)


def test_a_graph_on_a_cpu_is_refused_and_not_run_eagerly(torch):
    with pytest.raises(ValueError, match="mode='eager'"):
        peers.mlp_torch.MLP(8, device="cpu", mode="graph")


# The clock


class FakeClock:
    """Time that passes only when an arm says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def arm(self, durations):
        remaining = iter(durations)

        def work():
            self.now += next(remaining)

        return work


def test_arms_are_interleaved_and_every_other_round_goes_backwards():
    order = []
    arms = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = timing.interleaved(arms, rounds=3, warmup=1, clock="wall")
    assert "".join(order) == "abc" + "cba" + "abc" + "cba"
    assert [len(samples[name].seconds) for name in "abc"] == [3, 3, 3]


def test_the_statistics_are_those_of_known_samples_and_leave_the_warm_up_out():
    clock = FakeClock()
    arms = {
        "ours": clock.arm([99.0, 1.0, 2.0, 3.0, 4.0, 10.0]),
        "peer": clock.arm([77.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
    }
    samples = timing.interleaved(arms, rounds=5, warmup=1, clock=timing.wall_clock(clock))
    ours = samples["ours"]
    assert ours.seconds == (1.0, 2.0, 3.0, 4.0, 10.0)
    assert (ours.median, ours.minimum, ours.interquartile_range) == (3.0, 1.0, 2.0)
    assert (samples["peer"].median, samples["peer"].interquartile_range) == (8.0, 0.0)
    assert ours.per(2).seconds == (0.5, 1.0, 1.5, 2.0, 5.0)


def test_repeats_divide_the_time_and_what_runs_before_is_not_timed():
    clock = FakeClock()
    samples = timing.interleaved(
        {"a": clock.arm([1.0, 3.0, 2.0, 4.0])},
        rounds=2,
        warmup=0,
        clock=timing.wall_clock(clock),
        repeats=2,
        before=clock.arm([50.0, 50.0]),
    )
    assert samples["a"].seconds == (2.0, 3.0)


def test_each_arm_can_have_a_clock_of_its_own():
    samples = timing.interleaved(
        {"a": lambda: None, "b": lambda: None},
        rounds=1,
        clock={"a": lambda arm: 1.0, "b": lambda arm: 2.0},
    )
    assert (samples["a"].seconds, samples["b"].seconds) == ((1.0,), (2.0,))


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"warmup": -1}, {"repeats": 0}, {"clock": "sundial"}, {"arms": {}}]
)
def test_interleaved_refuses_what_it_cannot_do_and_names_it(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        timing.interleaved(**{"arms": {"a": lambda: None}, **wrong})


def test_device_facts_are_there_or_none_and_never_an_error(monkeypatch):
    for missing in ("pynvml", "cupy", "torch"):
        monkeypatch.setitem(sys.modules, missing, None)
    facts = timing.device_facts()
    assert facts["gpu"] is facts["driver"] is facts["sm_clock_mhz"] is None
    assert facts["versions"]["numpy"] == np.__version__
    json.dumps(facts)


def test_a_row_is_judged_by_its_ratio_or_by_its_seconds():
    ours, peer = timing.Sample((1.0,)), timing.Sample((4.0,))
    assert timing.Row("a", ours, peer, bar_ratio=4).passed
    assert not timing.Row("a", ours, peer, bar_ratio=5).passed
    assert timing.Row("a", ours, bar_seconds=1.0).passed
    assert timing.Row("a", None, peer, bar_ratio=4).passed is None
    with pytest.raises(ValueError, match="bar_ratio or bar_seconds"):
        timing.Row("a", bar_ratio=4, bar_seconds=1.0)


def test_the_report_shows_times_rates_and_gaps_and_the_file_holds_every_sample(tmp_path):
    rows = [
        timing.Row(
            "gae [128 x 4096]",
            timing.Sample((5e-6, 6e-6, 7e-6)),
            timing.Sample((62e-6,)),
            floor_seconds=2e-6,
            bar_seconds=8e-6,
        ),
        timing.Row("ppo", peer=timing.Sample((0.05,)), items=1e6, unit="env-steps", bar_ratio=5),
    ]
    printed = io.StringIO()
    timing.report(rows, Console(file=printed, width=120))
    text = printed.getvalue()
    shown = ("gae [128 x 4096]", "6 µs", "62 µs", "10.33x", "8 µs", "2 µs", "20 Menv-steps/s", "5x")
    assert all(part in text for part in shown), text
    path = tmp_path / "results" / "versus.json"
    timing.save(path, rows, {"gpu": None})
    saved = json.loads(path.read_text())
    assert saved["facts"] == {"gpu": None}
    assert saved["rows"][0]["ours"]["seconds"] == [5e-6, 6e-6, 7e-6]
    assert saved["rows"][0]["passed"] is True and saved["rows"][1]["ours"] is None
    assert [p.name for p in path.parent.iterdir()] == ["versus.json"]
