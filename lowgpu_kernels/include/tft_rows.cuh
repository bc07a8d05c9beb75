// Tiles of ROWS rows in shared memory, multiplied by weights in global memory and normed, by a block of
// THREADS. Groups of warps share the rows; the warps of a group share the columns in strips. A row of a tile
// is whole steps of terms, zeros behind its columns, and its stride puts rows that a warp reads together into
// different banks: rows.py counts the same. What a row gives depends on no other row.
#pragma once
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP_LANES, ACROSS = WARPS / LG_WARPS_DOWN, DOWN = LG_DOWN;
constexpr int GROUP_ROWS = DOWN * Fragment::ROWS, ROWS = GROUP_ROWS * (WARPS / ACROSS);
constexpr int FOUR = 4;  // columns that a lane norms at once

__device__ inline int whole_steps(int columns) {
    return (columns + Fragment::STEP - 1) / Fragment::STEP * Fragment::STEP;
}
__device__ inline int stride_of(int columns) {
    return whole_steps(columns) + PIECE;
}
// Two rows that a warp writes together lie in different banks: half of 32 past a multiple of it.
__device__ inline int sums_stride(int columns) { return (columns + 15) / 32 * 32 + 16; }

// Rows `first` on of a matrix into a tile; rows past `rows` and columns past `columns` are zeros.
__device__ inline void load_rows(Real* tile, const Real* from, int first, int rows, int columns, bool whole) {
    const int pieces = whole_steps(columns) / PIECE, stride = stride_of(columns);
    for (int i = threadIdx.x; i < ROWS * pieces; i += THREADS) {
        const int row = i / pieces, column = i % pieces * PIECE;
        const int left = first + row < rows ? columns - column : 0;
        store_piece(tile + row * stride, column,
                    load_piece(from + (long long)(first + row) * columns + column, left, whole));
    }
}

// sums[d][c] += the warp's `rows` of a tile times the row of weights that `weight[c]` is for this lane. The
// weights of a step are fetched during the step before.
template <int COUNT>
__device__ inline void multiply(float (&sums)[DOWN][COUNT][Fragment::SUMS], const Real* rows, int stride,
                                const Real* const (&weight)[COUNT], int terms, bool whole) {
    const int term = Fragment::term();
    uint4 next[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) next[c] = load_piece(weight[c] + term, terms - term, whole);
#pragma unroll 1
    for (int k = 0; k < terms; k += Fragment::STEP) {
        uint4 right[COUNT];
        const int at = k + Fragment::STEP + term;
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            right[c] = next[c];
            next[c] = load_piece(weight[c] + at, terms - at, whole);
        }
#pragma unroll
        for (int d = 0; d < DOWN; ++d) {
            const auto left = load_left(rows + d * Fragment::ROWS * stride, stride, k);
#pragma unroll
            for (int c = 0; c < COUNT; ++c) Fragment::multiply_add(sums[d][c], left, right[c]);
        }
    }
}

// The tile times weight [columns, terms]: finish(row, column, values) takes RUN neighbouring columns of a
// row of the tile, of which columns past the end are to be dropped. No barrier inside.
template <class Finish>
__device__ inline void product(int warp, const Real* tile, int stride, const Real* weight, int columns,
                               int terms, bool whole, Finish finish) {
    constexpr int TILES = 4;
    using S = Strip<TILES>;
    const int first_row = warp / ACROSS * GROUP_ROWS;
#pragma unroll 1
    for (int first = warp % ACROSS * S::COLUMNS; first < columns; first += ACROSS * S::COLUMNS) {
        const Real* rows[TILES];
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            // Lanes past the last column compute that one again.
            const int column = min(first + Fragment::weight_column<TILES>(c), columns - 1);
            rows[c] = weight + (long long)column * terms;
        }
        float sums[DOWN][TILES][Fragment::SUMS] = {};
        multiply(sums, tile + first_row * stride, stride, rows, terms, whole);
#pragma unroll
        for (int d = 0; d < DOWN; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float values[S::RUN];
#pragma unroll
                for (int i = 0; i < S::RUN; ++i) values[i] = S::of_run(sums[d], half, i);
                const int row = first_row + d * Fragment::ROWS + Fragment::row(half);
                finish(row, first + S::first_of_run(), values);
            }
    }
}

// A run of floats to shared memory, where runs start at multiples of their size.
__device__ inline void store_run(float* to, const float (&run)[2]) {
    *reinterpret_cast<float2*>(to) = make_float2(run[0], run[1]);
}
__device__ inline void store_run(float* to, const float (&run)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(run[0], run[1], run[2], run[3]);
}

