"""How PPO updates run as one cooperative launch: the macros of ppo_update_grid.cu."""

import functools
from dataclasses import dataclass

from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.network import round_up
from lowgpu_kernels.ops.mlp.tile import network_macros

ROWS = 64  # that a warpgroup multiplies at once
THREADS = 256  # two warpgroups share the columns of a product. Measured: four are no faster.
GROUPS = THREADS // 128
COLUMNS = 64  # of a block of a matrix in shared memory
WARP = 32
PIECE = 8  # elements in 16 bytes
AHEAD = 16  # tiles of which a thread reads 16 bytes at once. Untuned.
WARPGROUPS = (9, 0)  # the compute capability whose instructions warpgroup.cuh has


@dataclass(frozen=True)
class GridUpdate:
    """One way to run all updates of a call in one launch.

    Attributes:
        grid: blocks, all on the GPU at once.
        nbytes: shared memory of a block.
        partial: elements that a tile leaves of its gradient.
        image: bytes of the rounded weights and the biases.
    """

    grid: int
    nbytes: int
    partial: int
    image: int

    def macros(self, network):
        """The constants of ppo_update_grid.cu that the env does not give."""
        return {
            **network_macros(network),
            "float32": False,
            "rows": ROWS,
            "threads": THREADS,
            "teams": 1,
            "grid": self.grid,
            "ahead": AHEAD,
            "partial": self.partial,
            "tile_nbytes": self.nbytes,
        }

    def tiles(self, batch):
        """Tiles of a minibatch; an empty one has a tile of no rows."""
        return max(1, blocks(batch, ROWS))


@functools.cache
def grid_update(env, network, precision, on):
    """The GridUpdate for the Device `on`; None where it has no warpgroup products or too little room."""
    if precision != "bfloat16" or on.capability != WARPGROUPS:
        return None
    partial = sum(_partial(layer) for layer in network.layers)
    weights = 2 * sum(
        blocks(x.fan_in, COLUMNS) * COLUMNS * round_up(x.fan_out, 16) for x in network.layers
    )
    floats = network_macros(network)["gradients"]
    # The input twice: a tile's, and the next one's while that is gathered.
    widths = (network.inputs, network.inputs, *(x.fan_out for x in network.layers))
    rows = 2 * ROWS * COLUMNS * sum(blocks(width, COLUMNS) for width in widths)
    ones = 2 * 8 * COLUMNS
    a_block = blocks(partial // PIECE, on.sms)
    slices = THREADS // round_up(a_block, WARP)
    if slices == 0:
        return None
    sums = 4 * slices * a_block * PIECE
    # Five words of a row's transition, twice; those, its state, the moments and an index on their way;
    # its table row and its statistics; squares of each warp and two rates; six words of an element
    # that the block owns; and a barrier for each copy.
    a_row = 10 + (5 + len(env.floats) + len(env.ints) + 3) + 1 + 7
    few = 4 * (a_row * ROWS + THREADS // WARP + 2 + 6 * a_block * PIECE)
    few += round_up(8 * (len(network.layers) + 1), 16)
    nbytes = weights + rows + ones + 4 * floats + 4 * ROWS * network.outputs + sums + few
    if nbytes > on.shared_per_block:
        return None
    return GridUpdate(on.sms, nbytes, partial, weights + 4 * floats)


def _partial(layer):
    """Elements of a tile's gradient of one layer, in the order of warpgroup_gradient.cuh."""
    tall = blocks(layer.fan_out, COLUMNS)
    wide = layer.fan_in > 64 and tall * blocks(layer.fan_in, 128) >= GROUPS
    inputs = 128 if wide else 64
    return tall * (blocks(layer.fan_in, inputs) * inputs + 1) * COLUMNS
