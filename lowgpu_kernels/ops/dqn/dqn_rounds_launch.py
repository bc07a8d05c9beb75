"""How dqn_rounds.py runs: all rounds in one launch on a grid that waits for itself, or op after op."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32, u64
from lowgpu_kernels.ops.dqn.dqn_launch import WORK as UPDATE_WORK
from lowgpu_kernels.ops.dqn.dqn_launch import dqn_grid
from lowgpu_kernels.ops.dqn.dqn_launch import work_of as update_work
from lowgpu_kernels.ops.dqn.dqn_update import dqn_update
from lowgpu_kernels.ops.dqn.experience import experience
from lowgpu_kernels.ops.dqn.target_move import target_move
from lowgpu_kernels.ops.optim.adam import beta_terms
from lowgpu_kernels.ops.ppo.grid_update import THREADS
from lowgpu_kernels.ops.replay.replay_gather import replay_gather
from lowgpu_kernels.ops.replay.replay_sample import replay_sample
from lowgpu_kernels.ops.replay.replay_write import replay_write
from lowgpu_kernels.ops.rollout.linked import env_links, env_macros, require, rows_of

NEVER = 2**31 - 1  # updates between two moves of a target that moves by env steps
# Of steps as experience gives them, without how they went; and of rows as replay_gather does.
PLAYED = {
    "state_floats": "float32",
    "state_ints": "int32",
    "action": "int32",
    "next_floats": "float32",
    "next_ints": "int32",
}
ROWS = {
    "row_floats": "float32",
    "row_ints": "int32",
    "row_action": "int32",
    "row_reward": "float32",
    "row_discount": "float32",
    "row_next_floats": "float32",
    "row_next_ints": "int32",
    "row_weight": "float32",
}
WORK = {**PLAYED, "index": "int32", **ROWS, "row_error": "float32", **UPDATE_WORK}
LEARNED = "parameters", "target", "m", "v", "step"
ENDS = "reward", "terminated", "truncated"
KEPT = (
    *("kept_floats", "kept_ints", "kept_next_floats", "kept_next_ints"),
    *("kept_reward", "kept_mark"),
)


def work_of(sizes, params):
    """{name: shape} of the working memory of either way to run rounds."""
    whole = _grid_of(params)
    made = dict.fromkeys(WORK, (0,))
    if whole is None:
        made |= _in_turn(params, *(sizes[d] for d in "EFG"))
    return made | update_work({"B": int(params["batch"])}, params)


def _grid_of(params):
    about = params["env"], params["network"], int(params["batch"]), params["precision"]
    return dqn_grid(*about, launch.device())


def _in_turn(params, envs, floats, ints):
    """Shapes of what one op of a round hands to the next."""
    played = int(params["steps"]), envs
    rows = (int(params["updates"]) * int(params["batch"]),)
    made = {n: (*played, floats) for n in ("state_floats", "next_floats")}
    made |= {n: (*played, ints) for n in ("state_ints", "next_ints")} | {"action": played}
    made |= dict.fromkeys(("index", *ROWS, "row_error"), rows)
    made |= {n: (*rows, floats) for n in ("row_floats", "row_next_floats")}
    return made | {n: (*rows, ints) for n in ("row_ints", "row_next_ints")}


def _shaped(array, *shape):
    if type(array) is Buffer:
        return Buffer(array.address, shape, array.dtype)
    return array.reshape(shape)


def _part(array, first, last):
    return array.rows(first, last) if type(array) is Buffer else array[first:last]


def _settings(a, envs):
    """The parameters of every op of a round: {op: {name: value}}."""
    about = {n: a[n] for n in ("env", "network", "precision")}
    soft = a["target_every"] == 0
    ends = {n: a[n] for n in ("epsilon_start", "epsilon_end", "epsilon_steps")}
    adam = {n: a[n] for n in ("lr", "beta1", "beta2", "eps", "max_norm")}
    loss = {n: a[n] for n in ("double", "delta", "tau", "accumulate")}
    batch = int(a["updates"]) * int(a["batch"])
    made = {
        experience: {**about, **ends, "steps": a["steps"], "seed": a["seed"]},
        replay_write: {},
        replay_sample: {"envs": envs, "batch": batch, "seed": a["seed"]},
        replay_gather: {"steps": a["n_steps"], "gamma": a["gamma"]},
        dqn_update: {**about, **adam, **loss, "target_every": 1 if soft else NEVER},
    }
    if not soft:
        ahead = int(a["steps"]) * envs
        when = {"envs": envs, "ahead": ahead, "every": int(a["target_every"]), "tau": a["tau"]}
        made[target_move] = when
    return {op: op.checked_params(params) for op, params in made.items()}


def _run_in_turn(run, a):
    """A call's rounds: run(op, inputs, params, outputs) runs or queues one op."""
    steps, updates, batch = (int(a[n]) for n in ("steps", "updates", "batch"))
    settings = _settings(a, len(a["floats"]))
    world, ring = (a["table"], a["series"]), [a[n] for n in KEPT]
    rows = [a[n] for n in ROWS]
    minibatches = [_shaped(r, updates, batch, *r.shape[1:]) for r in rows[:-1]]
    error = _shaped(a["row_error"], updates, batch)
    first = 0

    def then(op, inputs, outputs=()):
        run(op, inputs, settings[op], outputs)

    for r in range(int(a["rounds"])):
        logs = (_part(a[n], r * steps, r * steps + steps) for n in ENDS)
        played = *(a[n] for n in ("state_floats", "state_ints", "action")), *logs
        played = *played, a["next_floats"], a["next_ints"]
        acting = (a[n] for n in ("parameters", "floats", "ints", "clock"))
        then(experience, (*acting, *world), played)
        then(replay_write, (*played, a["head"], *ring, None, None, None))
        if r >= a["warm"]:
            then(replay_sample, (a["head"], a["draws"]), (a["index"],))
            then(replay_gather, (a["index"], a["head"], *ring, None, None), rows)
            given = *(a[n] for n in LEARNED), *minibatches, None, *world
            results = (_part(a[n], first, first + updates) for n in ("statistics", "norm"))
            then(dqn_update, given, (a["gradient"], error, *results))
            first += updates
        if target_move in settings:
            then(target_move, (a["parameters"], a["target"], a["clock"]))


