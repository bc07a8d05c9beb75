"""How `act` shares a batch out: the macros of act.cu, act_few.cu and act_tile.cu."""

import functools
from dataclasses import dataclass

from lowgpu_kernels.launch import KB
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.network import round_up
from lowgpu_kernels.ops.mlp.tile import (
    ITEMSIZE,
    network_macros,
    tile_macros,
    tile_nbytes,
    tile_rows,
)
from lowgpu_kernels.ops.mlp.tile import THREADS as TILE_THREADS
from lowgpu_kernels.ops.policy.pack_network import image_nbytes

WARPGROUPS = (9, 0)  # the compute capability whose instructions warpgroup.cuh has
ROWS = 64  # that a warpgroup multiplies at once
FEW_ROWS = 8  # where the weights are the left factor. Untuned: 16 and 32 share what an SM reads.
THREADS = 128  # of a warpgroup, which is a team
# Of a block. With three a thread had 168 registers: market's network needs 220, because the compiler
# rounds all of a layer's sums only when the next layer's products start.
MOST_TEAMS = 2
MOST_LIVE = 192  # registers of a thread's 255 for a layer's factor and sums; the rest is addresses


@dataclass(frozen=True)
class ActGrid:
    """One way to act by warpgroup products, the weights in shared memory from an image.

    Attributes:
        teams: of a block; each takes tiles of 64 rows by turns.
        grid: blocks to launch.
        nbytes: dynamic shared memory of a block.
    """

    teams: int
    grid: int
    nbytes: int

    @property
    def threads(self):
        """Threads of a block."""
        return self.teams * THREADS

    def macros(self, network):
        """The constants of act.cu that the call does not give."""
        return {
            **network_macros(network),
            "float32": False,
            "threads": THREADS,
            "teams": self.teams,
            "image_nbytes": image_nbytes(network),
            "block_nbytes": self.nbytes,
        }


@functools.cache
def act_grid(network, batch, on):
    """The ActGrid for `batch` rows on the Device `on`.

    None where `on` has no warpgroup products, or the network's layers are too wide for a thread's
    registers or its weights for shared memory. An SM gets a second team's tiles only when every SM has
    a first one's.
    """
    if on.capability != WARPGROUPS:
        return None
    if max(map(_live_registers, network.layers)) > MOST_LIVE:
        return None
    tiles = blocks(batch, ROWS)
    for teams in range(min(MOST_TEAMS, max(1, blocks(tiles, on.sms))), 0, -1):
        nbytes = _block_nbytes(network, teams)
        if nbytes <= on.shared_per_block:
            return ActGrid(teams, min(tiles, on.sms), nbytes)
    return None


def _live_registers(layer):
    """Registers of a thread that a layer's factor and sums take together."""
    factor = round_up(layer.fan_in, 32 if layer.source < 0 else 16) // 4
    return factor + round_up(layer.fan_out, 16) // 2


def _block_nbytes(network, teams):
    heads = network_macros(network)["heads"]
    inputs = 2 * blocks(network.inputs, 32) * THREADS * 16
    outputs = 2 * round_up(ROWS * (heads | 1) * 4, 16)
    return image_nbytes(network) + teams * (inputs + outputs) + _copies_nbytes(network)


def _copies_nbytes(network):
    """Of a barrier for each copy of 64 columns of weights, and one for the biases."""
    return round_up(8 * (1 + sum(blocks(layer.fan_in, 64) for layer in network.layers)), 16)


@dataclass(frozen=True)
class ActFew:
    """One way to act on few rows by warpgroup products, the weights in shared memory from an image.

    Attributes:
        rows: of a block.
        grid: blocks to launch.
        nbytes: dynamic shared memory of a block.
    """

    rows: int
    grid: int
    nbytes: int
    threads = THREADS

    def macros(self, network):
        """The constants of act_few.cu that the call does not give."""
        return {
            **network_macros(network),
            "float32": False,
            "threads": THREADS,
            "teams": 1,
            "rows": self.rows,
            "image_nbytes": image_nbytes(network),
            "block_nbytes": self.nbytes,
        }


