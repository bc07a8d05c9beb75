"""Whether an env keeps the contract: a run of random actions, and a look at its machine code."""

from dataclasses import dataclass

import numpy as np

from lowgpu.envs.check_code import EnvError, check_globals, check_machine_code, check_types
from lowgpu_kernels.env import TERMINATED, TRUNCATED
from lowgpu_kernels.ops.rollout import env_step, observe, reset
from lowgpu_kernels.ops.rollout.cpu_env import NO_TABLE, batches, flat
from lowgpu_kernels.ops.rollout.linked import env_functions, require

ENVS = 16
GUARD = 64  # words on either side of an array that nothing may write to
# Bits that arrays hold before they are written: a NaN, and an ordinary number. A word that still
# holds them in both of two runs was not written.
POISONS = 0x7FC5A5A5, 0x47C35A5A


@dataclass(frozen=True)
class Checked:
    """What check_env did.

    Attributes:
        steps: steps taken by each of ENVS environments.
        terminated, truncated: episodes that ended so; 0 of both means that no end was tried.
        architectures: what the functions were compiled for; empty without a CUDA toolkit.
        disassembled: whether nvdisasm was there to look at the machine code.
        on: "cpu", or "cuda" when every step was compared with the GPU's.
    """

    steps: int
    terminated: int
    truncated: int
    architectures: tuple
    disassembled: bool
    on: str


def check_env(env, table=None, series=None, on="cpu", seed=0, steps=1000):
    """Check that an env keeps the contract of docs/architecture.md, and say what breaks it.

    On the CPU: the functions compile, read no global that a GPU would freeze, and compute nothing
    in float64; with random actions, reset, step and observe write all of their fields and nothing
    else, observe leaves the state alone, everything is finite, pad columns stay zero, step returns
    0, 1 or 2, and the same seed gives the same bits. Where a CUDA toolkit is installed the
    functions are compiled for each architecture, and float64 and calls in the machine code refused.

    Args:
        env: an Env.
        table: float32 [R, env.width], where the env has table columns.
        series: float32 [S, R], where the env reads series, such as it will be trained on.
        on: "cpu", or "cuda" to also compare every step with the GPU's, bit for bit.
        seed: of the actions and of what the env draws.
        steps: steps for each of 16 environments, from 1.

    Returns:
        Checked: what was run, and how many episodes ended.

    Raises:
        EnvError: the first thing found wrong, in one sentence.
        ValueError: on or steps out of range.
        RuntimeError: on="cuda" without an NVIDIA GPU.
    """
    if on not in ("cpu", "cuda"):
        raise ValueError(f"on must be 'cpu' or 'cuda', got {on!r}")
    if not isinstance(steps, (int, np.integer)) or steps < 1:
        raise ValueError(f"steps must be an integer from 1, got {steps!r}")
    if on == "cuda":
        _require_gpu()
    _check_arrays(env, table, series)
    for name, function in env_functions(env).items():
        check_globals(env, name, function)
        check_types(env, name, function)
    ends = _run(env, table, series, seed, steps)
    architectures, disassembled = check_machine_code(env)
    if on == "cuda":
        _compare_with_gpu(env, table, series, seed, steps)
    return Checked(int(steps), *ends, architectures, disassembled, on)


def _check_arrays(env, table, series):
    try:
        require(env, table=table, series=series)
    except ValueError as error:
        raise EnvError(str(error)) from None
    wanted = {"table": (None, env.width), "series": (len(env.series), None)}
    for name, array in (("table", table), ("series", series)):
        if array is None:
            continue
        shape = ", ".join("R" if n is None else str(n) for n in wanted[name])
        if array.dtype != np.float32 or array.ndim != 2 or not array.flags.c_contiguous:
            raise EnvError(f"{name} must be contiguous float32[{shape}] for {env.name}")
        for axis, size in enumerate(wanted[name]):
            if size is not None and array.shape[axis] != size:
                raise EnvError(
                    f"{name} must be float32[{shape}] for {env.name}, whose "
                    + (
                        f"{env.observation} columns are stored as {size}"
                        if name == "table"
                        else f"series are {', '.join(env.series)}"
                    )
                    + f"; got {list(array.shape)}"
                )
    if table is not None and len(table) != series.shape[1]:
        raise EnvError(f"table has {len(table)} rows and series {series.shape[1]}: give as many")


