"""What dqn_rounds is held to where all steps are taken by the same parameters: its ops' own promises."""

import numpy as np

from lowgpu_kernels.ops.dqn.dqn_update import dqn_update
from lowgpu_kernels.ops.dqn.dqn_verify import verify_update
from lowgpu_kernels.ops.dqn.experience_verify import verify_experience
from lowgpu_kernels.ops.dqn.target_move import target_move
from lowgpu_kernels.ops.replay.replay_gather import replay_gather
from lowgpu_kernels.ops.replay.replay_sample import replay_sample

KEPT = (
    *("kept_floats", "kept_ints", "kept_next_floats", "kept_next_ints"),
    *("kept_reward", "kept_mark"),
)
NEVER = 2**31 - 1


def verify_rounds(got, inputs, params, _eps=None):
    """Hold the counts, the ring, the steps and the first round of updates to what the ops promise.

    Steps behind an update are taken by parameters that are not known here; tests hold those to the ops
    one after another, bit for bit.

    Args:
        got: outputs and what the op changed, by name.
        inputs, params: of the call, by name; inputs as they were before it.
    """
    p = {n: v.item() if isinstance(v, np.generic) else v for n, v in params.items()}
    slots, envs = inputs["kept_mark"].shape
    total, learning = p["rounds"] * p["steps"], max(0, p["rounds"] - p["warm"])
    first, filled = (int(n) for n in inputs["head"][:2])
    assert got["clock"][0] == int(inputs["clock"][0]) + total
    assert [*got["draws"]] == [int(inputs["draws"][0]) + learning, 0]
    assert [*got["head"]] == [(first + total) % slots, min(filled + total, slots), 0]
    written = (first + np.arange(total)) % slots
    others = np.setdiff1d(np.arange(slots), written)
    for name in KEPT:
        np.testing.assert_array_equal(got[name][others], inputs[name][others], err_msg=name)
    if total > slots or learning > 1:
        return
    mark = got["kept_mark"][written]
    steps = {n: got[n] for n in ("reward", "terminated", "truncated", "floats", "ints", "clock")}
    steps |= {"action": (mark >> 2).astype("i4")}
    for name in ("floats", "ints", "next_floats", "next_ints"):
        start = name if name.startswith("next") else f"state_{name}"
        steps[start] = got[f"kept_{name}"][written]
    verify_experience(steps, inputs, {**params, "steps": total})
    np.testing.assert_array_equal(got["kept_reward"][written], got["reward"])
    np.testing.assert_array_equal(mark & 1 == 1, got["terminated"])
    np.testing.assert_array_equal(mark & 2 == 2, got["truncated"])
    _verify_updates(got, inputs, params, p, envs)


def _verify_updates(got, inputs, params, p, envs):
    hard = {"envs": envs, "ahead": p["steps"] * envs, "every": p["target_every"], "tau": p["tau"]}
    target, before = inputs["target"].astype(np.float64), int(inputs["clock"][0])

    def follow(parameters, rounds):
        for r in rounds if p["target_every"] else ():
            clock = np.array([before + (r + 1) * p["steps"]], np.uint64)
            target_move.spec(parameters.astype(np.float64), target, clock, **hard)

    follow(inputs["parameters"], range(min(p["warm"], p["rounds"])))
    if p["rounds"] > p["warm"]:
        index = replay_sample.spec(
            got["head"],
            inputs["draws"].copy(),
            envs=envs,
            batch=p["updates"] * p["batch"],
            seed=p["seed"],
        )
        ring = [got[n] for n in KEPT]
        windows = replay_gather.spec(
            index, got["head"], *ring, steps=p["n_steps"], gamma=p["gamma"]
        )
        names = (*("state_floats", "state_ints", "action", "reward", "discount"),)
        names = (*names, "next_floats", "next_ints")
        given = {
            n: a.astype("f4" if a.dtype.kind == "f" else "i4").reshape(
                p["updates"], p["batch"], *a.shape[1:]
            )
            for n, a in zip(names, windows)
        }
        learned = ("parameters", "m", "v", "step", "table", "series")
        given |= {n: inputs[n] for n in learned} | {"target": target.astype("f4"), "weight": None}
        of_update = {n: params[n] for n in dqn_update.params if n in params}
        of_update["target_every"] = NEVER if p["target_every"] else 1
        wide = {
            n: a.astype(np.float64) if a is not None and a.dtype.kind == "f" else a
            for n, a in given.items()
        }
        wide |= {n: wide[n].copy() for n in dqn_update.changes}
        plain = {n: p[n] for n in of_update if n != "target_every"}
        error = dqn_update.spec(**wide, **plain, target_every=of_update["target_every"])[1]
        made = got | {"error": error}
        if p["target_every"]:
            made["target"] = given["target"]
        verify_update(dqn_update.spec, made, given, of_update)
        follow(got["parameters"], [p["rounds"] - 1])
    if p["target_every"]:
        largest = max(1.0, np.abs(target).max(initial=0))
        np.testing.assert_allclose(got["target"], target, rtol=0, atol=2.0**-20 * largest)
