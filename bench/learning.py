"""Learning curves over seeds: `python -m bench.learning --device cuda --precision bfloat16`.

CartPole with CleanRL's ppo.py settings. The score is the mean return of the most recent iterations
that together hold at least 100 episodes, as training reports it, read at 200 k and 500 k steps.
"""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.timing import device_facts, save_document
from lowgpu.config import PRESETS, from_dict, merge
from lowgpu.envs import make
from lowgpu.ppo import PPO

RESULTS = Path(__file__).parent / "results"
MARKS = {200_000: 380.0, 500_000: 475.0}  # env steps: the mean over seeds to reach


def learn(seed, device, precision):
    """One run: (wall seconds, first-iteration seconds, {steps: score})."""
    ppo = {"seed": seed, "total_steps": max(MARKS), "precision": precision}
    config = from_dict(merge(PRESETS["cartpole", device], {"ppo": ppo}))
    start = time.perf_counter()
    trainer = PPO(config.ppo, make("cartpole", limit_terminates=True), kind=device)
    trainer.advance()
    compiled = time.perf_counter() - start
    scores = {}
    while not trainer.done:
        note(trainer.advance(), scores)
    note(trainer.drain(), scores)
    return time.perf_counter() - start, compiled, scores


def note(report, scores):
    for mark in MARKS:
        if mark not in scores and report.steps >= mark:
            scores[mark] = report.mean_return


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seeds: Annotated[int, typer.Option(help="runs, from seed 0 on")] = 10,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
):
    """Train CartPole for several seeds, and say whether the mean reaches the marks."""
    runs = []
    for seed in range(seeds):
        seconds, compiled, scores = learn(seed, device, precision)
        runs.append({"seed": seed, "seconds": seconds, "first": compiled, "scores": scores})
        shown = ", ".join(f"{s:.1f} at {m}" for m, s in scores.items())
        print(
            f"seed {seed}: {shown}; {seconds:.2f} s, {compiled:.2f} s of it to the first iteration"
        )
    reached = True
    for mark, least in MARKS.items():
        scores = [r["scores"][mark] for r in runs]
        mean, error = np.mean(scores), np.std(scores, ddof=1) / np.sqrt(len(scores))
        reached &= bool(mean >= least)
        print(f"{device} {precision}: {mean:.1f} +- {error:.1f} at {mark} steps, wanted {least:g}")
    path = out or RESULTS / f"cartpole_{device}_{precision}.json"
    save_document(path, {"facts": device_facts(), "runs": runs, "reached": reached})
    raise typer.Exit(0 if reached else 1)


if __name__ == "__main__":
    typer.run(main)
