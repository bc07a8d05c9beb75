"""`lowgpu quantize`: exit codes, files, and one sentence an error."""

import json
import os
import subprocess
import sys

import numba
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lowgpu import checkpoint
from lowgpu.__main__ import _in_one_sentence
from lowgpu.__main__ import app as whole
from lowgpu.quantization.command import register
from lowgpu.quantization.policy import QuantizedPolicy
from lowgpu.quantization.run import Subject

SMALL = (
    *("--env", "cartpole", "--device", "cpu", "--steps", "400", "--set", "ppo.envs=4"),
    *("--set", "ppo.rollout_steps=20", "--set", "ppo.hidden=[8]", "--set", "cartpole.max_steps=30"),
    *("--set", "cartpole.episodes=5", "--set", "ppo.activation=relu"),
)
MARKET = (
    *("--device", "cpu", "--steps", "100", "--set", "ppo.envs=6", "--set", "ppo.rollout_steps=8"),
    *("--set", "ppo.minibatches=3", "--set", "ppo.hidden=[8]"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the program does for itself."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def invoked(app, *arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def cli():
    """The command alone: cli("RUN", ...) -> result."""
    app = typer.Typer(pretty_exceptions_enable=False)
    register(app, _in_one_sentence)
    return lambda *arguments: invoked(app, *arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of each environment."""
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in (("cartpole", SMALL), ("market", MARKET)):
        result = invoked(whole, "train", *settings, "--run", folder / name)
        assert result.exit_code == 0, result.stderr
    return folder


def test_a_quantized_run_has_its_policy_and_its_report_beside_the_checkpoint(cli, runs):
    before = (runs / "cartpole/checkpoint.safetensors").read_bytes()
    result = cli(runs / "cartpole", "--agreement", "0")
    assert result.exit_code == 0, result.stderr
    run = runs / "cartpole"
    made = {name for name in os.listdir(run) if name.startswith("quantized")}
    assert made == {"quantized.safetensors", "quantized.json", "quantized.txt"}
    assert (run / "checkpoint.safetensors").read_bytes() == before
    assert result.stdout.strip() == (run / "quantized.txt").read_text().strip()
    report = json.loads((run / "quantized.json").read_text())
    assert (
        report["passed"] and report["env"] == "cartpole" and report["calibration"]["rows"] == 32768
    )
    assert report["calibration"]["constant_columns"] == [f"column {k}" for k in range(4, 8)]
    assert checkpoint.load(run / "quantized.safetensors").document["report"] == report


def test_the_saved_policy_acts_as_the_report_says(cli, runs):
    result = cli(runs / "cartpole", "--copies", "2", "--json", "--agreement", "0")
    report = json.loads(result.stdout)
    subject, policy = Subject.of_run(runs / "cartpole"), QuantizedPolicy.load(runs / "cartpole")
    observations = subject.held_out()[0]
    same = policy.act(observations).action == subject.decide(observations)
    assert report["rows"] == len(observations) and report["calibration"]["copies"] == 2
    assert report["agreement"] == same.mean()


def test_a_gate_that_does_not_pass_is_exit_code_1_and_leaves_the_files(cli, runs, monkeypatch):
    from lowgpu.quantization import report

    monkeypatch.setattr(report, "failures", lambda found, gate: ["agreement is NaN"])
    result = cli(runs / "cartpole", "--json")
    assert result.exit_code == 1 and "lowgpu: agreement is NaN" in result.stderr
    assert not json.loads(result.stdout)["passed"]
    assert not json.loads((runs / "cartpole/quantized.json").read_text())["passed"]


def test_the_market_is_calibrated_on_its_training_bars_and_compared_on_its_test_bars(cli, runs):
    result = cli(runs / "market", "--json", "--agreement", "0", "--method", "percentile")
    assert result.exit_code in (0, 1), result.stderr
    report = json.loads(result.stdout)
    evaluation = json.loads((runs / "market/evaluation.json").read_text())
    returns = report["return"]
    assert returns["float32"] == pytest.approx(evaluation["portfolio"]["policy"]["total_return"])
    # Every bar of the test split but each symbol's last.
    assert report["rows"] == evaluation["bars"] - len(evaluation["symbols"])
    assert {"day_sin", "day_cos"} <= set(report["calibration"]["constant_columns"])
    assert report["calibration"]["percentile"] == 99.99
    low, high = returns["interval"]
    assert low <= returns["float32"] <= high
    policy = QuantizedPolicy.load(runs / "market")
    assert set(policy.normalizer) == {"mean", "std"}


def test_the_same_call_leaves_the_same_bytes(cli, runs):
    path = runs / "cartpole/quantized.safetensors"
    cli(runs / "cartpole", "--agreement", "0")
    first = path.read_bytes()
    cli(runs / "cartpole", "--agreement", "0")
    assert path.read_bytes() == first


REFUSED = [
    (("nowhere",), "nowhere is no run"),
    (("cartpole", "--method", "entropy"), "method must be one of 'mse', 'percentile', 'minmax'"),
    (("cartpole", "--copies", "0"), "copies must be in [1, 16], got 0"),
    (("cartpole", "--unit-copies", "17"), "unit_copies must be in [1, 16], got 17"),
    (("cartpole", "--percentile", "nan"), "percentile must be in (50, 100], got nan"),
    (("cartpole", "--agreement", "1.5"), "agreement must be in [0, 1], got 1.5"),
    (("cartpole", "--data", "bars.csv"), "--data is bars, and the run's env is cartpole"),
    (("market", "--data", "nowhere.csv"), "nowhere.csv"),
]


@pytest.mark.parametrize(
    "arguments, said", REFUSED, ids=lambda a: " ".join(a) if isinstance(a, tuple) else ""
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    cli, runs, monkeypatch, arguments, said
):
    monkeypatch.chdir(runs)
    before = sorted(os.listdir(runs / "cartpole"))
    result = cli(*arguments)
    assert result.exit_code == 2 and said in result.stderr and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) <= 2  # a warning of the data may come before
    assert sorted(os.listdir(runs / "cartpole")) == before


def test_onnx_without_its_package_is_refused_before_anything_is_written(cli, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    path = runs / "cartpole/quantized.json"
    path.unlink(missing_ok=True)
    result = cli(runs / "cartpole", "--onnx")
    assert result.exit_code == 2 and "pip install lowgpu[onnx]" in result.stderr
    assert not path.exists()


def test_a_checkpoint_with_a_nan_is_refused(cli, runs, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "checkpoint.safetensors"):
        (run / name).write_bytes((runs / "cartpole" / name).read_bytes())
    raw = bytearray((run / "checkpoint.safetensors").read_bytes())
    raw[-8:] = np.full(2, np.nan, "f4").tobytes()
    (run / "checkpoint.safetensors").write_bytes(raw)
    result = cli(run)
    assert result.exit_code == 2 and "damaged" in result.stderr
    assert not (run / "quantized.safetensors").exists()


def test_the_command_line_starts_without_numpy():
    """Threads are set before NumPy is imported, which the commands do."""
    code = "import sys, lowgpu.quantization.command; print('numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
