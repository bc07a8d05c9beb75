# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a policy
#
# Two runs of PPO through the Python API: cart-pole, where the loop is written out, and the market's
# built-in daily bars, where `lowgpu.runs` keeps a folder as `lowgpu train` does. Both run on a GPU
# where there is one, and on the CPU otherwise.

# %%
import os

# Before NumPy and Numba are imported: networks this small are done before a second thread wakes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Image, display

from lowgpu import hardware, runs
from lowgpu.config import Config, MarketConfig, PPOConfig
from lowgpu.envs import make
from lowgpu.ppo import PPO

device = hardware.choose()
print(f"{device.name} ({device.kind}): {device.reason}")

# %% [markdown]
# ## Cart-pole
#
# A `PPO` holds all of its memory before its first step. `plan` says what is in it.

# %%
settings = PPOConfig(total_steps=60_000, envs=8, rollout_steps=128, lr=1e-3, seed=1)
trainer = PPO(settings, make("cartpole"), kind=device.kind)
print(trainer.plan)

# %% [markdown]
# `advance` queues one iteration and reports the one before it, so a GPU never waits for Python;
# `drain` reports the last. An iteration acts for `rollout_steps` steps, works out advantages, and
# learns from the rollout `epochs` times; `lowgpu/ppo.py` has it as a list of ops.

# %%
reports = []
while not trainer.done:
    reports.append(trainer.advance())
reports.append(trainer.drain())
reports = [r for r in reports if r is not None]
last = reports[-1]
print(f"{last.steps:,} steps, mean return {last.mean_return:.1f} of at most 500")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.plot([r.steps for r in reports], [r.mean_return for r in reports])
left.set(xlabel="env steps", ylabel="mean return of 100 episodes")
right.plot([r.steps for r in reports], [r.figures["entropy"] for r in reports])
right.set(xlabel="env steps", ylabel="entropy of the policy, nats")
plt.show()

# %% [markdown]
# ## The market
#
# Twelve thousand daily bars of five shares, 51 features a bar; positions are short, flat and long.
# The policy learns on the first 70 % of the time span. This run is short: it shows the way, not a
# strategy.

# %%
settings = Config(
    device=device.kind,
    ppo=PPOConfig(
        total_steps=40_000,
        envs=16,
        rollout_steps=128,
        lr=3e-4,
        activation="relu",
        shared=True,
        checkpoints=1,
    ),
    market=MarketConfig(cost=1e-4),
)
task = runs.training_task(settings)
directory = runs.create(Path(tempfile.mkdtemp()) / "market", settings)
with runs.Stop() as stop:
    runs.train(directory, settings, task, device, resume=False, stop=stop)
print("\n".join(sorted(path.name for path in directory.iterdir())))

# %%
lines = (directory / runs.METRICS).read_text().splitlines()
metrics = [json.loads(line) for line in lines]
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot([m["steps"] for m in metrics], [m["mean_return"] for m in metrics])
axes.set(xlabel="env steps", ylabel="mean reward of an episode, % of equity")
plt.show()

# %% [markdown]
# Held-out bars, the last 20 % of the time span: the policy's greedy positions against holding the
# shares and against doing nothing.

# %%
report, text, notes = runs.evaluation(directory, settings)
print(text, *notes)
display(Image(directory / runs.EQUITY))

# %% [markdown]
# The same from a shell: `lowgpu train --set ppo.total_steps=40000`, then `lowgpu evaluate RUN`.
