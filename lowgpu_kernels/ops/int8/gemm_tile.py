"""How the int8 products are cut into tiles: the macros of gemm.cu and gemm_warpgroup.cu, and the choice."""

import functools
from dataclasses import dataclass

from lowgpu_kernels.launch import KB, WARP
from lowgpu_kernels.op import blocks

WARPGROUPS = (9, 0)  # the compute capability whose instructions warpgroup.cuh has
COPY = 16  # bytes at whose multiples the copy engine wants rows to start
GROUP_ROWS, GROUP_TERMS = 128, 128  # ROWS and TERMS of gemm_warpgroup.cu
GROUP_THREADS = 2 * 128 + WARP  # two warpgroups that multiply and a warp that fetches
WARP_TERMS = 64  # TERMS of gemm.cu
FEW_ROWS = 64  # up to here the factors' bytes count and not the products: the terms are split
LEAST_TERMS = 256  # of a share, so that a block starts several fetches. Untuned.
# What a narrow tile costs beside two of them as one wide tile, whose blocks fetch less. Untuned.
NARROW_COST = 1.25


@dataclass(frozen=True)
class WarpgroupTile:
    """A way to run gemm_warpgroup.cu: tiles of 128 rows by `columns`.

    Attributes:
        columns: of a tile.
        cluster: blocks with neighbouring rows that share what they fetch.
        stages: of 128 terms, in shared memory.
        blocks_a_sm: that an SM holds.
        band: neighbouring rows of tiles that are taken together. Untuned.
    """

    columns: int
    cluster: int
    stages: int
    blocks_a_sm: int
    band: int = 8

    path, threads, splits = "int8/gemm_warpgroup", GROUP_THREADS, 1

    @property
    def nbytes(self):
        """Shared memory of a block: stages, two tiles' column terms, two barriers a stage."""
        stage = (GROUP_ROWS + self.columns) * GROUP_TERMS
        return self.stages * (stage + 16) + 2 * self.columns * 8

    @property
    def macros(self):
        return {
            "columns": self.columns,
            "cluster": self.cluster,
            "stages": self.stages,
            "blocks_a_sm": self.blocks_a_sm,
            "band": self.band,
            "nbytes": self.nbytes,
        }

    def grid(self, rows, columns, on):
        """Blocks that stay: all that the SMs hold, or those of all tiles."""
        clusters = blocks(rows, self.cluster * GROUP_ROWS) * blocks(columns, self.columns)
        return min(clusters, on.sms * self.blocks_a_sm // self.cluster) * self.cluster


@dataclass(frozen=True)
class WarpTile:
    """A way to run gemm.cu: a block makes `rows` by `columns`.

    Attributes:
        rows, columns: of a tile.
        down, across: warps along the rows and along the columns.
        stages: of 64 terms, in shared memory.
        width: bytes that a copy moves, which rows start at multiples of; 1 is loads, not copies.
        splits: shares of the terms, of a block each.
    """

    rows: int
    columns: int
    down: int
    across: int
    stages: int
    width: int
    splits: int = 1

    path, blocks_a_sm = "int8/gemm", 2

    @property
    def threads(self):
        return self.down * self.across * WARP

    @property
    def nbytes(self):
        """Shared memory of a block: stages and the tile's column terms."""
        return self.stages * (self.rows + self.columns) * WARP_TERMS + self.columns * 8

    @property
    def macros(self):
        return {
            "rows": self.rows,
            "columns": self.columns,
            "warps_down": self.down,
            "warps_across": self.across,
            "stages": self.stages,
            "width": self.width,
            "blocks_a_sm": self.blocks_a_sm,
            "nbytes": self.nbytes,
        }

    def grid(self, rows, columns, on):
        return blocks(rows, self.rows) * blocks(columns, self.columns), self.splits


WIDE = WarpgroupTile(columns=256, cluster=2, stages=4, blocks_a_sm=1)
NARROW = WarpgroupTile(columns=128, cluster=1, stages=3, blocks_a_sm=2)


@functools.cache
def gemm_tile(rows, columns, terms, width, on):
    """The tile of a product of [rows, terms] and [columns, terms] on the Device `on`.

    Args:
        width: the largest of 16, 8, 4 and 1 bytes that rows of both factors start at multiples of.
    """
    if rows > FEW_ROWS and terms > 0 and width == COPY and on.capability == WARPGROUPS:
        # Rounds of all SMs, in tiles of 128 by 128 that an SM makes one after another.
        wide = 2 * blocks(
            blocks(rows, WIDE.cluster * GROUP_ROWS) * blocks(columns, WIDE.columns),
            on.sms // WIDE.cluster,
        )
        narrow = blocks(blocks(rows, GROUP_ROWS) * blocks(columns, NARROW.columns), on.sms)
        return WIDE if wide <= NARROW_COST * narrow else NARROW
    if rows > FEW_ROWS:
        tile = WarpTile(128, 128, down=2, across=4, stages=4, width=width)
        return tile if _fits_twice(tile, on) else WarpTile(128, 128, 2, 4, 3, width)
    tall = 16 if rows <= 16 else FEW_ROWS
    return WarpTile(tall, 128, 1, 4, 4, width, splits_of(rows, columns, terms, on))


def splits_of(rows, columns, terms, on):
    """Shares that the terms are split into: enough blocks for every SM to hold two, or one share."""
    if rows > FEW_ROWS:
        return 1
    wanted = blocks(2 * on.sms, max(1, blocks(columns, 128)))
    return max(1, min(wanted, terms // LEAST_TERMS))


def _fits_twice(tile, on):
    return 2 * (tile.nbytes + KB) <= on.shared_per_sm
