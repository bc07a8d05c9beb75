"""The launches of dqn_update.py: three an update."""

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.dims import REAL
from lowgpu_kernels.launch import WARP
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.tile import ITEMSIZE
from lowgpu_kernels.ops.optim.adam import beta_terms
from lowgpu_kernels.ops.ppo.update_launch import part
from lowgpu_kernels.ops.ppo.update_tile import THREADS, update_tile
from lowgpu_kernels.ops.rollout.linked import env_links, env_macros, require, rows_of

SUM_THREADS = 256  # eight warps share the tiles of 32 pieces of the gradient. Untuned.
MOVE_THREADS = 256  # a thread an element: the parameters are few. Untuned.
TALLY = 4  # floats that a tile leaves of its statistics
PIECE_NBYTES = 16  # of a tile's gradient that a thread reads at once
AHEAD = 16  # tiles a thread reads at once: all of its share where there are 128. Untuned.

# Working memory and its element types, in the order that launches take it.
WORK = {
    "partials": REAL,
    "tallies": "float32",
    "squares": "float32",
    "counter": "int32",
    "held": "float32",
}


def sum_grid(parameters, precision):
    """Blocks that sum the tiles' gradients."""
    return blocks(parameters * ITEMSIZE[precision], WARP * PIECE_NBYTES)


def work_of(sizes, params):
    """{name: shape} of the working memory."""
    network, precision = params["network"], params["precision"]
    tile = update_tile(network, sizes["B"], precision, launch.device())
    tiles = tile.tiles(sizes["B"])
    return {
        "partials": (tiles, sizes["P"]),
        "tallies": (tiles, TALLY),
        "squares": (sum_grid(sizes["P"], precision),),
        "counter": (1,),
        "held": (sizes["B"], network.outputs),
    }


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
    beta1, beta2, eps, max_norm, precision, gradient, *results = rest[17:26]
    partials, tallies, squares, counter, held, stream = rest[26:]
    require(env, table=table, series=series)
    updates, batch = rows[2].shape
    on = launch.device()
    tile = update_tile(network, batch, precision, on)
    by_tile, sum_up, move = update_kernels(env, network, tile, precision, double)
    rates = lr, *beta_terms(beta1), beta2, *beta_terms(beta2), eps, max_norm
    blocks_of_sum = sum_grid(network.parameters, precision)
    world = table, series, i32(rows_of(series)), i32(batch), delta
    for k in range(updates):
        given = [part(array, k) for array in rows]
        error, statistics, norm = (part(array, k) for array in results)
        args = parameters, target, *given, *world, held, partials, tallies, error
        launch.launch(by_tile, tile.grid(batch, on), THREADS, args, stream, tile.nbytes)
        args = partials, tallies, step, i32(tile.tiles(batch)), i32(batch), gradient
        args = *args, squares, counter, statistics
        # One block more than the gradient needs: it has the statistics.
        shared = SUM_THREADS * AHEAD * PIECE_NBYTES
        launch.launch(sum_up, blocks_of_sum + 1, SUM_THREADS, args, stream, shared)
        args = parameters, target, gradient, m, v, step, *rates, tau, target_every
        args = *args, squares, i32(blocks_of_sum), counter, norm
        grid = blocks(network.parameters, MOVE_THREADS)
        launch.launch(move, grid, MOVE_THREADS, args, stream)
