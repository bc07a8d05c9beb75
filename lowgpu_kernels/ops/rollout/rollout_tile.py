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
WARPGROUPS = (9, 0)  # the compute capability whose instructions warpgroup.cuh has
GROUP_THREADS, GROUP_ROWS = 128, 64  # of a warpgroup: threads, and rows that it multiplies at once
COLUMNS = 64  # of a block of a matrix in shared memory
MOST_GROUPS = 4  # warpgroups an SM: sixteen warps again


@dataclass(frozen=True)
class RolloutTile:
    """One way to run a rollout.

    Attributes:
        rows: environments a team steps.
        teams: of a block; each has a tile of its own.
        resident: whether the weights lie in shared memory, in bfloat16, staged once a rollout.
        nbytes: dynamic shared memory of a block.
        blocks_a_sm: blocks that an SM is to hold at least.
        groups: warpgroups of a team; 0 where warps multiply on their own, THREADS threads a team.
    """

    rows: int
    teams: int
    resident: bool
    nbytes: int
    blocks_a_sm: int
    groups: int = 0

    @property
    def team_threads(self):
        """Threads of a team."""
        return self.groups * GROUP_THREADS or THREADS

    @property
    def threads(self):
        """Threads of a block."""
        return self.teams * self.team_threads

    def grid(self, envs):
        """Blocks to launch; each has its environments for the whole rollout."""
        return blocks(envs, self.teams * self.rows)

    def macros(self, network, precision):
        """The constants of rollout.cu that the env does not give."""
        return {
            **tile_macros(network, self.rows, precision),
            "backward": False,
            "threads": self.team_threads,
            "teams": self.teams,
            "resident": self.resident,
            "warpgroups": self.groups > 0,
            "block_nbytes": self.nbytes,
            "blocks_a_sm": self.blocks_a_sm,
        }


@functools.cache
def rollout_tile(network, envs, precision, on):
    """The RolloutTile for `envs` environments on the Device `on`.

    In bfloat16 weights are resident where they fit beside enough rows, and multiplied by warpgroups
    where the device has them. Of the sizes that fit, it is the one with the fewest rounds of blocks,
    of those the one that gives the most SMs work, and then the one with the most threads: within a
    block a step takes its time whether it has few rows or many.

    Raises:
        ValueError: a network whose activations do not fit `on` even for the fewest rows.
    """
    fitting = []
    if precision == "bfloat16":
        fitting = warpgroup_tiles(network, on) or resident_tiles(network, on)
    if not fitting:
        return streaming_tile(
            network, tile_rows(network, envs, precision, on, TABLE_ROW_NBYTES), precision
        )

    def cost(tile):
        rounds = blocks(tile.grid(envs), tile.blocks_a_sm * on.sms)
        return rounds, tile.rows * tile.teams, -tile.threads

    return min(fitting, key=cost)


def streaming_tile(network, rows, precision):
    """The RolloutTile of `rows` rows that reads the weights from L2 at every step."""
    nbytes = tile_nbytes(network, rows, precision) + rows * TABLE_ROW_NBYTES
    return RolloutTile(rows, 1, False, nbytes, 1)


def resident_tiles(network, on):
    """The RolloutTiles with resident weights that fit, from the most rows to the fewest."""
    weights = sum(
        round_up(x.fan_out, 8) * (round_up(x.fan_in, 16) + 8) * ITEMSIZE["bfloat16"]
        for x in network.layers
    )
    shared = weights + 4 * network_macros(network)["gradients"]
    most, *fewer = ROWS["bfloat16"]
    fitting = []
    for rows, teams in ((most, MOST_TEAMS), (most, 1), *((r, 1) for r in fewer)):
        a_team = tile_nbytes(network, rows, "bfloat16") + rows * TABLE_ROW_NBYTES
        nbytes = shared + teams * a_team
        if nbytes <= on.shared_per_block:
            held = _held(nbytes, MOST_TEAMS // teams, on)
            fitting.append(RolloutTile(rows, teams, True, nbytes, held))
    enough = any(t.rows * t.teams >= FEWEST_RESIDENT_ROWS for t in fitting)
    return fitting if enough else []


def warpgroup_tiles(network, on):
    """The RolloutTiles that fit `on`: a lone team of two warpgroups, or more teams of one.

    Measured on an H200: 4.9 us a step of 8192 environments against 5.4 with one warpgroup, but 6.4 us
    of 16384 in two teams of one against 6.7 in two of two.
    """
    if on.capability != WARPGROUPS:
        return []
    shapes = [(1, 2), *((teams, 1) for teams in range(2, MOST_GROUPS + 1))]
    tiles = [warpgroup_tile(network, teams, groups, on) for teams, groups in shapes]
    return [tile for tile in tiles if tile.nbytes <= on.shared_per_block]


def warpgroup_tile(network, teams, groups, on):
    """The RolloutTile of `teams` teams a block, each of `groups` warpgroups; it may not fit `on`."""

    def wide(columns):
        return blocks(columns, COLUMNS) * COLUMNS

    weights = sum(round_up(x.fan_out, 16) * wide(x.fan_in) for x in network.layers)
    hidden = [tower[:-1] for tower in network.towers]
    even = max((wide(w) for tower in hidden for w in tower[::2]), default=0)
    odd = max((wide(w) for tower in hidden for w in tower[1::2]), default=0)
    inputs = wide(network.inputs)
    # The input of a network with one tower shares the buffer of the odd layers.
    a_row = even + (max(odd, inputs) if len(network.towers) == 1 else odd + inputs)
    a_team = GROUP_ROWS * (2 * a_row + 4 * network.outputs + TABLE_ROW_NBYTES)
    nbytes = 2 * weights + 4 * network_macros(network)["gradients"] + teams * a_team
    held = _held(nbytes, MOST_GROUPS // (teams * groups), on)
    return RolloutTile(GROUP_ROWS, teams, True, nbytes, held, groups)


def _held(nbytes, most, on):
    """Blocks that an SM holds by their shared memory, from 1 to `most`."""
    return max(1, min(on.shared_per_sm // (nbytes + KB), most))  # the system keeps 1 KB a block
