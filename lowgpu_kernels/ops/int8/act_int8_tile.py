"""How the int8 policy kernels share a batch out: the macros of act_int8.cu and act_int8_warps.cu."""

import functools
from dataclasses import dataclass

from lowgpu_kernels.launch import KB, WARP
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.int8.pack_int8 import image_nbytes, packed_layer, packed_macros
from lowgpu_kernels.ops.mlp.network import round_up

WARPGROUPS = (9, 0)  # the compute capability whose instructions warpgroup.cuh has
TEAM_WARPS = 4  # of a warpgroup
TEAM_ROWS = 64
MOST_TEAMS = 3
# Teams of twice the rows, which read a layer's factors once for both halves. Untuned, as MOST_TEAMS.
WIDE_TEAMS = 2
# Of a layer: with fewer a product is an instruction or two, for which a warpgroup need not wait. Untuned.
LONG_TERMS = 64
AT_ONCE = 32  # columns that a warp sums at once
OTHER_LIVE = 40  # registers of a thread beside levels and sums. From compiling the tests' networks.
# Of a layer: that it makes, and with what it reads, up to which there are registers for a second set of
# sums. From compiling ten networks, of which three spill up to 8 registers a tile.
STRAIGHT_WIDTH, STRAIGHT_COLUMNS = 256, 384
KEPT_TWICE = 16  # outputs of a row up to which a warp of sixteen rows keeps those of two tiles


@dataclass(frozen=True)
class Int8Grid:
    """One way to run a quantized network.

    Attributes:
        warpgroups: whether warpgroups multiply, from shared memory, else warps.
        warps: of a block.
        groups: of sixteen rows that a warp takes at once.
        at_once: columns that are summed at once.
        held: rows whose outputs a warp keeps before it chooses their actions.
        grid: blocks to launch.
        nbytes: dynamic shared memory of a block.
        copies_rows: whether a copy engine brings a warp its rows.
        straight: whether sums of further columns are made while some become levels.
        blocks_a_sm: blocks that an SM is to hold at least.
    """

    warpgroups: bool
    warps: int
    groups: int
    at_once: int
    held: int
    grid: int
    nbytes: int
    copies_rows: bool = False
    straight: bool = False
    blocks_a_sm: int = 1

    @property
    def path(self):
        """Of the kernel's file."""
        return "int8/act_int8" if self.warpgroups else "int8/act_int8_warps"

    @property
    def entry(self):
        """The kernel's name."""
        return "act_int8_kernel" if self.warpgroups else "act_int8_warps"

    @property
    def threads(self):
        """Threads of a block."""
        return self.warps * WARP

    def macros(self, network):
        """The constants of the kernel that the call does not give."""
        own = {
            "threads": TEAM_WARPS * WARP,
            "teams": self.warps // TEAM_WARPS,
            "copies_rows": self.copies_rows,
            "straight": self.straight,
        }
        if not self.warpgroups:
            own = {
                "warps": self.warps,
                "blocks_a_sm": self.blocks_a_sm,
            }
        return {
            **packed_macros(network),
            **own,
            "groups": self.groups,
            "at_once": self.at_once,
            "held": self.held,
            "block_nbytes": self.nbytes,
        }


@functools.cache
def int8_grid(network, batch, chooses, itemsize, on):
    """The Int8Grid for `batch` rows on the Device `on`.

    Args:
        network: a Network.
        batch: rows.
        chooses: whether actions are chosen, for which outputs are kept in shared memory.
        itemsize: bytes of an element of the observation.
        on: a Device.

    Raises:
        ValueError: a network whose image does not fit the shared memory of `on`.
    """
    found = _of_warpgroups(network, batch, chooses, itemsize, on)
    return found or _of_warps(network, batch, chooses, on)