@dataclass
class _World:
    """One of two runs: guarded arrays that hold `poison` until they are written."""

    poison: int
    parts: dict
    views: dict

    @classmethod
    def of(cls, env, poison):
        widths = {"floats": len(env.floats), "ints": len(env.ints), "x": env.width, "reward": 1}
        parts = {
            name: np.full((ENVS, GUARD + width + GUARD), poison, np.uint32)
            for name, width in widths.items()
        }
        views = {
            name: parts[name][:, GUARD:-GUARD].view("i4" if name == "ints" else "f4")
            for name in widths
        }
        return cls(poison, parts, views)

    def bits(self, name):
        return self.parts[name][:, GUARD:-GUARD]

    def fill(self, name, where=slice(None)):
        self.bits(name)[where] = self.poison

    def overrun(self, name):
        guards = self.parts[name].copy()
        guards[:, GUARD:-GUARD] = self.poison
        return (guards != self.poison).any()


class _Run:
    """Two worlds side by side, compared after every call."""

    def __init__(self, env):
        self.env = env
        self.worlds = [_World.of(env, poison) for poison in POISONS]

    def fail(self, function, fault):
        raise EnvError(f"{self.env.name}: {function} {fault}")

    def check(self, function, array, fields, where=slice(None)):
        """`array` is written, in bounds, finite and the same in both worlds, at columns `fields`."""
        first, second = self.worlds
        for world in self.worlds:
            for name in world.parts:
                if world.overrun(name):
                    array_name = "out" if name == "x" else name
                    last = self.size(name) - 1
                    self.fail(function, f"writes outside {array_name}[0] to {array_name}[{last}]")
        bits = [w.bits(array)[where] for w in self.worlds]
        for column, field in fields.items():
            both = [b[:, column] for b in bits]
            if ((both[0] == first.poison) & (both[1] == second.poison)).any():
                self.fail(function, f"leaves {field} unwritten")
            values = first.views[array][where][:, column]
            if values.dtype == np.float32 and not np.isfinite(values).all():
                wrong = values[~np.isfinite(values)][0]
                self.fail(function, f"makes {field} {wrong}: it must be finite")
            if (both[0] != both[1]).any():
                self.fail(
                    function,
                    f"gives another {field} for the same state and seed: take randomness from u, "
                    "and read no output or state before it is written",
                )

    def size(self, name):
        """Elements of an array that a function may write."""
        env = self.env
        columns = env.observation - env.table_columns
        return {"floats": len(env.floats), "ints": len(env.ints), "x": columns, "reward": 1}[name]

    def check_state(self, function, where=slice(None)):
        for array, names in (("floats", self.env.floats), ("ints", self.env.ints)):
            self.check(
                function, array, {i: f"the state field {n}" for i, n in enumerate(names)}, where
            )

    def check_observation(self, states, rows, table):
        env, columns = self.env, self.env.table_columns
        self.check(
            "observe",
            "x",
            {c: f"out[{c - columns}]" for c in range(columns, env.observation)},
        )
        for world, (floats, ints) in zip(self.worlds, states):
            x = world.views["x"]
            if (world.bits("floats") != floats).any() or (world.bits("ints") != ints).any():
                self.fail("observe", "changes the state: work on local variables")
            if x[:, env.observation :].any():
                self.fail(
                    "observe",
                    f"writes past out[{env.observation - columns - 1}], into columns that stay zero",
                )
            if columns and (x[:, :columns] != table[rows, :columns]).any():
                self.fail("observe", "writes before out[0], into the table's columns")