def run_on_cpu(a):
    """A call's rounds on NumPy arrays; `a` has its arguments by name."""

    def run(op, inputs, params, outputs):
        op(*inputs, **params, out=tuple(outputs) or None)

    shapes = _in_turn(a, *a["floats"].shape, a["ints"].shape[1])
    _run_in_turn(run, a | {n: np.empty(shape, WORK[n]) for n, shape in shapes.items()})


def rounds_kernel(env, network, whole, double, n_steps):
    """The kernel of dqn_rounds.cu."""
    macros = {**env_macros(env), **whole.macros(network), "double": double, "steps": int(n_steps)}
    return cuda_c("dqn/dqn_rounds", "dqn_rounds", env_links(env), **macros, series=len(env.series))


def launch_rounds(a, stream):
    """Queue a call's rounds; `a` has its arguments by name."""
    require(a["env"], table=a["table"], series=a["series"])
    whole = _grid_of(a)
    if whole is not None:
        _launch_grid(whole, a, stream)
        return

    def run(op, inputs, params, outputs):
        work = [a[n] for n in UPDATE_WORK] if op is dqn_update else ()
        op.cuda(*inputs, *params.values(), *outputs, *work, stream)

    _run_in_turn(run, a)


def _launch_grid(whole, a, stream):
    kernel = rounds_kernel(a["env"], a["network"], whole, a["double"], a["n_steps"])
    world = a["table"], i32(0 if a["table"] is None else len(a["table"]))
    world = *world, a["series"], i32(rows_of(a["series"]))
    counts = *map(i32, a["kept_mark"].shape), *(a[n] for n in ("rounds", "warm", "steps"))
    rates = *beta_terms(a["beta1"]), a["beta2"], *beta_terms(a["beta2"]), a["eps"], a["max_norm"]
    soft = a["target_every"] == 0
    args = (
        *(a[n] for n in (*LEARNED, "floats", "ints", "clock", "head", *KEPT, "draws")),
        *(*world, *counts),
        *(a[n] for n in ("updates", "batch", "seed", "epsilon_start", "epsilon_end")),
        *(a[n] for n in ("epsilon_steps", "gamma", "delta", "lr")),
        *(*rates, a["tau"], i32(1 if soft else NEVER), u64(a["target_every"]), a["gradient"]),
        *(a[n] for n in ("statistics", "norm", *ENDS)),
        *(a[n] for n in ("partials", "tallies", "squares", "image")),
        # The head's last word, 0 before and after, counts blocks that arrive: no launch clears it.
        _part(a["head"], 2, 3),
    )
    launch.launch(kernel, whole.grid, THREADS, args, stream, whole.nbytes, cooperative=True)
