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
        blocks_a_sm: blocks that an SM is to hold at least.
    """

    rows: int
    teams: int
    resident: bool
    nbytes: int
    blocks_a_sm: int

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
            "blocks_a_sm": self.blocks_a_sm,
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
        return RolloutTile(rows, 1, False, tile_nbytes(network, rows, precision), 1)

    def cost(tile):
        rounds = blocks(tile.grid(envs), tile.blocks_a_sm * on.sms)
        return rounds, tile.rows * tile.teams

    return min(fitting, key=cost)


def _resident_tiles(network, on):
    """The RolloutTiles with resident weights that fit, from the most rows to the fewest."""
    weights = sum(
        round_up(x.fan_out, 8) * (round_up(x.fan_in, 16) + 8) * ITEMSIZE["bfloat16"]
        for x in network.layers
    )
    shared = weights + 4 * network_macros(network)["gradients"]
    most, *fewer = ROWS["bfloat16"]
    fitting = []
    for rows, teams in ((most, MOST_TEAMS), (most, 1), *((r, 1) for r in fewer)):
        nbytes = shared + teams * tile_nbytes(network, rows, "bfloat16")
        needed = nbytes + teams * rows * TABLE_ROW_NBYTES
        if needed <= on.shared_per_block:
            held = on.shared_per_sm // (needed + KB)  # the system keeps 1 KB a block
            held = max(1, min(held, MOST_TEAMS // teams))
            fitting.append(RolloutTile(rows, teams, True, nbytes, held))
    enough = any(t.rows * t.teams >= FEWEST_RESIDENT_ROWS for t in fitting)
    return fitting if enough else []
