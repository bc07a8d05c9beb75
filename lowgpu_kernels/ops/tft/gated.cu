// Kernel of gated.py: a block makes ROWS rows of the result. Its rows of x are in shared memory, and so
// are the units that LG_FIRST makes of them and the gated rows, which warps then norm, a row at a time. The
// weights come from the L2 cache, once for each group of warps.
#include "tft_rows.cuh"

#if LG_LEVELS
using Given = Term;  // rows that are multiplied, as levels where LG_LEVELS says so
#else
using Given = Real;
#endif

// What lies in a block's shared memory, in this order: x, units where there are any, gated rows.
struct Tiles {
    Term *x, *units;
    float* gated;
    int x_stride, units_stride;

    __device__ Tiles(uint4* memory, int inputs, int count) {
        x = reinterpret_cast<Term*>(memory);
        x_stride = stride_of(inputs);
        units = LG_FIRST ? x + ROWS * x_stride : x;
        units_stride = stride_of(count);
        gated = reinterpret_cast<float*>(units + ROWS * units_stride);
    }
};

// A run of units as terms of the next product.
template <int RUN>
__device__ inline void store_units(Term* row, int column, const float (&units)[RUN], float levels) {
    constexpr int A_WORD = 4 / sizeof(Term);
    unsigned words[RUN / A_WORD];
#pragma unroll
    for (int i = 0; i < RUN; i += A_WORD) {
#if LG_INT8
        words[i / A_WORD] = four_levels(units[i], units[i + 1], units[i + 2], units[i + 3], levels);
#elif LG_FLOAT32
        words[i] = __float_as_uint(units[i]);
#else
        words[i / A_WORD] = pack_bf16(units[i], units[i + 1]);
#endif
    }
    store_words(row, column, words);
}

// ELU of the first layer, zeros behind the last unit: strips end no earlier than whole steps do.
__device__ inline void make_units(int warp, const Tiles& tiles, const Term* weight, const float* scale,
                                  const float* bias, const float* context, int first, int rows, int inputs,
                                  int units, int sequences, bool whole, float levels) {
    const auto finish = [&](int row, int column, auto& values) {
        constexpr int RUN = sizeof(values) / sizeof(float);
        if (context != nullptr && column < units) {
            // Rows past the end have the last one's context.
            const int of = min(first + row, rows - 1) % sequences;
            const float* const added = context + (long long)of * units + column;
#pragma unroll
            for (int i = 0; i < RUN; i += FOUR) {
                const Four four = load_four(added + i, units - column - i, LG_WHOLE);
#pragma unroll
                for (int j = 0; j < FOUR; ++j) values[i + j] += four.of[j];
            }
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const float unit = elu(values[i]);
            // With LG_WHOLE runs end where the units do.
            values[i] = column + (LG_WHOLE ? 0 : i) < units ? unit : 0.f;
        }
        if (column < whole_steps(units)) store_units(tiles.units + row * tiles.units_stride, column, values, levels);
    };
    product(warp, tiles.x, tiles.x_stride, weight, scale, bias, units, inputs, whole, finish);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gated(const Given* x, const Real* residual, const float* context, const Term* first_weight,
          const float* first_scale, const float* first_bias, const Term* gate, const float* gate_scale,
          const float* gate_bias, const float* norm_weight, const float* norm_bias, Real* out, int rows,
          int inputs, int units, int hidden, int sequences, int x_whole, int inputs_whole, int units_whole,
          int hidden_whole, float epsilon, float input_levels, float unit_levels) {
    extern __shared__ uint4 memory[];
    if constexpr (LG_WHOLE) x_whole = inputs_whole = units_whole = hidden_whole = 1;
    const Tiles tiles(memory, inputs, units);
    const int first = blockIdx.x * ROWS, stride = sums_stride(hidden), warp = warp_index();
    load_rows(tiles.x, x, first, rows, inputs, x_whole, input_levels);
    __syncthreads();
    if constexpr (LG_FIRST) {
        make_units(warp, tiles, first_weight, first_scale, first_bias, context, first, rows, inputs, units,
                   sequences, inputs_whole, unit_levels);
        __syncthreads();
    }
    gated_product(warp, tiles.gated, tiles.units, tiles.units_stride, gate, gate_scale, gate_bias, hidden, units,
                  units_whole);
    __syncthreads();
    const Columns weight(norm_weight, hidden, hidden_whole), bias(norm_bias, hidden, hidden_whole);
    each_row(warp, [&](int row) {
        const float* const sums = tiles.gated + row * stride;
        const bool there = first + row < rows;
        // Rows past the end norm the last one's residual, and store nothing.
        const long long at = (long long)min(first + row, rows - 1) * hidden;
        Row made = {};
        each_four(hidden, [&](int f, int c) {
            made.of[f] = load_sums(sums + c, hidden - c);
            const Four added = load_four(residual + at + c, hidden - c, hidden_whole);
#pragma unroll
            for (int i = 0; i < FOUR; ++i) made.of[f].of[i] += added.of[i];
        });
        made.norm(hidden, epsilon, weight, bias);
        each_four(hidden, [&](int f, int c) {
            if (there) store_four(out + at + c, made.of[f], hidden - c, hidden_whole);
        });
    });
}