@functools.cache
def act_few(network, batch, on):
    """The ActFew for `batch` rows on the Device `on`.

    None where act_grid gives none, and for more rows than half of the SMs take at once: the other half
    is for the next launch, whose weights come while this one runs (overlap.py). Untuned.
    """
    grid = blocks(batch, FEW_ROWS)
    if 2 * grid > on.sms or act_grid(network, batch, on) is None:
        return None
    nbytes = _few_nbytes(network, FEW_ROWS)
    return ActFew(FEW_ROWS, grid, nbytes) if nbytes <= on.shared_per_block else None


def _few_nbytes(network, rows):
    hidden = [blocks(layer.fan_in, 64) for layer in network.layers if layer.source >= 0]
    matrices = blocks(network.inputs, 64) + 2 * max(hidden, default=0)
    outputs = round_up(rows * (network_macros(network)["heads"] | 1) * 4, 16)
    image = image_nbytes(network)
    end = round_up(image, 1024) + matrices * rows * 128 + outputs + _copies_nbytes(network)
    # A product reads 64 rows of weights, of which the last layer may have sixteen.
    return max(end, image - 4 * network_macros(network)["gradients"] + 48 * 128)


@dataclass(frozen=True)
class ActTile:
    """One way to act with weights read from the parameters.

    Attributes:
        rows: that a team takes at once.
        teams: of a block; each has TILE_THREADS threads and a tile of its own.
        resident: whether the weights lie in shared memory, in bfloat16, staged once a block.
        grid: blocks to launch.
        nbytes: dynamic shared memory of a block.
        blocks_a_sm: blocks that an SM is to hold at least.
    """

    rows: int
    teams: int
    resident: bool
    grid: int
    nbytes: int
    blocks_a_sm: int = 1

    @property
    def threads(self):
        """Threads of a block."""
        return self.teams * TILE_THREADS

    def macros(self, network, precision):
        """The constants of act_tile.cu that the call does not give."""
        return {
            **tile_macros(network, self.rows, precision),
            "backward": False,
            "threads": TILE_THREADS,
            "teams": self.teams,
            "resident": self.resident,
            "block_nbytes": self.nbytes,
            "blocks_a_sm": self.blocks_a_sm,
        }


@functools.cache
def act_tile(network, batch, precision, on):
    """The ActTile for `batch` rows on the Device `on`; in bfloat16 with resident weights if they fit.

    Raises:
        ValueError: a network whose activations do not fit `on` even for the fewest rows.
    """
    fitting = list(_resident(network, batch, on)) if precision == "bfloat16" else []
    if not fitting:
        rows = tile_rows(network, batch, precision, on)
        nbytes = tile_nbytes(network, rows, precision)
        return ActTile(rows, 1, False, blocks(batch, rows), nbytes)
    for tile in fitting:
        if 4 * blocks(batch, tile.rows * tile.teams) >= 3 * on.sms:
            return tile
    return fitting[-1]


def _resident(network, batch, on):
    """The ActTiles with resident weights that fit, from the most rows to the fewest."""
    weights = sum(
        round_up(x.fan_out, 8) * (round_up(x.fan_in, 16) + 8) * ITEMSIZE["bfloat16"]
        for x in network.layers
    )
    shared = weights + 4 * network_macros(network)["gradients"]
    for rows, teams in ((64, 2), (64, 1), (32, 1)):
        nbytes = shared + teams * tile_nbytes(network, rows, "bfloat16")
        if nbytes <= on.shared_per_block:
            # The system keeps 1 KB a block; sixteen warps an SM leave a thread 128 registers.
            held = max(1, min(on.shared_per_sm // (nbytes + KB), 2 // teams))
            grid = min(blocks(batch, rows * teams), held * on.sms)
            yield ActTile(rows, teams, True, grid, nbytes, held)
