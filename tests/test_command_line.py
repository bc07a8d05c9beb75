"""The command line: exit codes, one sentence an error, and runs that can be gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import numba
import numpy as np
import pytest
from typer.testing import CliRunner

from lowgpu import checkpoint, plots
from lowgpu.__main__ import app
from lowgpu.ppo import PPO

SMALL = (
    *("--env", "cartpole", "--device", "cpu", "--steps", "950"),
    *("--set", "envs=6", "--set", "rollout_steps=8", "--set", "minibatches=3"),
    *("--set", "hidden=[8]", "--set", "max_steps=20", "--set", "cartpole.episodes=5"),
)
MARKET = (
    *("--device", "cpu", "--steps", "100", "--set", "envs=6", "--set", "rollout_steps=8"),
    *("--set", "minibatches=3", "--set", "hidden=[8]"),
)


@pytest.fixture(autouse=True)
def one_thread():
    """As the program does for itself."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Call the command line in an empty folder: cli("info") -> result."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_all_its_files_and_prints_its_settings(cli, tmp_path):
    result = cli("train", *SMALL, "--run", "a/b")
    assert result.exit_code == 0, result.stderr
    run = tmp_path / "a/b"
    assert sorted(os.listdir(run)) == [
        "checkpoint.safetensors",
        "config.toml",
        "evaluation.json",
        "evaluation.txt",
        "metrics.jsonl",
    ]
    assert (run / "config.toml").read_text() in result.stdout
    assert tomllib.loads((run / "config.toml").read_text())["ppo"]["hidden"] == [8]
    metrics = lines_of(run / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == list(range(1, 21))
    # 950 steps are rounded up to 20 rollouts of 48.
    assert metrics[-1]["steps"] == 960
    assert {"policy_loss", "value_loss", "entropy", "norm", "lr"} <= metrics[-1].keys()
    report = json.loads((run / "evaluation.json").read_text())
    assert report["episodes"] == 5
    assert 1 <= report["min_return"] <= report["mean_return"] <= report["max_return"] <= 20
    assert (run / "evaluation.txt").read_text() in result.stdout
    assert "parameters" in result.stdout and "total" in result.stdout


def test_the_market_is_trained_and_evaluated_on_the_built_in_sample(cli, tmp_path):
    result = cli("train", *MARKET, "--run", "m", "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    report = json.loads((tmp_path / "m/evaluation.json").read_text())
    assert printed["evaluation"] == report
    assert printed["steps"] == 144
    assert set(report["symbols"]) == {"AAPL", "FB", "GOOG", "IBM", "MSFT"}
    assert report["from"].startswith("2010") and report["to"].startswith("2013-03-01")
    assert report["portfolio"]["flat"]["total_return"] == 0
    assert report["portfolio"]["buy_and_hold"]["trades"] == 5
    assert 250 < report["bars_per_year"] < 253
    assert (tmp_path / "m/equity.png").read_bytes().startswith(b"\x89PNG")

    again = cli("evaluate", "m", "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout) == report


def test_a_run_without_a_picture_is_a_run_and_says_what_to_install(cli, monkeypatch, tmp_path):
    def missing(*_):
        raise plots.PlotsError("equity.png needs matplotlib: pip install lowgpu[plots]")

    monkeypatch.setattr(plots, "equity_png", missing)
    result = cli("train", *MARKET, "--run", "m")
    assert result.exit_code == 0
    assert "note: equity.png needs matplotlib" in result.stderr
    assert (tmp_path / "m/evaluation.txt").exists()


def test_without_matplotlib_a_picture_is_an_error_that_says_so(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(plots.PlotsError, match="matplotlib"):
        plots.equity_png(tmp_path / "equity.png", [0, 1], {"policy": [1, 2]})


REFUSED = [
    (("train", "--device", "cuda"), "device cuda was asked for and cannot be used"),
    (("train", "--device", "tpu"), "device must be auto, cpu or cuda, got 'tpu'"),
    (("train", "--env", "pong"), "env must be one of"),
    (("train", "--algo", "sac"), "algo must be one of 'ppo', 'dqn', got 'sac'"),
    (("train", "--algo", "sac", "--steps", "9"), "algo must be one of 'ppo', 'dqn', got 'sac'"),
    (
        ("train", "--env", "cartpole", "--algo", "dqn", "--batch", "tier"),
        "the device is cpu: give measured",
    ),
    (("train", "--steps", "0"), "ppo.total_steps must be in"),
    (("train", "--precision", "float16"), "ppo.precision must be one of"),
    (("train", "--seed", "-1"), "ppo.seed must be in"),
    (("train", "--set", "lrr=1"), "did you mean 'lr'"),
    (("train", "--set", "minibatches=7"), "minibatches must divide"),
    (("train", "--config", "none.toml"), "none.toml cannot be read"),
    (("train", "--data", "none.csv"), "none.csv: the file cannot be read"),
    (("train", "--data", "bad.csv"), "bad.csv, line 2, column close"),
    (("train", "--data", "short.csv"), "bars"),
    (("train", "--env", "cartpole", "--data", "bad.csv"), "data is for the market"),
    (("train", "--run", "there"), "there exists: give --resume"),
    (("train", "--resume"), "--resume needs --run"),
    (("train", "--resume", "--run", "there"), "there is no run"),
    (("train", "--resume", "--run", "there", "--seed", "1"), "leave out"),
    (
        ("train", "--env", "cartpole", "--set", "envs=4000000", "--set", "rollout_steps=512"),
        "over budget",
    ),
    (("evaluate", "there"), "there is no run"),
    (("evaluate", "nowhere"), "nowhere is no run"),
]


@pytest.mark.parametrize("arguments, message", REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_bad_input_ends_with_2_and_one_sentence_and_leaves_nothing(
    cli, tmp_path, arguments, message
):
    header = "date,open,high,low,close,volume\n"
    (tmp_path / "bad.csv").write_text(header + "2020-01-01,1,2,1,-1,5\n")
    (tmp_path / "short.csv").write_text(header + "2020-01-01,1,2,1,1,5\n")
    (tmp_path / "there").mkdir()
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("lowgpu: ") and result.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["bad.csv", "short.csv", "there"]


@pytest.mark.parametrize(
    "arguments", [("train", "--stpes", "1"), ("train", "--steps", "x"), ("go",)]
)
def test_options_that_do_not_exist_end_with_2(cli, arguments):
    assert cli(*arguments).exit_code == 2


def test_a_config_file_is_read_and_options_win(cli, tmp_path):
    (tmp_path / "c.toml").write_text('env = "cartpole"\n[ppo]\nseed = 5\nlr = 0.5\n')
    result = cli("train", *SMALL, "--config", "c.toml", "--set", "lr=0.001", "--run", "r")
    assert result.exit_code == 0, result.stderr
    kept = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert (kept["ppo"]["seed"], kept["ppo"]["lr"], kept["env"]) == (5, 0.001, "cartpole")


def test_runs_without_a_name_never_share_a_folder(cli, tmp_path):
    for _ in range(2):
        assert cli("train", *SMALL).exit_code == 0
    assert sorted(os.listdir(tmp_path / "runs")) == ["cartpole-ppo-1", "cartpole-ppo-2"]


def kill_after(monkeypatch, number, iteration):
    """Send this process a signal when an iteration has been queued."""
    advance = PPO.advance

    def sending(self):
        report = advance(self)
        if self.iteration == iteration:
            os.kill(os.getpid(), number)
        return report

    monkeypatch.setattr(PPO, "advance", sending)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_stopped(
    cli, tmp_path, monkeypatch, number
):
    assert cli("train", *SMALL, "--run", "whole").exit_code == 0
    with monkeypatch.context() as patched:
        kill_after(patched, number, 7)
        stopped = cli("train", *SMALL, "--run", "stopped")
    assert stopped.exit_code == 130
    assert "after iteration 7 of 20" in stopped.stderr
    assert "lowgpu train --run stopped --resume" in stopped.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    path = tmp_path / "stopped/checkpoint.safetensors"
    assert checkpoint.load(path).document["iteration"] == 7
    # As after a kill: a line of an iteration that no checkpoint holds, and half of another.
    with open(tmp_path / "stopped/metrics.jsonl", "a") as file:
        file.write('{"iteration": 8, "steps": 384}\n{"iterat')
    resumed = cli("train", "--run", "stopped", "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    whole = checkpoint.load(tmp_path / "whole/checkpoint.safetensors")
    again = checkpoint.load(path)
    assert again.document == whole.document
    for name, array in whole.arrays.items():
        assert again.arrays[name].tobytes() == array.tobytes(), name
    metrics = [lines_of(tmp_path / run / "metrics.jsonl") for run in ("whole", "stopped")]
    for line in (*metrics[0], *metrics[1]):
        del line["seconds"]
    assert metrics[0] == metrics[1]


def test_a_figure_that_is_not_finite_ends_with_1_and_leaves_the_last_good_checkpoint(
    cli, tmp_path, monkeypatch
):
    advance = PPO.advance

    def poisoned(self):
        if self.iteration == 9:
            self.buffers.parameters[0] = np.nan
        return advance(self)

    monkeypatch.setattr(PPO, "advance", poisoned)
    result = cli("train", *SMALL, "--set", "checkpoints=5", "--run", "r")
    assert result.exit_code == 1
    assert result.stderr.startswith("lowgpu: iteration 10: ")
    assert result.stderr.count("\n") == 1
    assert checkpoint.load(tmp_path / "r/checkpoint.safetensors").document["iteration"] == 8


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda run: (run / "checkpoint.safetensors").unlink(), "cannot be read"),
        (lambda run: (run / "checkpoint.safetensors").write_bytes(b"\x80\x04."), "is a pickle"),
        (
            lambda run: (run / "config.toml").write_text(
                (run / "config.toml").read_text().replace("gamma = 0.99", "gamma = 0.5")
            ),
            "another config",
        ),
        (
            lambda run: (run / "config.toml").write_text(
                (run / "config.toml").read_text().replace("hidden = [8]", "hidden = [16]")
            ),
            "must be float32",
        ),
    ],
    ids=["gone", "pickle", "changed", "other shapes"],
)
@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_a_run_that_was_tampered_with_is_refused(cli, tmp_path, spoil, message, command):
    assert cli("train", *SMALL, "--run", "r").exit_code == 0
    spoil(tmp_path / "r")
    result = cli(
        *(("evaluate", "r") if command == "evaluate" else ("train", "--run", "r", "--resume"))
    )
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_finished_run_can_be_gone_on_with_and_nothing_happens(cli, tmp_path):
    assert cli("train", *SMALL, "--run", "r").exit_code == 0
    path = tmp_path / "r/checkpoint.safetensors"
    raw, metrics = path.read_bytes(), (tmp_path / "r/metrics.jsonl").read_bytes()
    assert cli("train", "--run", "r", "--resume").exit_code == 0
    assert path.read_bytes() == raw
    assert (tmp_path / "r/metrics.jsonl").read_bytes() == metrics


def test_info_is_json_or_text_and_says_why(cli):
    report = json.loads(cli("info", "--json").stdout)
    assert report["used"]["kind"] in ("cpu", "cuda")
    text = cli("info").stdout
    assert report["used"]["reason"] in text
    assert "numpy" in text


def test_the_program_itself_ends_with_130_on_ctrl_c_and_its_checkpoint_loads(tmp_path):
    run = tmp_path / "r"
    program = subprocess.Popen(
        [sys.executable, "-m", "lowgpu", "train", *SMALL, "--steps", "100000000", "--run", run],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = run / "metrics.jsonl"
    try:
        while not (path.exists() and path.stat().st_size):
            assert program.poll() is None, program.stderr.read()
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 130
    assert "--resume" in said and "Traceback" not in said
    assert checkpoint.load(run / "checkpoint.safetensors").document["iteration"] >= 1