def _of_warpgroups(network, batch, chooses, itemsize, on):
    """None where `on` has no warpgroup products, or every layer of the network is too short for them.

    An SM gets a second team's tiles only when every SM has a first one's.
    """
    if on.capability != WARPGROUPS:
        return None
    if max(packed_layer(layer).terms for layer in network.layers) < LONG_TERMS:
        return None
    for groups, teams, at_once, copies_rows in _teams(batch, on.sms):
        warps, rows = teams * TEAM_WARPS, 16 * groups
        if not _in_registers(network, groups, at_once, warps, on):
            continue
        held, copied = _held(network, groups), warps * copies_rows
        # A barrier a layer, one for the rest and one a warp, of 8 bytes.
        barriers = round_up(8 * (len(network.layers) + 1 + copied), 16)
        before = image_nbytes(network) + copied * rows * network.inputs * itemsize + barriers
        nbytes = before + _kept(network, warps, held, chooses)
        if nbytes <= on.shared_per_block:
            grid = min(blocks(batch, TEAM_ROWS * groups), on.sms)
            ways = copies_rows, _straight(network)
            return Int8Grid(True, warps, groups, at_once, held, grid, nbytes, *ways)
    return None


def _teams(batch, sms):
    """(groups, teams, at_once, copies_rows) that suit so many rows, the fastest first."""
    if batch >= 2 * TEAM_ROWS * WIDE_TEAMS * sms:
        yield 2, WIDE_TEAMS, 64, True
    most = min(MOST_TEAMS, max(1, blocks(blocks(batch, TEAM_ROWS), sms)))
    for teams in range(most, 1, -1):
        yield 1, teams, 64, True
        yield 1, teams, 64, False
    yield 1, 1, 128, False


def _straight(network):
    """Whether the compiler may start on further columns; of two towers it would start the second."""
    made = [0 if layer.head else layer.fan_out for layer in network.layers]
    both = (layer.fan_in + out for layer, out in zip(network.layers, made))
    fits = max(made) <= STRAIGHT_WIDTH and max(both) <= STRAIGHT_COLUMNS
    return fits and len(network.towers) == 1


def _of_warps(network, batch, chooses, on):
    """A warp takes two groups of rows where its registers hold them and there are rows enough.

    The two share what is read of the weights.
    """
    image, smallest = image_nbytes(network), (1, 4)
    for groups, warps in ((2, 8), (1, 8), smallest):
        rows = 16 * groups * warps
        enough = 4 * blocks(batch, rows) >= 3 * on.sms or (groups, warps) == smallest
        if not enough or not _in_registers(network, groups, AT_ONCE, warps, on):
            continue
        held = _held(network, groups)
        nbytes = image + _kept(network, warps, held, chooses)
        if nbytes <= on.shared_per_block:
            # The system keeps 1 KB a block.
            a_sm = max(1, min(on.shared_per_sm // (nbytes + KB), 8 // warps))
            grid = min(blocks(batch, rows), a_sm * on.sms)
            return Int8Grid(False, warps, groups, AT_ONCE, held, grid, nbytes, blocks_a_sm=a_sm)
    raise ValueError(
        f"network needs {nbytes} B of shared memory a block in int8; {on.name} has "
        f"{on.shared_per_block} B: give narrower layers"
    )


def _held(network, groups):
    """Rows whose outputs a warp keeps: all its lanes choose, where that takes little memory."""
    return 32 if groups == 2 or _heads(network) <= KEPT_TWICE else 16


def _kept(network, warps, held, chooses):
    """Bytes of the outputs that a block's warps keep; a row's are an odd number."""
    return warps * held * (_heads(network) | 1) * 4 if chooses else 0


def _heads(network):
    return sum(widths[-1] for widths in network.towers)


@functools.cache
def _in_registers(network, groups, at_once, warps, on):
    """Whether an SM holds a block whose threads have a layer's levels and sums in registers."""
    most, two = 0, len(network.towers) == 2
    for layer in network.layers:
        packed = packed_layer(layer)
        words = packed.terms + (0 if layer.head else round_up(layer.fan_out, 32))
        # The second tower reads the inputs again.
        if two and layer.tower == 0 and layer.source >= 0:
            words += round_up(network.inputs, 32)
        most = max(most, words // 8 + min(at_once, packed.columns) // 2)
    # A thread has a multiple of 8, at most 255.
    given = min(on.registers_per_sm // (warps * WARP) // 8 * 8, 255)
    return groups * most + OTHER_LIVE <= given
