"""Learning curves over seeds: `python -m bench.learning --algo dqn --variant double --device cpu`.

CartPole with CleanRL's ppo.py or dqn.py settings, Acrobot with dqn.py's. The score is the mean return
of the most recent iterations that together hold at least 100 episodes, as training reports it, read
at the steps that have a mark. A window's score is the mean return of the episodes that ended in it.
"""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.timing import device_facts, save_document
from lowgpu.config import from_dict, merge, preset_of
from lowgpu.runs import TRAINERS, training_task

RESULTS = Path(__file__).parent / "results"
WINDOW = 50_000  # env steps
# {env steps: the mean over seeds to reach}, by trainer and environment.
MARKS = {
    ("ppo", "cartpole"): {200_000: 380.0, 500_000: 475.0},
    ("dqn", "cartpole"): {200_000: 200.0, 300_000: 440.0},
    ("dqn", "acrobot"): {300_000: -100.0},
}
# What a variant of DQN changes, and the mean over seeds that its best window is to reach.
VARIANTS = {
    "plain": {},
    "double": {"double": True},
    "dueling": {"dueling": True},
    "n-step": {"n_steps": 3},
    "prioritized": {"prioritized": True},
}
BEST_WINDOW = {"cartpole": 440.0}


def learn(algo, env, seed, device, precision, variant, steps):
    """One run: (wall seconds, first-iteration seconds, {steps: score}, {end of window: score})."""
    own = VARIANTS[variant] | {"seed": seed, "precision": precision}
    preset = preset_of(env, algo, device)
    named = {"env": env, "algo": algo, "device": device}
    config = from_dict(merge(preset, named, {algo: own}))
    start = time.perf_counter()
    trainer = TRAINERS[algo](config.trainer, training_task(config).env, kind=device)
    trainer.advance()
    compiled = time.perf_counter() - start
    scores, windows = {}, {}
    while not trainer.done and trainer.steps < steps:
        note(trainer.advance(), scores, windows, MARKS[algo, env])
    note(trainer.drain(), scores, windows, MARKS[algo, env])
    means = {end: total / count for end, (count, total) in windows.items() if count}
    return time.perf_counter() - start, compiled, scores, means


def note(report, scores, windows, marks):
    for mark in marks:
        if mark not in scores and report.steps >= mark:
            scores[mark] = report.mean_return
    end = -(-report.steps // WINDOW) * WINDOW
    count, total = windows.get(end, (0, 0.0))
    episodes = report.figures["episodes"]
    more = episodes * report.figures["return"] if episodes else 0.0
    windows[end] = count + episodes, total + more


def wanted_of(algo, env, variant, steps):
    """{what: the mean over seeds to reach}: the marks, or for a variant its best window."""
    if variant != "plain":
        return {"best window": BEST_WINDOW[env]}
    return {mark: least for mark, least in MARKS[algo, env].items() if mark <= steps}


def name_of(algo, env, device, precision, variant):
    if algo == "ppo":
        return f"{env}_{device}_{precision}"
    parts = [algo, env, *([] if variant == "plain" else [variant.replace("-", "_")]), device]
    return "_".join([*parts, *([] if precision == "float32" else [precision])])


def main(
    algo: Annotated[str, typer.Option(help="ppo or dqn")] = "ppo",
    env: Annotated[str, typer.Option(help="cartpole or acrobot")] = "cartpole",
    variant: Annotated[str, typer.Option(help=f"of DQN: {', '.join(VARIANTS)}")] = "plain",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seeds: Annotated[int, typer.Option(help="runs, from seed 0 on")] = 10,
    steps: Annotated[int, typer.Option(help="env steps of a run, 500 k at most")] = 500_000,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
):
    """Train for several seeds, and say whether the mean over them reaches what it should."""
    if (algo, env) not in MARKS or variant not in VARIANTS:
        raise typer.BadParameter(f"no marks for {algo} {variant} on {env}")
    if variant != "plain" and (algo, env) != ("dqn", "cartpole"):
        raise typer.BadParameter("variants are DQN's, on cartpole")
    runs = []
    for seed in range(seeds):
        seconds, compiled, scores, windows = learn(
            algo, env, seed, device, precision, variant, steps
        )
        run = {"seed": seed, "seconds": seconds, "first": compiled, "scores": scores}
        runs.append(run | {"windows": windows})
        shown = ", ".join(f"{s:.1f} at {m}" for m, s in scores.items())
        best = max(windows, key=windows.get)
        print(
            f"seed {seed}: {shown}, best window {windows[best]:.1f} to {best}; {seconds:.2f} s, "
            f"{compiled:.2f} s of it to the first iteration",
            flush=True,
        )
    reached = True
    for what, least in wanted_of(algo, env, variant, steps).items():
        # The best window of the mean over seeds, not a best one of each seed.
        ends = set.intersection(*(set(r["windows"]) for r in runs))
        every = {end: [r["windows"][end] for r in runs] for end in ends}
        at = max(every, key=lambda end: np.mean(every[end]))
        scores = every[at] if what == "best window" else [r["scores"][what] for r in runs]
        mean, spread = np.mean(scores), np.std(scores, ddof=min(1, len(scores) - 1))
        error = spread / np.sqrt(len(scores))
        reached &= bool(mean >= least)
        print(
            f"{algo} {variant} {env} {device} {precision}: {mean:.1f} +- {error:.1f}, {what}, "
            f"wanted {least:g}"
        )
    path = out or RESULTS / f"{name_of(algo, env, device, precision, variant)}.json"
    save_document(path, {"facts": device_facts(), "runs": runs, "reached": reached})
    raise typer.Exit(0 if reached else 1)


if __name__ == "__main__":
    typer.run(main)
