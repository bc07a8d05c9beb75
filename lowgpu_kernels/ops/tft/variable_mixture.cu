// Kernel of variable_mixture.py: a block makes ROWS rows of the result, a real variable after the other.
// All threads make a variable's units of its reals, warps multiply them by its gate's weights, which come
// from the L2 cache, and then norm the gated rows, a row a warp, and add them to the total in shared
// memory. Row r is step r / sequences of sequence r mod sequences.
#include "tft_rows.cuh"

// ELU of real * slope + shift for all rows, zeros behind the last unit. A thread keeps its units.
__device__ inline void make_units(Real* tile, const float* x, const float* slope, const float* shift,
                                  int units) {
    const int pieces = whole_steps(units) / PIECE, stride = stride_of(units);
    const int threads = min(pieces, THREADS), at_once = THREADS / max(threads, 1);
    if (int(threadIdx.x) >= threads * at_once) return;
    for (int piece = threadIdx.x % threads; piece < pieces; piece += threads) {
        const int column = piece * PIECE;
        float slopes[PIECE], shifts[PIECE];
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            const bool there = column + i < units;
            slopes[i] = there ? slope[column + i] : 0.f;
            shifts[i] = there ? shift[column + i] : 0.f;
        }
        for (int row = threadIdx.x / threads; row < ROWS; row += at_once) {
            alignas(16) Real made[PIECE];
#pragma unroll
            for (int i = 0; i < PIECE; ++i) made[i] = to_real(elu(fmaf(x[row], slopes[i], shifts[i])));
            store_piece(tile + row * stride, column, *reinterpret_cast<const uint4*>(made));
        }
    }
}

// A share of a row's columns to the total.
__device__ inline void add(float* total, float share, const Four& four) {
    Four sum = load_four(total, FOUR, true);
#pragma unroll
    for (int i = 0; i < FOUR; ++i) sum.of[i] = fmaf(share, four.of[i], sum.of[i]);
    store_four(total, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    variable_mixture(const float* reals, const int* categories, const int* columns,
                     const int* category_columns, const int* bounds, const float* share, const float* slope,
                     const float* shift, const Real* gate, const float* gate_bias, const float* residual_slope,
                     const float* residual_shift, const float* residual_weight, const float* residual_bias,
                     const float* norm_weight, const float* norm_bias, const float* table, Real* out,
                     int sequences, int steps, int reals_count, int categories_count, int variables,
                     int categoricals, int units, int hidden, int units_whole, int hidden_whole, float epsilon) {
    extern __shared__ uint4 memory[];
    if constexpr (LG_WHOLE) units_whole = hidden_whole = 1;
    // Of two variables, because a warp may still norm the one while the next is fetched.
    __shared__ float x_of[2][ROWS];
    const int stride = sums_stride(hidden), rows = steps * sequences, first = blockIdx.x * ROWS;
    Real* const tile = reinterpret_cast<Real*>(memory);
    float* const gated = reinterpret_cast<float*>(tile + ROWS * stride_of(units));
    float* const total = gated + ROWS * stride;
    const int warp = warp_index();
    const auto parameters = [&](const float* of_all, int v) {
        return Columns(of_all == nullptr ? nullptr : of_all + v * hidden, hidden, hidden_whole);
    };

    // Where the caller has what row `row` of the tile reads; rows past the end read the last one.
    const auto brought = [&](int row) {
        const int r = min(first + row, rows - 1);
        return (long long)(r % sequences) * steps + r / sequences;
    };
    each_row(warp, [&](int row) {
        each_four(hidden, [&](int, int c) { store_four(total + row * stride + c, Four{}); });
    });
#pragma unroll 1
    for (int v = 0; v < variables; ++v) {
        float* const x = x_of[v % 2];
        if (threadIdx.x < ROWS) x[threadIdx.x] = reals[brought(threadIdx.x) * reals_count + columns[v]];
        __syncthreads();
        make_units(tile, x, slope + v * units, shift + v * units, units);
        __syncthreads();
        const long long of_gate = 2ll * v * hidden;
        gated_product(warp, gated, tile, stride_of(units), gate + of_gate * units, nullptr, gate_bias + of_gate, hidden,
                      units, units_whole);
        __syncthreads();
        const Columns slopes = parameters(residual_slope, v), shifts = parameters(residual_shift, v);
        const Columns of_weight = parameters(residual_weight, v), of_bias = parameters(residual_bias, v);
        const Columns weight = parameters(norm_weight, v), bias = parameters(norm_bias, v);
        each_row(warp, [&](int row) {
            const float* const sums = gated + row * stride;
            const float real = x[row];
            Row made = {};
            each_four(hidden, [&](int f, int c) {
                const Four of_slope = slopes.at(f, c), of_shift = shifts.at(f, c);
#pragma unroll
                for (int i = 0; i < FOUR; ++i)
                    made.of[f].of[i] = fmaf(real, of_slope.of[i], of_shift.of[i]);
            });
            if (residual_weight != nullptr) made.norm(hidden, epsilon, of_weight, of_bias);
            each_four(hidden, [&](int f, int c) {
                const Four added = load_sums(sums + c, hidden - c);
#pragma unroll
                for (int i = 0; i < FOUR; ++i) made.of[f].of[i] += added.of[i];
            });
            made.norm(hidden, epsilon, weight, bias);
            const long long r = min(first + row, rows - 1);
            const float share_of = share[r * (variables + categoricals) + v];
            each_four(hidden, [&](int f, int c) { add(total + row * stride + c, share_of, made.of[f]); });
        });
    }
    each_row(warp, [&](int row) {
        float* const into = total + row * stride;
        const long long r = first + row;
        if (r >= rows) return;  // nothing below needs a whole warp
        for (int v = 0; v < categoricals; ++v) {
            const float share_of = share[r * (variables + categoricals) + variables + v];
            const int category = categories[brought(row) * categories_count + category_columns[v]];
            // A category without a row has no share either; NaN times any row is NaN.
            const long long at = min(max(bounds[v] + category, bounds[v]), bounds[v + 1] - 1);
            each_four(hidden, [&](int, int c) {
                add(into + c, share_of, load_four(table + at * hidden + c, hidden - c, hidden_whole));
            });
        }
        each_four(hidden, [&](int, int c) {
            store_four(out + r * hidden + c, load_four(into + c, FOUR, true), hidden - c, hidden_whole);
        });
    });
}
