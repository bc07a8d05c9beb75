"""The launches of ppo_update.py: all updates at once on a grid that waits for itself, or three an update."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.dims import REAL
from lowgpu_kernels.launch import WARP
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.network import round_up
from lowgpu_kernels.ops.mlp.tile import ITEMSIZE
from lowgpu_kernels.ops.optim import adam as optimizer
from lowgpu_kernels.ops.optim.adam import beta_terms
from lowgpu_kernels.ops.ppo.grid_update import THREADS as GRID_THREADS
from lowgpu_kernels.ops.ppo.grid_update import grid_update
from lowgpu_kernels.ops.ppo.update_tile import THREADS, update_tile
from lowgpu_kernels.ops.rollout.linked import env_links, env_macros, require, rows_of

SUM_THREADS = 256  # eight warps share the tiles of 32 pieces of the gradient. Untuned.
SLICES = SUM_THREADS // WARP  # a warp has every so many-th tile
TALLY = 8  # floats that a tile leaves of its statistics
PIECE_NBYTES = 16  # of a tile's gradient that a thread reads at once
AHEAD = 16  # tiles a thread reads at once: all of its share where there are 128. Untuned.


# Working memory and its element types, in the order that launches take it.
WORK = {
    "partials": REAL,
    "carried": "float32",
    "tallies": "float32",
    "squares": "float32",
    "counter": "int32",
    "image": "uint8",
}


def sum_grid(parameters, precision):
    """Blocks that sum the tiles' gradients."""
    return blocks(parameters * ITEMSIZE[precision], WARP * PIECE_NBYTES)


def ppo_grid(env, network, batch, precision, on):
    """The GridUpdate of ppo_update_grid.cu for so many rows on the Device `on`, or None."""
    # Five words of a row's transition, twice; those, its state, the moments and an index on their way;
    # its table row and its statistics.
    words = 10 + (5 + len(env.floats) + len(env.ints) + 3) + 1 + 7
    # An element has its two places, the parameter and Adam's means.
    needs = {"inputs": 2, "a_row": 4 * words, "an_element": 20, "sums_apart": True}
    return grid_update(network, batch, precision, on, barriers=len(network.layers) + 1, **needs)


def work_of(sizes, params):
    """{name: shape} of the working memory of either way to run an update."""
    network, precision = params["network"], params["precision"]
    whole = ppo_grid(params["env"], network, sizes["B"], precision, launch.device())
    return work_shapes(whole, network, precision, sizes["B"], params["accumulate"], TALLY)


def work_shapes(whole, network, precision, batch, accumulate, tally, images=1):
    """What every kernel of updates needs, by name: `tally` floats a tile or a block, `images` of weights
    where all updates are one launch."""
    slices = 0
    if whole is not None:
        vectors, partial, image = whole.vectors(batch), whole.partial, images * whole.image
        tallies = sums = whole.grid
    else:
        tile = update_tile(network, batch, precision, launch.device())
        tallies, vectors = tile.tiles(batch), tiles_at_once(tile.tiles(batch), accumulate)
        partial, image = network.parameters, 0
        sums = sum_grid(network.parameters, precision)
        slices = SLICES if vectors < tallies else 0
    return {
        "partials": (vectors, partial),
        "carried": (slices, partial),
        "tallies": (tallies, tally),
        "squares": (sums,),
        "counter": (1,),
        "image": (image,),
    }


def tiles_at_once(tiles, accumulate):
    """Tiles whose gradients working memory holds: of `accumulate` parts one, in whole slices."""
    return min(round_up(blocks(tiles, int(accumulate)), SLICES), tiles)


def parts_of(tiles, accumulate):
    """(first, last) tile of each launch of a minibatch; one launch of none for an empty one."""
    held = tiles_at_once(tiles, accumulate)
    return [(first, min(first + held, tiles)) for first in range(0, tiles, max(held, 1))] or [
        (0, 0)
    ]


def tile_kernels(env, network, tile, precision):
    """The kernels of ppo_update.cu."""
    macros = {**env_macros(env), **tile.macros(network, precision), "sum_threads": SUM_THREADS}
    macros["ahead"] = AHEAD
    return [
        cuda_c("ppo/ppo_update", entry, env_links(env), **macros)
        for entry in ("ppo_update_tiles", "ppo_update_sum")
    ]