// The tile through a gated linear unit, weight [2 columns, terms], to rows of floats. What is behind the
// last column of a row is left as anything. No barrier inside.
__device__ inline void gated_product(int warp, float* gated, const Real* tile, int stride,
                                     const Real* weight, const float* bias, int columns, int terms,
                                     bool whole) {
    constexpr int TILES = 2;
    using S = Strip<TILES>;
    static_assert(FOUR % S::RUN == 0, "a run that starts in a row's fours ends in them");
    const int first_row = warp / ACROSS * GROUP_ROWS, to_stride = sums_stride(columns);
#pragma unroll 1
    for (int first = warp % ACROSS * S::COLUMNS; first < columns; first += ACROSS * S::COLUMNS) {
        const Real* rows[2 * TILES];
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const int column = min(first + Fragment::weight_column<TILES>(c), columns - 1);
            rows[c] = weight + (long long)column * terms;
            rows[TILES + c] = weight + (long long)(columns + column) * terms;
        }
        float sums[DOWN][2 * TILES][Fragment::SUMS] = {};
        multiply(sums, tile + first_row * stride, stride, rows, terms, whole);
        const int run = first + S::first_of_run();
        float of_value[S::RUN], of_gate[S::RUN];
#pragma unroll
        for (int i = 0; i < S::RUN; ++i) {
            const int column = min(run + i, columns - 1);
            of_value[i] = bias[column];
            of_gate[i] = bias[columns + column];
        }
#pragma unroll
        for (int d = 0; d < DOWN; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                alignas(16) float made[S::RUN];
#pragma unroll
                for (int i = 0; i < S::RUN; ++i) {
                    const float value = S::of_run(sums[d], half, i) + of_value[i];
                    made[i] = value * sigmoid(S::of_run(sums[d] + TILES, half, i) + of_gate[i]);
                }
                const int row = first_row + d * Fragment::ROWS + Fragment::row(half);
                if (run < columns) store_run(gated + row * to_stride + run, made);
            }
    }
}

// Neighbouring columns of a row: what a lane norms at once. `left` of them are there; `whole` says that
// rows start at multiples of FOUR elements.
struct Four {
    float of[FOUR];
};

__device__ inline Four four_of(const float4& x) { return {{x.x, x.y, x.z, x.w}}; }
__device__ inline Four four_of(const uint2& x) {
    return {{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)}};
}
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

template <class Element>
__device__ inline Four load_four(const Element* from, int left, bool whole) {
    if (whole) {
        if constexpr (sizeof(Element) == 4) return four_of(*reinterpret_cast<const float4*>(from));
        if constexpr (sizeof(Element) == 2) return four_of(*reinterpret_cast<const uint2*>(from));
    }
    Four four = {};
#pragma unroll
    for (int i = 0; i < FOUR; ++i)
        if (i < left) four.of[i] = to_float(from[i]);
    return four;
}

__device__ inline void store_four(float* to, const Four& four) {
    *reinterpret_cast<float4*>(to) = make_float4(four.of[0], four.of[1], four.of[2], four.of[3]);
}
__device__ inline void store_four(Bf16* to, const Four& four) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(four.of[0], four.of[1]), pack_bf16(four.of[2], four.of[3]));
}
__device__ inline void store_four(Real* to, const Four& four, int left, bool whole) {
    if (whole) {
        store_four(to, four);
    } else {
#pragma unroll
        for (int i = 0; i < FOUR; ++i)
            if (i < left) to[i] = to_real(four.of[i]);
    }
}

// Of a row in shared memory, what is behind its last column becoming zeros.
__device__ inline Four load_sums(const float* from, int left) {
    Four four = load_four(from, FOUR, true);
#pragma unroll
    for (int i = 0; i < FOUR; ++i)
        if (i >= left) four.of[i] = 0.f;
    return four;
}

// A lane's part of a row of up to LG_FOURS * 128 columns: act(f, column) for each Four that is there.
template <class Act>
__device__ inline void each_four(int columns, Act act) {
#pragma unroll
    for (int f = 0; f < LG_FOURS; ++f) {
        const int c = (f * WARP_LANES + lane_of_warp()) * FOUR;
        if (c < columns) act(f, c);
    }
}

// Parameters of each column: of rows of one Four a lane, the lane keeps its own.
struct Columns {
    static constexpr bool KEPT = LG_FOURS == 1;
    const float* from;
    int columns;
    bool whole;
    Four kept;

    __device__ Columns(const float* first, int count, bool whole_rows)
        : from(first), columns(count), whole(whole_rows), kept{} {
        const int c = lane_of_warp() * FOUR;
        if (KEPT && first != nullptr && c < count) kept = load_four(first + c, count - c, whole_rows);
    }
    __device__ Four at(int c) const { return KEPT ? kept : load_four(from + c, columns - c, whole); }
};

// A lane's part of a row in registers, zeros behind the last column.
struct Row {
    Four of[LG_FOURS];

    // Mean 0 and variance 1, then scaled and shifted: a warp, whole.
    __device__ void norm(int columns, float epsilon, const Columns& weight, const Columns& bias) {
        float sum = 0.f, squares = 0.f;
        each_four(columns, [&](int f, int) {
#pragma unroll
            for (int i = 0; i < FOUR; ++i) sum += of[f].of[i];
        });
        const float share = reciprocal(float(columns)), mean = warp_sum(sum) * share;
        each_four(columns, [&](int f, int c) {
#pragma unroll
            for (int i = 0; i < FOUR; ++i) {
                float& x = of[f].of[i];
                x = c + i < columns ? x - mean : 0.f;
                squares = fmaf(x, x, squares);
            }
        });
        const float scale = reciprocal_root(fmaf(warp_sum(squares), share, epsilon));
        each_four(columns, [&](int f, int c) {
            const Four of_weight = weight.at(c), of_bias = bias.at(c);
#pragma unroll
            for (int i = 0; i < FOUR; ++i)
                of[f].of[i] = fmaf(of[f].of[i] * scale, of_weight.of[i], of_bias.of[i]);
        });
    }
};
