"""Policy: any library's arrays in and out, runs, draws; on a GPU the same as on the CPU."""

import numpy as np
import pytest
from typer.testing import CliRunner

from lowgpu import runs
from lowgpu.__main__ import app
from lowgpu.checkpoint import CheckpointError
from lowgpu.initialize import network_of
from lowgpu.policy import Policy
from lowgpu.runs import RunError
from lowgpu_kernels import act
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import policy_network

NETWORK = policy_network(56, 3)
TRAIN = (
    *("train", "--env", "cartpole", "--device", "cpu", "--steps", "100", "--run", "run"),
    *(
        "--set",
        "envs=6",
        "--set",
        "rollout_steps=8",
        "--set",
        "minibatches=3",
        "--set",
        "hidden=[8]",
    ),
    *("--set", "max_steps=20", "--set", "cartpole.episodes=5"),
)


def policy(**given):
    parameters = draw_parameters(np.random.default_rng(0), NETWORK)
    return Policy(NETWORK, parameters, 3, **{"device": "cpu", "seed": 4, **given})


def observations(rows=33):
    return np.random.default_rng(rows).standard_normal((rows, 56), np.float32)


def numpy_in():
    return observations(), np.ndarray


def torch_in():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.from_numpy(observations()), torch.Tensor


def jax_in():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    return jax.device_put(observations(), jax.devices("cpu")[0]), jax.Array


@pytest.mark.parametrize("library", (numpy_in, torch_in, jax_in))
@pytest.mark.parametrize("greedy", (True, False))
def test_actions_come_in_the_arrays_that_observations_came_in(library, greedy):
    given, kind = library()
    mine = policy()
    got = mine.act(given, greedy=greedy)
    clock = np.zeros(1, np.uint64)
    want = act(
        observations(), mine.parameters, None, clock,
        network=NETWORK, actions=3, seed=4, greedy=greedy,
    )  # fmt: skip
    for one, other in zip(got, want, strict=True):
        assert isinstance(one, kind)
        assert np.asarray(one).tobytes() == other.tobytes()


def test_every_call_draws_anew_and_a_step_set_back_draws_again():
    mine, given = policy(), observations(500)
    first, second = (mine.act(given, greedy=False).action for _ in range(2))
    assert (first != second).any() and mine.step == 2
    mine.act(given)
    assert mine.step == 2
    mine.step = 0
    assert (mine.act(given, greedy=False).action == first).all()


def test_parameters_are_kept_as_they_were_given():
    parameters = draw_parameters(np.random.default_rng(0), NETWORK)
    mine = Policy(NETWORK, parameters, 3, device="cpu")
    before = mine.act(observations()).value
    parameters[:] = 0
    assert (mine.act(observations()).value == before).all()


def test_what_does_not_fit_is_refused_by_name():
    parameters = draw_parameters(np.random.default_rng(0), NETWORK)
    with pytest.raises(TypeError, match="parameters must be float32, got float64"):
        Policy(NETWORK, parameters.astype(np.float64), 3, device="cpu")
    with pytest.raises(ValueError, match=f"parameters must be {len(parameters)} in a row"):
        Policy(NETWORK, parameters[:-1], 3, device="cpu")
    with pytest.raises(ValueError, match="actions must be the columns"):
        Policy(NETWORK, parameters, 7, device="cpu")
    with pytest.raises(ValueError, match=r"observation must be \[rows, 56\], got shape \(56,\)"):
        policy().act(observations()[0])
    with pytest.raises(ValueError, match=r"observation must be \[rows, 56\], got shape \(33, 54\)"):
        policy().act(observations()[:, :54].copy())
    with pytest.raises(TypeError, match="observation must be float32 or bfloat16"):
        policy().act(observations().astype(np.float64))


def test_a_runs_policy_is_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, TRAIN).exit_code == 0
    mine = Policy.of_run("run", device="cpu")
    settings = runs.opened("run")
    env = runs.environment(settings)
    assert mine.network == network_of(settings.ppo, env) and mine.params["actions"] == env.actions
    given = np.zeros((3, env.width), np.float32)
    assert set(mine.act(given).action) <= set(range(env.actions))
    assert mine.normalizer == {}
    text = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(text.replace("hidden = [8]", "hidden = [16]"))
    with pytest.raises(CheckpointError, match="another network than its config's"):
        Policy.of_run("run", device="cpu")
    with pytest.raises(RunError, match="nowhere is no run"):
        Policy.of_run("nowhere", device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 64, 65, 300, 5000))
@pytest.mark.parametrize("greedy", (True, False))
def test_the_gpu_gives_one_answer_whichever_way_an_observation_came(rows, greedy):
    import cupy

    torch = pytest.importorskip("torch", reason="torch is not installed")
    given = observations(rows)
    want = policy().act(given, greedy)
    there = policy(device="cuda").act(cupy.asarray(given), greedy)
    theirs = policy().act(torch.from_numpy(given).cuda(), greedy)
    mine = policy(device="cuda")
    for step in range(3):  # the graph is captured once and replayed
        mine.step = 0
        staged = mine.act(given, greedy)
        for name in act.outputs:
            expected = getattr(there, name).get()
            assert getattr(staged, name).tobytes() == expected.tobytes(), (name, step)
            assert getattr(theirs, name).cpu().numpy().tobytes() == expected.tobytes(), name
    np.testing.assert_allclose(staged.value, want.value, atol=1e-4)
    assert (staged.action == want.action).mean() > 0.99
