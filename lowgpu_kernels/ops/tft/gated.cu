// Kernel of gated.py: a block makes ROWS rows of the result. Its rows of x are in shared memory, and so
// are the units that LG_FIRST makes of them and the gated rows, which warps then norm, a row at a time. The
// weights come from the L2 cache, once for each group of warps.
#include "tft_rows.cuh"

// What lies in a block's shared memory, in this order: x, units where there are any, gated rows.
struct Tiles {
    Real *x, *units;
    float* gated;
    int x_stride, units_stride;

    __device__ Tiles(uint4* memory, int inputs, int count) {
        x = reinterpret_cast<Real*>(memory);
        x_stride = stride_of(inputs);
        units = LG_FIRST ? x + ROWS * x_stride : x;
        units_stride = stride_of(count);
        gated = reinterpret_cast<float*>(units + ROWS * units_stride);
    }
};

// ELU of the first layer, zeros behind the last unit: strips end no earlier than whole steps do.
__device__ inline void make_units(int warp, const Tiles& tiles, const Real* weight, const float* bias,
                                  const float* context, int first, int rows, int inputs, int units,
                                  int sequences, bool whole) {
    product(warp, tiles.x, tiles.x_stride, weight, units, inputs, whole, [&](int row, int column, auto& values) {
        constexpr int RUN = sizeof(values) / sizeof(float);
        alignas(16) Real piece[RUN];
        // Rows past the end have the last one's context.
        const int of = min(first + row, rows - 1) % sequences;
        const float* const added = context + (long long)of * units;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const bool there = column + i < units;
            float total = values[i] + (there ? bias[column + i] : 0.f);
            if (context != nullptr && there) total += added[column + i];
            piece[i] = to_real(there ? elu(total) : 0.f);
        }
        if (column < whole_steps(units))
            store_piece(tiles.units + row * tiles.units_stride, column,
                        *reinterpret_cast<const uint4*>(piece));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gated(const Real* x, const Real* residual, const float* context, const Real* first_weight,
          const float* first_bias, const Real* gate, const float* gate_bias, const float* norm_weight,
          const float* norm_bias, Real* out, int rows, int inputs, int units, int hidden, int sequences,
          int inputs_whole, int units_whole, int hidden_whole, float epsilon) {
    extern __shared__ uint4 memory[];
    const Tiles tiles(memory, inputs, units);
    const int first = blockIdx.x * ROWS, stride = sums_stride(hidden), warp = warp_index();
    load_rows(tiles.x, x, first, rows, inputs, inputs_whole);
    __syncthreads();
    if constexpr (LG_FIRST) {
        make_units(warp, tiles, first_weight, first_bias, context, first, rows, inputs, units, sequences,
                   inputs_whole);
        __syncthreads();
    }
    gated_product(warp, tiles.gated, tiles.units, tiles.units_stride, gate, gate_bias, hidden, units, units_whole);
    __syncthreads();
    const Columns weight(norm_weight, hidden, hidden_whole), bias(norm_bias, hidden, hidden_whole);
#pragma unroll 1
    for (int row = warp; row < ROWS && first + row < rows; row += WARPS) {
        const float* const sums = tiles.gated + row * stride;
        const long long at = (long long)(first + row) * hidden;
        Row made = {};
        each_four(hidden, [&](int f, int c) {
            made.of[f] = load_sums(sums + c, hidden - c);
            const Four added = load_four(residual + at + c, hidden - c, hidden_whole);
#pragma unroll
            for (int i = 0; i < FOUR; ++i) made.of[f].of[i] += added.of[i];
        });
        made.norm(hidden, epsilon, weight, bias);
        each_four(hidden, [&](int f, int c) {
            store_four(out + at + c, made.of[f], hidden - c, hidden_whole);
        });
    }
}
