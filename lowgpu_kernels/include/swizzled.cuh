// Matrices of bfloat16 in shared memory as warpgroup.cuh multiplies them: blocks of 64 columns one after
// another, in a block a row 128 bytes, and in a row the eight pieces of 16 bytes in an order that
// depends on the row, so that eight rows of one column lie in different banks. Blocks start at multiples
// of 1024 bytes.
#pragma once
#include "real.cuh"

constexpr int BLOCK_COLUMNS = 64, ROW_NBYTES = 128, EIGHT_ROWS_NBYTES = 1024;

__host__ __device__ constexpr int column_blocks(int columns) {
    return (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
}

// Elements in front of (row, column) in a matrix of `rows` rows; of the piece that holds it where the
// column is a multiple of 8.
__host__ __device__ constexpr int swizzled(int rows, int row, int column) {
    return column / BLOCK_COLUMNS * rows * BLOCK_COLUMNS + row * BLOCK_COLUMNS +
           ((column % BLOCK_COLUMNS / 8 ^ row % 8) * 8 + column % 8);
}
