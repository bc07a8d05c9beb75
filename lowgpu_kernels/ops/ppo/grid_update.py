"""How all updates of a call run as one cooperative launch: the macros of include/update_grid.cuh."""

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
AHEAD = 16  # vectors of which a thread reads 16 bytes at once. Untuned.
MOST_SHARE = 4  # blocks of a tile: a warpgroup's part of a layer is then one product. Untuned.
WARPGROUPS = (9, 0)  # the compute capability whose instructions warpgroup.cuh has


@dataclass(frozen=True)
class GridUpdate:
    """One way to run all updates of a call in one launch.

    Attributes:
        grid: blocks, all on the GPU at once.
        share: blocks that share the weights' gradients of a tile, where there are few tiles.
        several: whether a block has several tiles.
        nbytes: shared memory of a block.
        partial: elements of a vector of gradients.
        image: bytes of the rounded weights and the biases.
    """

    grid: int
    share: int
    several: bool
    nbytes: int
    partial: int
    image: int

    def macros(self, network):
        """The constants of CUDA C that includes update_grid.cuh, but the env's."""
        return {
            **network_macros(network),
            "float32": False,
            "rows": ROWS,
            "threads": THREADS,
            "teams": 1,
            "grid": self.grid,
            "share": self.share,
            "several": self.several,
            "ahead": AHEAD,
            "partial": self.partial,
            "tile_nbytes": self.nbytes,
        }

    def vectors(self, batch):
        """Vectors of gradients that the blocks leave: of a tile, or of all tiles of a block."""
        return min(tiles_of(batch), self.grid // self.share)


def tiles_of(batch):
    """Tiles of a minibatch; an empty one has a tile of no rows."""
    return max(1, blocks(batch, ROWS))


def grid_update(network, batch, precision, on, **needs):
    """The GridUpdate for a minibatch of `batch` rows on the Device `on`.

    Args:
        needs: what the kernel needs of shared memory, as `_grid_update` takes it.

    Returns:
        None where `on` has no warpgroup products or too little room.
    """
    share = MOST_SHARE
    while share > 1 and share * tiles_of(batch) > on.sms:
        share //= 2
    several = tiles_of(batch) > on.sms
    return _grid_update(network, share, several, precision, on, **needs)


@functools.cache
def _grid_update(
    network, share, several, precision, on, *, inputs, a_row, an_element, barriers, sums_apart
):
    """One with so many blocks a tile, or several tiles a block.

    Args:
        inputs: rows of input that a row of the tile has: of one state or more, now and next.
        a_row: bytes that a kernel needs beside the network for a row of the tile.
        an_element: bytes that it needs for an element of the gradient that a block owns.
        barriers: copies that it awaits one by one.
        sums_apart: whether sums over tiles do not lie where the layers' outputs were.
    """
    if precision != "bfloat16" or on.capability != WARPGROUPS:
        return None
    partial = sum(_partial(layer, share * GROUPS) for layer in network.layers)
    weights = 2 * sum(
        blocks(x.fan_in, COLUMNS) * COLUMNS * round_up(x.fan_out, 16) for x in network.layers
    )
    floats = network_macros(network)["gradients"]
    widths = (*[network.inputs] * inputs, *(x.fan_out for x in network.layers))
    rows = 2 * ROWS * COLUMNS * sum(blocks(width, COLUMNS) for width in widths)
    ones = 2 * 8 * COLUMNS
    a_block = blocks(partial // PIECE, on.sms)
    slices = THREADS // round_up(a_block, WARP)
    if slices == 0:
        return None
    sums = 4 * slices * a_block * PIECE
    # Squares of each warp, and two rates.
    few = 4 * (THREADS // WARP + 2) + round_up(8 * barriers, 16)
    owned = a_row * ROWS + an_element * a_block * PIECE
    nbytes = weights + rows + ones + 4 * floats + 4 * ROWS * network.outputs
    nbytes += sums_apart * sums + few + owned
    if nbytes > on.shared_per_block:
        return None
    return GridUpdate(on.sms, share, several, nbytes, partial, weights + 4 * floats)


def _partial(layer, groups):
    """Elements of a vector of one layer's gradients, in the order of warpgroup_gradient.cuh."""
    tall, inputs = blocks(layer.fan_out, COLUMNS), 128
    while inputs > 16 and (
        inputs // 2 >= layer.fan_in or tall * blocks(layer.fan_in, inputs) < groups
    ):
        inputs //= 2
    return tall * (blocks(layer.fan_in, inputs) * inputs + 1) * COLUMNS
