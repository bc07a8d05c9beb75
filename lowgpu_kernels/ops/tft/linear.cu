// Kernel of linear.py: a block makes ROWS rows of the result, all columns of it; its rows of x are in
// shared memory, and the weights come from the L2 cache, once for each group of warps. A lane stores 16
// bytes of a row.
#include "tft_rows.cuh"

#if LG_RESULT
using Result = float;
#else
using Result = Real;
#endif

__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(Bf16* to, float x) { *to = {(unsigned short)pack_bf16(x, 0.f)}; }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    linear(const Real* x, const Term* weight, const float* scale, const float* bias, Result* result, int rows,
           int inputs, int outputs, int x_whole, int inputs_whole, int outputs_whole, float levels) {
    extern __shared__ uint4 memory[];
    if constexpr (LG_WHOLE) x_whole = inputs_whole = outputs_whole = 1;
    Term* const tile = reinterpret_cast<Term*>(memory);
    const int first = blockIdx.x * ROWS, warp = warp_index();
    load_rows(tile, x, first, rows, inputs, x_whole, levels);
    __syncthreads();
    constexpr int AT_ONCE = 16 / sizeof(Result);
    product(warp, tile, stride_of(inputs), weight, scale, bias, outputs, inputs, inputs_whole,
            [&](int row, int column, auto& values) {
                constexpr int RUN = sizeof(values) / sizeof(float);
                if (first + row >= rows) return;
                Result* const to = result + (long long)(first + row) * outputs + column;
                if (outputs_whole) {
#pragma unroll
                    for (int i = 0; i < RUN; i += AT_ONCE) {
                        if (column + i >= outputs) return;
                        alignas(16) Result piece[AT_ONCE];
#pragma unroll
                        for (int j = 0; j < AT_ONCE; ++j) store(piece + j, values[i + j]);
                        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(piece);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < RUN; ++i)
                        if (column + i < outputs) store(to + i, values[i]);
                }
            });
}
