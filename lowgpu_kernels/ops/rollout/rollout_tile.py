"""How a rollout shares environments and a network's weights out: the macros of rollout.cu."""

import functools
from dataclasses import dataclass

from lowgpu_kernels.launch import KB
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.network import round_up
from lowgpu_kernels.ops.mlp.tile import (
    ITEMSIZE,
    ROWS,
    THREADS,
    network_macros,
    tile_macros,
    tile_nbytes,
    tile_rows,
)

# Sixteen warps an SM: a thread then has 128 registers, which its part of a product needs.
MOST_TEAMS = 2
FEWEST_RESIDENT_ROWS = 32  # of a block; below, a block waits longer than it reads. Untuned.
TABLE_ROW_NBYTES = 4  # the kernel's own array, a number for each environment of a block


@dataclass(frozen=True)
class RolloutTile:
    """One way to run a rollout.

    Attributes:
        rows: environments a team steps.
        teams: of a block; each has THREADS threads and a tile of its own.
        resident: whether the weights lie in shared memory, in bfloat16, staged once a rollout.
        nbytes: dynamic shared memory of a block.
    """

    rows: int
    teams: int
    resident: bool
    nbytes: int

    @property
    def threads(self):
        """Threads of a block."""
        return self.teams * THREADS

    def grid(self, envs):
        """Blocks to launch; each has its environments for the whole rollout."""
        return blocks(envs, self.teams * self.rows)

    def macros(self, network, precision):
        """The constants of rollout.cu that the env does not give."""
        return {
            **tile_macros(network, self.rows, precision),
            "threads": THREADS,
            "teams": self.teams,
            "resident": self.resident,
            "backward": False,
            "block_nbytes": self.nbytes,
        }


@functools.cache
def rollout_tile(network, envs, precision, on):
    """The RolloutTile for `envs` environments on the Device `on`.

    In bfloat16 weights are resident where they fit beside enough rows. Of the sizes that fit, it is
    the one with the fewest rounds of blocks, and of those the one that gives the most SMs work:
    within a block a step takes its time whether it has few rows or many.

    Raises:
        ValueError: a network whose activations do not fit `on` even for the fewest rows.
    """
    fitting = [] if precision == "float32" else _resident_tiles(network, on)
    if not fitting:
        rows = tile_rows(network, envs, precision, on, TABLE_ROW_NBYTES)
        return RolloutTile(rows, 1, False, tile_nbytes(network, rows, precision))

    def rounds(tile):
        held = on.shared_per_sm // (_held_nbytes(tile) + KB)  # the system keeps 1 KB a block
        return blocks(tile.grid(envs), min(held, MOST_TEAMS // tile.teams) * on.sms)

    return min(fitting, key=lambda tile: (rounds(tile), tile.rows * tile.teams))


def _resident_tiles(network, on):
    """The RolloutTiles with resident weights that fit, from the most rows to the fewest."""
    weights = sum(
        round_up(x.fan_out, 8) * (round_up(x.fan_in, 16) + 8) * ITEMSIZE["bfloat16"]
        for x in network.layers
    )
    shared = weights + 4 * network_macros(network)["gradients"]
    most, *fewer = ROWS["bfloat16"]
    tiles = [
        RolloutTile(rows, teams, True, shared + teams * tile_nbytes(network, rows, "bfloat16"))
        for rows, teams in ((most, MOST_TEAMS), (most, 1), *((r, 1) for r in fewer))
    ]
    fitting = [t for t in tiles if _held_nbytes(t) <= on.shared_per_block]
    enough = any(t.rows * t.teams >= FEWEST_RESIDENT_ROWS for t in fitting)
    return fitting if enough else []


def _held_nbytes(tile):
    """Shared memory of a block, the kernel's own array included."""
    return tile.nbytes + tile.teams * tile.rows * TABLE_ROW_NBYTES
