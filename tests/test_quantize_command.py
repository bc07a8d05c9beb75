"""`lowgpu quantize`: exit codes, files, and one sentence an error."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lowgpu import checkpoint
from lowgpu.__main__ import _in_one_sentence
from lowgpu.__main__ import app as whole
from lowgpu.quantization import run
from lowgpu.quantization.command import register
from lowgpu.quantization.policy import QuantizedPolicy
from lowgpu.quantization.report import Gate
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


def test_a_fine_tuned_policy_is_saved_and_acts_as_the_report_says(cli, runs):
    given = "--fine-tune", "30", "--copies", "2", "--unit-copies", "2", "--agreement", "0", "--json"
    result = cli(runs / "cartpole", *given)
    report = json.loads(result.stdout)
    seen = report["calibration"]
    assert seen["rewritten"] and seen["rows"] == 32768
    told = seen["fine_tuning"]
    assert (told["steps"], told["checked_rows"]) == (30, 32768)
    assert told["agreement"] >= told["agreement_before"]
    assert "of 30 steps taken" in (runs / "cartpole/quantized.txt").read_text()
    subject, policy = Subject.of_run(runs / "cartpole"), QuantizedPolicy.load(runs / "cartpole")
    observations = subject.held_out()[0]
    same = policy.act(observations).action == subject.decide(observations)
    assert report["agreement"] == same.mean()


def test_rows_that_choose_are_not_those_that_are_learned_from(runs, monkeypatch):
    given = {}
    monkeypatch.setattr(run, "fitted", lambda subject, rows, *_, **__: given.update(fit=rows))
    monkeypatch.setattr(run, "fine_tuned", lambda _, *rows, **__: given.update(tune=rows[:2]))
    subject = Subject.of_run(runs / "cartpole")
    run.tuned(subject, None, None, None, 5, "cpu", {})
    learned, checked = given["tune"]
    # The 64 environments of a calibration without fine-tuning, and 64 more.
    np.testing.assert_array_equal(learned, subject.observations())
    np.testing.assert_array_equal(given["fit"], learned)
    starts = {row.tobytes() for row in checked[:64]}
    assert len(starts) == 64 and not starts & {row.tobytes() for row in learned[:64]}


@pytest.mark.parametrize(
    "agreement, rewrite, wanted",
    [
        ({(4, 1): 0.996, (8, 1): 0.999}, False, (False, (4, 1))),
        ({(8, 1): 0.98, (4, 2): 0.97}, False, (False, (8, 1))),
        ({(16, 4): 0.996}, False, (True, (16, 4))),
        # What is tuned afterwards: the finest that fits, where none passes.
        ({(4, 1): 0.996, (8, 1): 0.999}, True, (True, (4, 1))),
        ({(8, 1): 0.98, (4, 2): 0.97}, True, (True, (16, 4))),
    ],
)
def test_copies_are_tried_from_few_to_many_and_last_of_a_network_written_anew(
    monkeypatch, agreement, rewrite, wanted
):
    def calibrated(anew, _, observations, copies, unit_copies, names):
        summary, both = {"anew": anew}, (copies, unit_copies)
        return SimpleNamespace(network=both, summary=summary)

    def compared(made, observations, gate):
        return {"agreement": agreement.get(made.network, 0.5), "flips_past_gap": 0}

    monkeypatch.setattr(run, "calibrate", calibrated)
    monkeypatch.setattr(run, "image_nbytes", lambda both: 10**6 * (both == (16, 8)))
    subject = SimpleNamespace(
        policy=SimpleNamespace(network=False, parameters=None),
        rewritten=lambda observations: (True, None),
        names=tuple,
        compared=compared,
    )
    made = run.fitted(subject, None, Gate(), rewrite=rewrite)
    assert (made.summary["anew"], made.network) == wanted
    assert made.summary["rewritten"] == wanted[0]


def test_a_run_that_asks_for_it_ends_with_its_policy_in_int8(tmp_path):
    asked = "--set", "quantize.fine_tune=5", "--set", "quantize.agreement=0", "--json"
    result = invoked(whole, "train", *SMALL, *asked, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)["quantized"]
    assert printed == json.loads((tmp_path / "run/quantized.json").read_text())
    assert printed["gate"]["agreement"] == 0
    assert printed["calibration"]["fine_tuning"]["steps"] == 5
    assert QuantizedPolicy.load(tmp_path / "run").actions == 2


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
    (("cartpole", "--fine-tune", "-1"), "fine_tune must be in [0, 1073741824], got -1"),
    (("cartpole", "--fine-tune", "1", "--device", "tpu"), "'tpu'"),
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
