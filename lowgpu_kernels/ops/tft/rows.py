"""How rows are cut into tiles: the macros and the shared memory of the kernels on tft_rows.cuh."""

import functools

from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.launch import WARP
from lowgpu_kernels.op import blocks

THREADS = 256
# By what a product's terms are.
FRAGMENT = {"float32": 8, "bfloat16": 16, "int8": 16}  # rows that a warp multiplies at once
STEP = {"float32": 4, "bfloat16": 32, "int8": 64}  # terms that it multiplies at once
NBYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Fragments that a warp has one under the other, and warps of the eight that are; the others are along the
# columns. Taller tiles read each weight less often; with four fragments bfloat16 spills. Untuned.
TILES = {"float32": ((4, 1), (2, 1), (1, 1)), "bfloat16": ((2, 2), (1, 2), (1, 1))}
TILES["int8"] = TILES["bfloat16"]
FOUR = 4  # neighbouring columns of a row that a lane norms
# Fours of a lane and the fewest lanes that share a row: fewer lanes sum with fewer shuffles, and norm more
# rows of a warp at once. A lane keeps the parameters of its Fours, if there are no more: of two arrays, or
# of a mixture's six.
NORMED = {"linear": (1, WARP), "gated": (4, 8), "mixture": (2, 16)}


def stride_of(columns, precision):
    """Elements from one row of a tile to the next: whole steps, and 16 bytes for other banks."""
    return blocks(columns, STEP[precision]) * STEP[precision] + 16 // NBYTES[precision]


def sums_stride(columns):
    """Floats from one row of a tile of sums to the next: rows a warp writes together in other banks."""
    return (columns + 15) // 32 * 32 + 16


def tile_nbytes(kind, widths, outputs, rows, precision):
    """Shared memory of a block: rows of each width, one after the other, then rows of sums."""
    nbytes = sum(rows * stride_of(width, precision) * NBYTES[precision] for width in widths)
    if kind == "linear":
        return nbytes
    # A mixture's total beside a variable's gated rows.
    return nbytes + (2 if kind == "mixture" else 1) * rows * sums_stride(outputs) * 4


def rows_macros(kind, widths, outputs, rows, precision, on):
    """Macros of a kernel whose tiles hold rows of `widths` columns.

    The tallest tiles that fit and give every SM a block; where there are too few rows for that, the
    flattest, which are the most blocks.

    Args:
        kind: "linear", "gated" or "mixture".
        widths: columns of the rows that are multiplied.
        outputs: columns of the result.
        rows: of the result.
        precision: of a product's terms: "float32", "bfloat16" or "int8".
        on: the Device.

    Raises:
        ValueError: no tile fits the device's shared memory.
    """
    fitting = _fitting(kind, widths, outputs, precision, on)
    return next((m for high, m in fitting if blocks(rows, high) >= on.sms), fitting[-1][1])


@functools.cache
def _fitting(kind, widths, outputs, precision, on):
    """(rows of a tile, macros) of the tiles that fit, the tallest first."""
    found = []
    fours, lanes = _normed(kind, outputs)
    for down, warps_down in TILES[precision]:
        high = down * warps_down * FRAGMENT[precision]
        nbytes = tile_nbytes(kind, widths, outputs, high, precision)
        # What a kernel has of its own, reals of two variables, is 8 bytes a row.
        if nbytes + 8 * high <= on.shared_per_block:
            macros = {
                "float32": precision == "float32",
                "int8": precision == "int8",
                "down": down,
                "warps_down": warps_down,
                "fours": fours,
                "row_lanes": lanes,
                "kept": fours <= NORMED[kind][0],
                "nbytes": nbytes,
            }
            found.append((high, macros))
    if not found:
        raise ValueError(
            f"rows of {', '.join(map(str, (*widths, outputs)))} columns need {nbytes} B of shared "
            f"memory a block; {on.name} has {on.shared_per_block} B: give a smaller hidden size"
        )
    return found


def _normed(kind, columns):
    """Fours of a lane, and lanes of a row, that norm so many columns."""
    most, lanes = NORMED[kind]
    # Nothing is normed in a product: one kernel for all widths.
    if kind == "linear":
        return most, lanes
    while lanes < WARP and columns > most * lanes * FOUR:
        lanes *= 2
    return max(blocks(columns, lanes * FOUR), 1), lanes


def rows_grid(rows, macros):
    """Blocks of a launch."""
    fragment = FRAGMENT["float32" if macros["float32"] else "bfloat16"]
    return blocks(rows, macros["down"] * macros["warps_down"] * fragment)


def source_macros(macros):
    """The macros that a kernel's source reads: sizes that are arguments compile nothing anew."""
    return {n: v for n, v in macros.items() if n != "nbytes"}


def all_whole(flags, macros):
    """Whether a kernel may be compiled for rows that are all whole: of half the instructions."""
    return not macros["float32"] and all(flags)


def whole(columns, *arrays):
    """Whether rows of all arrays start at multiples of 16 bytes."""
    return all(columns * a.dtype.itemsize % 16 == 0 and _address(a) % 16 == 0 for a in arrays)


def fours(columns, *arrays):
    """Whether rows of all arrays, of this many columns, start at multiples of four elements."""
    return columns % 4 == 0 and all(_address(a) % 16 == 0 for a in arrays if a is not None)


def _address(array):
    """Where an array starts; tests run launchers on NumPy arrays."""
    return array.address if isinstance(array, Buffer) else array.ctypes.data
