"""The launches of dqn_update.py: all updates at once on a grid that waits for itself, or three an update."""

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.optim.adam import beta_terms
from lowgpu_kernels.ops.ppo.grid_update import THREADS as GRID_THREADS
from lowgpu_kernels.ops.ppo.grid_update import grid_update
from lowgpu_kernels.ops.ppo.update_launch import (
    AHEAD,
    SUM_THREADS,
    launch_sum,
    part,
    parts_of,
    sum_grid,
    work_shapes,
)
from lowgpu_kernels.ops.ppo.update_launch import WORK as UPDATE_WORK
from lowgpu_kernels.ops.ppo.update_tile import THREADS, update_tile
from lowgpu_kernels.ops.rollout.linked import env_links, env_macros, require, rows_of

MOVE_THREADS = 256  # a thread an element: the parameters are few. Untuned.
TALLY = 4  # floats that a tile leaves of its statistics

# Working memory and its element types, in the order that launches take it.
WORK = {**UPDATE_WORK, "held": "float32"}


def dqn_grid(env, network, batch, precision, on):
    """The GridUpdate of dqn_update_grid.cu for so many rows on the Device `on`, or None."""
    # Of a row two states, in whose place the target's outputs were, and the parameters' of the next
    # state; the goal and the statistics; twice what else is known of it, and a table row. 64 bytes are
    # a kernel's own.
    states = 2 * (len(env.floats) + len(env.ints))
    a_row = 4 * (max(states, network.outputs) + network.outputs + 1 + TALLY + 2 * (4 + 1)) + 1
    # An element has its two places, the parameter, Adam's means and the target.
    needs = {"inputs": 3, "a_row": a_row, "an_element": 24, "sums_apart": False}
    return grid_update(network, batch, precision, on, barriers=2 * len(network.layers), **needs)


def work_of(sizes, params):
    """{name: shape} of the working memory of either way to run an update."""
    network, precision, batch = params["network"], params["precision"], sizes["B"]
    whole = dqn_grid(params["env"], network, batch, precision, launch.device())
    made = work_shapes(whole, network, precision, batch, params["accumulate"], TALLY, images=2)
    return made | {"held": (0 if whole is not None else batch, network.outputs)}


def grid_kernel(env, network, whole, double):
    """The kernel of dqn_update_grid.cu."""
    macros = {**env_macros(env), **whole.macros(network), "double": double}
    return cuda_c("dqn/dqn_update_grid", "dqn_update_grid", env_links(env), **macros)


def update_kernels(env, network, tile, precision, double):
    """The kernels of dqn_update.cu, in the order of their launches."""
    macros = {**env_macros(env), **tile.macros(network, precision), "sum_threads": SUM_THREADS}
    macros |= {"ahead": AHEAD, "double": double, "move_threads": MOVE_THREADS}
    return [
        cuda_c("dqn/dqn_update", f"dqn_update_{part}", env_links(env), **macros)
        for part in ("tiles", "sum", "move")
    ]


def launch_updates(parameters, target, m, v, step, *rest):
    """Queue the updates; arguments as op.py gives them to a launcher."""
    *rows, table, series, env, network, lr, double, delta, tau, target_every = rest[:17]
    beta1, beta2, eps, max_norm, precision, accumulate, gradient, *results = rest[17:27]
    *work, stream = rest[27:]
    require(env, table=table, series=series)
    learned = parameters, target, m, v, step
    world = table, series, i32(rows_of(series))
    rates = lr, *beta_terms(beta1), beta2, *beta_terms(beta2), eps, max_norm
    moves = tau, target_every
    whole = dqn_grid(env, network, rows[2].shape[1], precision, launch.device())
    if whole is not None:
        kernel = grid_kernel(env, network, whole, double)
        args = learned, rows, world, delta, (*rates, *moves), (gradient, *results), work
        _launch_grid(kernel, whole, *args, stream)
        return
    tile = update_tile(network, rows[2].shape[1], precision, launch.device())
    kernels = update_kernels(env, network, tile, precision, double)
    for k in range(len(rows[2])):
        lone = ([part(array, k) for array in arrays] for arrays in (rows, results))
        args = learned, *lone, world, delta, (rates, moves), gradient, work
        _launch_tiles(kernels, tile, network, precision, accumulate, *args, stream)


def _launch_grid(kernel, whole, learned, rows, world, delta, moving, outputs, work, stream):
    partials, _, tallies, squares, counter, images, _ = work
    launch.clear(counter, stream)
    counts = tuple(map(i32, rows[2].shape))
    args = *learned, *rows, *world, *counts, delta, *moving, *outputs
    args = *args, partials, tallies, squares, images, counter
    launch.launch(kernel, whole.grid, GRID_THREADS, args, stream, whole.nbytes, cooperative=True)


def _launch_tiles(
    kernels,
    tile,
    network,
    precision,
    accumulate,
    learned,
    rows,
    results,
    world,
    delta,
    moving,
    gradient,
    work,
    stream,
):
    parameters, target, m, v, step = learned
    error, statistics, norm = results
    partials, carried, tallies, squares, counter, _, held = work
    rates, moves = moving
    by_tile, sum_up, move = kernels
    batch, on = rows[2].shape[1], launch.device()
    given, tiles = (parameters, target, *rows, *world, i32(batch)), tile.tiles(batch)
    for first, last in parts_of(tiles, accumulate):
        ends = i32(first), i32(last)
        args = *given, *ends, delta, held, partials, tallies, error
        launch.launch(by_tile, tile.grid(last - first, on), THREADS, args, stream, tile.nbytes)
        args = partials, tallies, step, *ends, i32(tiles), i32(batch), gradient, carried
        launch_sum(sum_up, network, precision, (*args, squares, counter, statistics), stream)
    args = parameters, target, gradient, m, v, step, *rates, *moves
    args = *args, squares, i32(sum_grid(network.parameters, precision)), counter, norm
    launch.launch(move, blocks(network.parameters, MOVE_THREADS), MOVE_THREADS, args, stream)
