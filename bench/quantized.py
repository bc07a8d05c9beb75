"""What INT8 costs a policy, over seeds: `python -m bench.quantized --env cartpole --set ppo.activation=relu`.

Each seed is trained by `lowgpu train` with its preset and quantized by `lowgpu quantize`'s function, with
`--fine-tune` also a second time; the JSON has the commands and the reports. The exit code is 1 where the
last report of a seed does not pass its gate.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.timing import device_facts, save_document
from lowgpu.quantization.run import quantize_run

RESULTS = Path(__file__).parent / "results"


def trained(command, directory):
    """Train as the command line does."""
    whole = [sys.executable, "-m", *command.split(), "--run", str(directory)]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)


def main(
    env: Annotated[str, typer.Option(help="market or cartpole")] = "market",
    algo: Annotated[str, typer.Option(help="ppo or dqn")] = "ppo",
    device: Annotated[str, typer.Option(help="cpu or cuda, to train on")] = "cpu",
    seeds: Annotated[int, typer.Option(help="runs, from seed 0 on")] = 3,
    fine_tune: Annotated[int, typer.Option(help="steps of fine-tuning; 0 is none")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="as for lowgpu train")] = None,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
):
    """Train and quantize a policy for several seeds."""
    runs = []
    more = "".join(f" --set {setting}" for setting in settings or [])
    for seed in range(seeds):
        command = f"lowgpu train --env {env} --algo {algo} --device {device} --seed {seed}{more}"
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "run"
            trained(command, directory)
            before, text = quantize_run(directory)
            print(f"{command}\n{text}")
            commands = [f"{command} --run RUN", "lowgpu quantize RUN"]
            made = {"seed": seed, "commands": commands, "report": before}
            if fine_tune:
                commands.append(f"lowgpu quantize RUN --fine-tune {fine_tune}")
                made["fine_tuned"], text = quantize_run(directory, fine_tune=fine_tune)
                print(text, flush=True)
        runs.append(made)
    passed = all(run.get("fine_tuned", run["report"])["passed"] for run in runs)
    path = out or RESULTS / f"quantized_{env}_{algo}.json"
    save_document(path, {"facts": device_facts(), "runs": runs, "passed": passed})
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    typer.run(main)
