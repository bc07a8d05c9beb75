"""What the replay tests share: a dense replay in plain Python, and calls on every executor."""

import numpy as np
import pytest

from lowgpu_kernels import launch, replay_write
from lowgpu_kernels.dims import Dim
from lowgpu_kernels.ops.replay.ring import ring_arrays
from tests.emulator import emulating
from tests.harness import poisoned_outputs

H100 = launch.KNOWN["H100"]
EXECUTORS = ("cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu))
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
FLOATS = INTS = 2


def call(op, executor, arrays, **params):
    """Run an op, changing NumPy arrays in place: its outputs by name."""
    inputs = {name: arrays.get(name) for name in op.inputs}
    params = op.checked_params(params)
    sizes = {}
    for name, spec in op.inputs.items():
        if inputs[name] is not None:
            sizes |= {d: n for d, n in zip(spec.shape, inputs[name].shape) if isinstance(d, Dim)}
    outs = poisoned_outputs(op, op.sizes_of(sizes, params), params)
    if executor == "emulated":
        # The last thread first: an order in which no row happens to come after those before it.
        with emulating(H100, backwards=True):
            op.cuda(*inputs.values(), *params.values(), *outs, 0)
    elif executor == "cpu":
        op(**inputs, **params, out=outs or None)
    else:
        import cupy

        there = {n: None if a is None else cupy.asarray(a) for n, a in inputs.items()}
        made = tuple(map(cupy.asarray, outs))
        op(**there, **params, out=made or None)
        for name in op.changes:
            if inputs[name] is not None:
                inputs[name][:] = there[name].get()
        outs = tuple(a.get() for a in made)
    return dict(zip(op.outputs, outs))


def empty_ring(slots, envs, prioritized=False):
    """A ring's arrays as they start, but storage that no step has filled is NaN or -7."""
    made = {}
    for name, (shape, dtype) in ring_arrays(slots, envs, FLOATS, INTS, prioritized).items():
        poison = 0 if not name.startswith("kept") else np.nan if dtype == "float32" else 249
        made[name] = np.full(shape, poison, dtype)
    if prioritized:
        made["highest"][:] = 1
    return made


class Dense:
    """Every transition of every environment, kept whole for ever."""

    def __init__(self, envs, rng):
        self.rng, self.envs, self.steps = rng, envs, [[] for _ in range(envs)]
        self.states = [self.new_state() for _ in range(envs)]

    def new_state(self):
        return self.rng.normal(size=FLOATS).astype("f4"), self.rng.integers(1000, size=INTS)

    def play(self, steps, ends=0.3, reward=None):
        """Arrays of `steps` steps of random episodes, as a rollout gives them."""
        shape = steps, self.envs
        made = {
            "state_floats": np.empty((*shape, FLOATS), "f4"),
            "state_ints": np.empty((*shape, INTS), "i4"),
            "action": self.rng.integers(64, size=shape).astype("i4"),
            "reward": self.rng.normal(size=shape).astype("f4"),
            "terminated": self.rng.random(shape) < ends / 2,
            "truncated": self.rng.random(shape) < ends / 2,
            "next_floats": np.empty((*shape, FLOATS), "f4"),
            "next_ints": np.empty((*shape, INTS), "i4"),
        }
        if reward is not None:
            made["reward"][:] = reward
        for t in range(steps):
            for e in range(self.envs):
                led_to = self.new_state()
                made["state_floats"][t, e], made["state_ints"][t, e] = self.states[e]
                made["next_floats"][t, e], made["next_ints"][t, e] = led_to
                self.steps[e].append({name: array[t, e] for name, array in made.items()})
                ended = made["terminated"][t, e] or made["truncated"][t, e]
                self.states[e] = self.new_state() if ended else led_to
        return made

    def window(self, e, time, steps, gamma):
        """(reward, discount, step that led to the state to bootstrap from)."""
        total, discount = 0.0, 1.0
        for step in self.steps[e][time : time + steps]:
            total += discount * float(step["reward"])
            discount = 0.0 if step["terminated"] else discount * gamma
            if step["terminated"] or step["truncated"]:
                break
        return total, discount, step

    def write(self, executor, ring, steps, **given):
        call(replay_write, executor, self.play(steps, **given) | ring)
