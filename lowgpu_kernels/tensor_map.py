"""A matrix as the copy engine of sm_90a is told of it: an argument of a kernel, made on the host."""

import ctypes
import functools
from dataclasses import dataclass
from typing import ClassVar

BOX_NBYTES = 128  # of a row of a box: the widest that a swizzled row may be


@dataclass(frozen=True)
class TensorMap:
    """A matrix of one-byte elements, copied a box of rows by 128 bytes at a time.

    In shared memory a box has rows of 128 bytes, and in a row the eight pieces of 16 bytes in an
    order that depends on the row, as include/warpgroup.cuh multiplies them. What lies outside the
    matrix comes as zeros. Rows and the matrix itself start at multiples of 16 bytes.

    Attributes:
        matrix: the Buffer, [rows, columns].
        box_rows: rows of a box, up to 256.
    """

    matrix: object
    box_rows: int

    NBYTES: ClassVar[int] = 128  # of the argument; sizeof(CUtensorMap)

    def encoded(self):
        """The argument's bytes."""
        return _encoded(self.matrix.address, *self.matrix.shape, self.box_rows)


@functools.lru_cache(maxsize=1024)
def _encoded(address, rows, columns, box_rows):
    from cuda.bindings import driver

    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns)],
        [driver.cuuint32_t(BOX_NBYTES), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"{status.name} for a tensor map of {rows} x {columns} bytes at {address:#x}, "
            f"boxes of {box_rows} rows"
        )
    return ctypes.string_at(made.getPtr(), TensorMap.NBYTES)