def _run(env, table, series, seed, steps):
    """Random actions in two worlds; returns the numbers of terminated and truncated episodes."""
    loops, run = batches(env), _Run(env)
    values, rows = flat(series)
    guarded = np.full(values.size + 2 * GUARD, np.nan, np.float32)
    guarded[GUARD:-GUARD] = values
    series_view, kept = guarded[GUARD:-GUARD], guarded.copy()
    actions, index = np.random.default_rng(seed), np.arange(ENVS, dtype="i4")
    seed, table_view = np.uint64(seed), NO_TABLE if table is None else table
    table_row, ended = np.zeros(ENVS, "i4"), np.empty(ENVS, "i4")
    begins, counts = np.ones(ENVS, bool), np.zeros(3, int)

    for clock in range(steps):
        given, now = (series_view, rows), np.uint64(clock)
        if begins.any():
            for world in run.worlds:
                world.fill("floats", begins)
                world.fill("ints", begins)
                state = world.views["floats"], world.views["ints"]
                loops.reset(*state, begins, *given, seed, now)
            run.check_state("reset", begins)
        states = [(w.bits("floats").copy(), w.bits("ints").copy()) for w in run.worlds]
        for world in run.worlds:
            state = world.views["floats"], world.views["ints"]
            if table is not None:
                loops.table_rows(*state, table_row)
                if ((table_row < 0) | (table_row >= rows)).any():
                    run.fail("table_row", f"returns a row outside 0..{rows - 1}")
            world.fill("x")
            loops.observe(*state, index, table_view, *given, world.views["x"])
        run.check_observation(states, table_row, table)
        action = actions.integers(env.actions, size=ENVS, dtype="i4")
        for world in run.worlds:
            world.fill("reward")
            state, reward = (
                (world.views["floats"], world.views["ints"]),
                world.views["reward"][:, 0],
            )
            loops.step(*state, action, *given, seed, now, reward, ended)
            unknown = ended[(ended < 0) | (ended > TRUNCATED)]
            if unknown.size:
                run.fail("step", f"returns {unknown[0]}: return 0, TERMINATED (1) or TRUNCATED (2)")
        run.check("step", "reward", {0: "reward[0]"})
        run.check_state("step")
        if guarded.tobytes() != kept.tobytes():
            run.fail("one of the functions", "writes to series, which is read-only")
        begins = ended != 0
        counts += np.bincount(ended, minlength=3)
    return int(counts[TERMINATED]), int(counts[TRUNCATED])


def _require_gpu():
    try:
        from cupy.cuda import runtime

        if runtime.getDeviceCount() > 0:
            return
    except Exception as error:
        raise RuntimeError(f"on='cuda' needs an NVIDIA GPU and CuPy: {error}") from error
    raise RuntimeError("on='cuda' needs an NVIDIA GPU; none was found")


def _compare_with_gpu(env, table, series, seed, steps):
    """Step both, the GPU from the CPU's state each time, so that the first difference shows."""
    import cupy

    def there(array):
        return None if array is None else cupy.asarray(array)

    def same(function, named, here, on_gpu):
        for name, ours, theirs in zip(named, here, on_gpu):
            theirs = cupy.asnumpy(theirs)
            bits = f"u{ours.itemsize}"
            differs = np.argwhere(ours.view(bits) != theirs.view(bits))
            if len(differs):
                at = tuple(map(int, differs[0]))
                raise EnvError(
                    f"{env.name}: {function} gives {name}{list(at)} = {ours[at]} on the CPU and "
                    f"{theirs[at]} on the GPU from the same state: use the functions of "
                    "lowgpu_kernels.device.maths"
                )

    table_there, series_there = there(table), there(series)
    actions = np.random.default_rng(seed)
    floats, ints = np.zeros((ENVS, len(env.floats)), "f4"), np.zeros((ENVS, len(env.ints)), "i4")
    ended = np.ones(ENVS, bool)
    for step in range(steps):
        clock = np.full(1, step, "u8")
        fresh, fresh_there = (floats.copy(), ints.copy()), (there(floats), there(ints))
        reset.reset(*fresh, series, clock, env=env, seed=seed)
        reset.reset(*fresh_there, series_there, there(clock), env=env, seed=seed)
        same("reset", ("floats", "ints"), fresh, fresh_there)
        for state, new in zip((floats, ints), fresh):
            state[ended] = new[ended]
        state_there = there(floats), there(ints)
        x = observe.observe(floats, ints, table, series, env=env)
        x_there = observe.observe(*state_there, table_there, series_there, env=env)
        same("observe", ("x",), (x,), (x_there,))
        action = actions.integers(env.actions, size=ENVS, dtype="i4")
        stepped = env_step.env_step(floats, ints, action, series, clock, env=env, seed=seed)
        stepped_there = env_step.env_step(
            *state_there, there(action), series_there, there(clock), env=env, seed=seed
        )
        named = "floats", "ints", "reward", "terminated", "truncated"
        same("step", named, (floats, ints, *stepped), (*state_there, *stepped_there))
        ended = stepped.terminated | stepped.truncated