def grid_kernel(env, network, whole):
    """The kernel of ppo_update_grid.cu."""
    macros = {**env_macros(env), **whole.macros(network)}
    return cuda_c("ppo/ppo_update_grid", "ppo_update_grid", env_links(env), **macros)


def launch_updates(parameters, m, v, step, *rest):
    """Queue the updates; arguments as op.py gives them to a launcher."""
    state_floats, state_ints, table, series, index, *rest = rest
    *taken, moments, env, network, lr, clip, value_clip, value_weight, entropy_weight = rest[:13]
    *moving, precision, accumulate, gradient, statistics, norm = rest[13 : -len(WORK) - 1]
    *work, stream = rest[-len(WORK) - 1 :]
    require(env, table=table, series=series)
    learned = parameters, m, v, step
    states = state_floats, state_ints, table, series, i32(rows_of(series))
    weights = clip, value_clip, value_weight, entropy_weight
    outputs = gradient, statistics, norm
    whole = ppo_grid(env, network, index.shape[1], precision, launch.device())
    if whole is not None:
        moving = lr, *_rates(*moving)
        args = learned, states, index, taken, moments, weights, moving, outputs, work
        _launch_grid(env, network, whole, *args, stream)
        return
    tile = update_tile(network, index.shape[1], precision, launch.device())
    for k in range(len(index)):
        rows = [part(array, k) for array in (index, moments, statistics, norm)]
        args = learned, states, taken, weights, (lr, *moving), gradient, rows, work
        _launch_tiles(env, network, tile, precision, accumulate, *args, stream)


def launch_sum(kernel, network, precision, args, stream):
    """Queue what adds up tiles' gradients (update_sum.cuh)."""
    # One block more than the gradient needs: it has the statistics.
    grid = sum_grid(network.parameters, precision) + 1
    launch.launch(kernel, grid, SUM_THREADS, args, stream, SUM_THREADS * AHEAD * PIECE_NBYTES)


def part(array, k):
    """The k-th part of an array along its first dimension, which stays, of length 1."""
    if array is None or isinstance(array, np.ndarray):
        return None if array is None else array[k : k + 1]
    return array.rows(k, k + 1)


def _rates(beta1, beta2, *limits):
    """Adam's parameters as kernels take them."""
    return (*beta_terms(beta1), beta2, *beta_terms(beta2), *limits)


def _launch_grid(
    env,
    network,
    whole,
    learned,
    states,
    index,
    taken,
    moments,
    weights,
    moving,
    outputs,
    work,
    stream,
):
    partials, _, tallies, squares, counter, image = work
    launch.clear(counter, stream)
    counts = i32(len(index)), i32(index.shape[1])
    args = (*learned, *states, index, *taken, moments, *counts, *weights, *moving, *outputs)
    args = (*args, partials, tallies, squares, image, counter)
    kernel = grid_kernel(env, network, whole)
    launch.launch(kernel, whole.grid, GRID_THREADS, args, stream, whole.nbytes, cooperative=True)


def _launch_tiles(
    env,
    network,
    tile,
    precision,
    accumulate,
    learned,
    states,
    taken,
    weights,
    moving,
    gradient,
    rows,
    work,
    stream,
):
    parameters, m, v, step = learned
    index, moments, statistics, norm = rows
    partials, carried, tallies, squares, counter, _ = work
    batch, on = index.shape[1], launch.device()
    by_tile, sum_up = tile_kernels(env, network, tile, precision)
    given, tiles = (parameters, *states, index, *taken, moments, i32(batch)), tile.tiles(batch)
    for first, last in parts_of(tiles, accumulate):
        ends = i32(first), i32(last)
        args = *given, *ends, *weights, partials, tallies
        launch.launch(by_tile, tile.grid(last - first, on), THREADS, args, stream, tile.nbytes)
        counts = *ends, i32(tiles), i32(batch), *weights[2:]
        args = partials, tallies, step, *counts, gradient, carried, squares, counter, statistics
        launch_sum(sum_up, network, precision, args, stream)
    optimizer.launch_update(
        parameters, gradient, m, v, step, *moving, norm, squares, counter, stream
    )
