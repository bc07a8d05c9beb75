// Adds up the shares of sums that gemm.cu's blocks left where they split the terms, and makes the result
// of them. A thread has one element; neighbouring threads have neighbouring ones.
#include "int8_result.cuh"

extern "C" __global__ void __launch_bounds__(LG_THREADS)
    gemm_finish(const int* shares, const float* of_row, const float* of_column, const float* bias,
                float scale, Result* result, int rows, int columns, int splits) {
    const long long count = (long long)rows * columns;
    const long long at = (long long)blockIdx.x * LG_THREADS + threadIdx.x;
    if (at >= count) return;
    const int row = int(at / columns), column = int(at % columns);
    const Scales scales{of_row, of_column, bias, scale};
    int sum = 0;
    for (int s = 0; s < splits; ++s) sum += shares[s * count + at];
    store_result(result + at, sum, scales.row_factor(row, rows), scales.column_terms(column, columns));
}
