"""How a PPO update lays a network out in shared memory: the macros of include/update_tile.cuh."""

import functools
from dataclasses import dataclass

from lowgpu_kernels.launch import KB
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.network import round_up
from lowgpu_kernels.ops.mlp.tile import ITEMSIZE, ROWS, network_macros

THREADS = 256  # eight warps share a product. Untuned.
FEWEST_RESIDENT_ROWS = 32  # below, reading the weights from shared memory costs more than it saves
MOST_BLOCKS = 2  # an SM: eight warps each leave a thread 128 registers


@dataclass(frozen=True)
class UpdateTile:
    """One way to run an update.

    Attributes:
        rows: of the minibatch that a block works on at once.
        resident: whether the weights lie in shared memory, in bfloat16.
        nbytes: shared memory of a block.
        blocks_a_sm: blocks that an SM is to hold.
    """

    rows: int
    resident: bool
    nbytes: int
    blocks_a_sm: int

    def macros(self, network, precision):
        """The constants of CUDA C that includes update_tile.cuh."""
        return {
            **network_macros(network),
            "float32": precision == "float32",
            "rows": self.rows,
            "threads": THREADS,
            "teams": 1,
            "backward": True,
            "resident": self.resident,
            "tile_nbytes": self.nbytes,
            "blocks_a_sm": self.blocks_a_sm,
        }

    def tiles(self, batch):
        """Tiles of a minibatch, each of which leaves a vector of gradients."""
        return blocks(batch, self.rows)

    def grid(self, tiles, on):
        """Blocks to launch for so many tiles; each takes some one after another, so its weights are
        staged once."""
        return min(tiles, self.blocks_a_sm * on.sms)


@functools.cache
def tile_nbytes(network, rows, resident, precision):
    """Shared memory in bytes: weights, the input and every layer's output, y, biases."""
    itemsize = ITEMSIZE[precision]
    piece = 16 // itemsize

    def stride(width):
        return round_up(width, 16) + piece

    weights = sum(round_up(x.fan_out, 16) * stride(x.fan_in) for x in network.layers)
    a_row = stride(network.inputs) + sum(stride(x.fan_out) for x in network.layers)
    floats = rows * network.outputs + network_macros(network)["gradients"]
    return (resident * weights + rows * a_row) * itemsize + 4 * floats


@functools.cache
def update_tile(network, batch, precision, on):
    """The UpdateTile for a minibatch of `batch` rows on the Device `on`.

    Weights are resident where they fit beside enough rows. Of the rows that fit, the most that
    still give three quarters of the SMs a block.

    Raises:
        ValueError: a network whose activations do not fit `on` even for the fewest rows.
    """
    # The kernel's own arrays: a row of the table for each row of the tile, sums a warp.
    room = on.shared_per_block - KB
    for resident in (True, False) if precision == "bfloat16" else (False,):
        fitting = [
            r for r in ROWS[precision] if tile_nbytes(network, r, resident, precision) <= room
        ]
        if fitting and (fitting[0] >= FEWEST_RESIDENT_ROWS or not resident):
            break
    if not fitting:
        raise ValueError(
            f"network needs {tile_nbytes(network, ROWS[precision][-1], False, precision) + KB} B "
            f"of shared memory a block in {precision}; {on.name} has {on.shared_per_block} B: give "
            "fewer or narrower layers"
        )
    rows = next((r for r in fitting if 4 * blocks(batch, r) >= 3 * on.sms), fitting[-1])
    nbytes = tile_nbytes(network, rows, resident, precision)
    held = on.shared_per_sm // (nbytes + 2 * KB)  # another kilobyte a block is kept by the system
    return UpdateTile(rows, resident, nbytes, max(1, min(MOST_BLOCKS, held)))
