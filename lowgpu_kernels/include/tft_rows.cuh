// Tiles of ROWS rows in shared memory, multiplied by weights in global memory and normed, by a block of
// THREADS. Groups of warps share the rows; the warps of a group share the columns in strips. A row of a tile
// is whole steps of terms, zeros behind its columns, and its stride puts rows that a warp reads together into
// different banks: rows.py counts the same. What a row gives depends on no other row.
#pragma once
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP_LANES, ACROSS = WARPS / LG_WARPS_DOWN, DOWN = LG_DOWN;
constexpr int GROUP_ROWS = DOWN * Fragment::ROWS, ROWS = GROUP_ROWS * (WARPS / ACROSS);
constexpr int FOUR = 4;  // columns that a lane norms at once; with LG_WHOLE all of them are there or none
// Lanes that norm a row together, and rows that a warp norms at once: fewer lanes, fewer shuffles.
constexpr int ROW_LANES = LG_ROW_LANES, ROWS_A_WARP = WARP_LANES / ROW_LANES;

__device__ inline int whole_steps(int columns) {
    return (columns + Fragment::STEP - 1) / Fragment::STEP * Fragment::STEP;
}
__device__ inline int stride_of(int columns) {
    return whole_steps(columns) + TERMS;
}
// Two rows that a warp writes together lie in different banks: half of 32 past a multiple of it.
__device__ inline int sums_stride(int columns) { return (columns + 15) / 32 * 32 + 16; }

// act(row, column) for a thread's pieces of WIDTH columns of a tile, whole steps of them.
template <int WIDTH, class Act>
__device__ inline void each_piece(int columns, Act act) {
    const int pieces = whole_steps(columns) / WIDTH;
    if (pieces == 0) return;
    int row = threadIdx.x / pieces, piece = threadIdx.x % pieces;
    const int rows_on = THREADS / pieces, pieces_on = THREADS % pieces;
#pragma unroll 2
    while (row < ROWS) {
        act(row, piece * WIDTH);
        piece += pieces_on;
        row += rows_on + (piece >= pieces);
        piece -= piece >= pieces ? pieces : 0;
    }
}

// Rows `first` on of a matrix into a tile; rows past `rows` and columns past `columns` are zeros. `whole`
// says that rows of 16 bytes are whole where they lie; `levels` are a 1, where terms are made of bfloat16.
__device__ inline void load_rows(Term* tile, const Term* from, int first, int rows, int columns, bool whole,
                                 float) {
    const int stride = stride_of(columns);
    each_piece<TERMS>(columns, [&](int row, int column) {
        const int left = first + row < rows ? columns - column : 0;
        store_piece(tile + row * stride, column,
                    load_piece(from + (long long)(first + row) * columns + column, left, whole));
    });
}
#if LG_INT8
__device__ inline void load_rows(Term* tile, const Real* from, int first, int rows, int columns, bool whole,
                                 float levels) {
    const int stride = stride_of(columns);
    each_piece<PIECE>(columns, [&](int row, int column) {
        const int left = first + row < rows ? columns - column : 0;
        const uint2 made =
            levels_of(load_piece(from + (long long)(first + row) * columns + column, left, whole), levels);
        const unsigned words[2] = {made.x, made.y};
        store_words(tile + row * stride, column, words);
    });
}
#endif

// sums[d][c] += the warp's `rows` of a tile times the row of weights that `weight[c]` is for this lane. The
// weights of a step are fetched during the step before.
template <int COUNT>
__device__ inline void multiply(Sum (&sums)[DOWN][COUNT][Fragment::SUMS], const Term* rows, int stride,
                                const Term* const (&weight)[COUNT], int terms, bool whole) {
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

// What sums of neighbouring columns are worth, of int8 terms `scale` is what a 1 of it is, and what is added
// to them, nothing where there is no bias. Columns past the last have the last one's.
template <int RUN>
struct Worth {
    float scale[RUN], bias[RUN];

    __device__ Worth(const float* scales, const float* biases, int first, int last) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const int column = min(first + i, last);
            if (sizeof(Term) == 1) scale[i] = scales[column];
            bias[i] = biases == nullptr ? 0.f : biases[column];
        }
    }
    __device__ float of(float sum, int i) const { return sum + bias[i]; }
    __device__ float of(int sum, int i) const { return float(sum) * scale[i] + bias[i]; }
};

// The tile times weight [columns, terms], bias added: finish(row, column, values) takes RUN neighbouring
// columns of a row of the tile, of which columns past the end are to be dropped. No barrier inside.
template <class Finish>
__device__ inline void product(int warp, const Term* tile, int stride, const Term* weight, const float* scale,
                               const float* bias, int columns, int terms, bool whole, Finish finish) {
    constexpr int TILES = 4;
    using S = Strip<TILES>;
    const int first_row = warp / ACROSS * GROUP_ROWS;
#pragma unroll 1
    for (int first = warp % ACROSS * S::COLUMNS; first < columns; first += ACROSS * S::COLUMNS) {
        const Term* rows[TILES];
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            // Lanes past the last column compute that one again.
            const int column = min(first + Fragment::weight_column<TILES>(c), columns - 1);
            rows[c] = weight + (long long)column * terms;
        }
        Sum sums[DOWN][TILES][Fragment::SUMS] = {};
        multiply(sums, tile + first_row * stride, stride, rows, terms, whole);
        const int run = first + S::first_of_run();
        const Worth<S::RUN> worth(scale, bias, run, columns - 1);
#pragma unroll
        for (int d = 0; d < DOWN; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float values[S::RUN];
#pragma unroll
                for (int i = 0; i < S::RUN; ++i) values[i] = worth.of(S::of_run(sums[d], half, i), i);
                finish(first_row + d * Fragment::ROWS + Fragment::row(half), run, values);
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
__device__ inline void gated_product(int warp, float* gated, const Term* tile, int stride,
                                     const Term* weight, const float* scale, const float* bias, int columns,
                                     int terms, bool whole) {
    constexpr int TILES = 2;
    using S = Strip<TILES>;
    static_assert(FOUR % S::RUN == 0, "a run that starts in a row's fours ends in them");
    const int first_row = warp / ACROSS * GROUP_ROWS, to_stride = sums_stride(columns);
#pragma unroll 1
    for (int first = warp % ACROSS * S::COLUMNS; first < columns; first += ACROSS * S::COLUMNS) {
        const Term* rows[2 * TILES];
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const int column = min(first + Fragment::weight_column<TILES>(c), columns - 1);
            rows[c] = weight + (long long)column * terms;
            rows[TILES + c] = weight + (long long)(columns + column) * terms;
        }
        Sum sums[DOWN][2 * TILES][Fragment::SUMS] = {};
        multiply(sums, tile + first_row * stride, stride, rows, terms, whole);
        const int run = first + S::first_of_run();
        const Worth<S::RUN> of_value(scale, bias, run, columns - 1);
        const Worth<S::RUN> of_gate(scale, bias, columns + run, 2 * columns - 1);
#pragma unroll
        for (int d = 0; d < DOWN; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                alignas(16) float made[S::RUN];
#pragma unroll
                for (int i = 0; i < S::RUN; ++i) {
                    const float value = of_value.of(S::of_run(sums[d], half, i), i);
                    made[i] = value * sigmoid(of_gate.of(S::of_run(sums[d] + TILES, half, i), i));
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
        if (!LG_WHOLE && i >= left) four.of[i] = 0.f;
    return four;
}

// The lane among those of its row, and the row of a warp's at once that it is of.
__device__ inline int lane_of_row() { return lane_of_warp() % ROW_LANES; }
__device__ inline int row_of_warp() { return lane_of_warp() / ROW_LANES; }

// The sum over the lanes of a row, in an order that never changes; the warp whole.
__device__ inline float row_sum(float x) {
#pragma unroll
    for (int gap = ROW_LANES / 2; gap > 0; gap /= 2) x += __shfl_xor_sync(ALL_LANES, x, gap);
    return x;
}

// A lane's part of a row of up to LG_FOURS * ROW_LANES * 4 columns: act(f, column) for each Four that is there.
template <class Act>
__device__ inline void each_four(int columns, Act act) {
#pragma unroll
    for (int f = 0; f < LG_FOURS; ++f) {
        const int c = (f * ROW_LANES + lane_of_row()) * FOUR;
        if (c < columns) act(f, c);
    }
}

// act(row) for all rows of a tile, a few of each warp at once; all lanes take part to the end.
template <class Act>
__device__ inline void each_row(int warp, Act act) {
#pragma unroll 1
    for (int row = warp * ROWS_A_WARP; row < ROWS; row += WARPS * ROWS_A_WARP) act(row + row_of_warp());
}

// Parameters of each column, of which a lane keeps its own where LG_KEPT says that registers hold them.
struct Columns {
    static constexpr bool KEPT = LG_KEPT;
    const float* from;
    int columns;
    bool whole;
    Four kept[KEPT ? LG_FOURS : 1];

    __device__ Columns(const float* first, int count, bool whole_rows)
        : from(first), columns(count), whole(whole_rows), kept{} {
        if (KEPT && first != nullptr)
            each_four(count, [&](int f, int c) {
                kept[KEPT ? f : 0] = load_four(first + c, count - c, whole_rows);
            });
    }
    __device__ Four at(int f, int c) const {
        return KEPT ? kept[KEPT ? f : 0] : load_four(from + c, columns - c, whole);
    }
};

// A lane's part of a row in registers, zeros behind the last column.
struct Row {
    Four of[LG_FOURS];

    // Mean 0 and variance 1, then scaled and shifted: the warp whole, each row by its own lanes.
    __device__ void norm(int columns, float epsilon, const Columns& weight, const Columns& bias) {
        float sum = 0.f, squares = 0.f;
        each_four(columns, [&](int f, int) {
#pragma unroll
            for (int i = 0; i < FOUR; ++i) sum += of[f].of[i];
        });
        const float share = reciprocal(float(columns)), mean = row_sum(sum) * share;
        each_four(columns, [&](int f, int c) {
#pragma unroll
            for (int i = 0; i < FOUR; ++i) {
                float& x = of[f].of[i];
                x = LG_WHOLE || c + i < columns ? x - mean : 0.f;
                squares = fmaf(x, x, squares);
            }
        });
        const float scale = reciprocal_root(fmaf(row_sum(squares), share, epsilon));
        each_four(columns, [&](int f, int c) {
            const Four of_weight = weight.at(f, c), of_bias = bias.at(f, c);
#pragma unroll
            for (int i = 0; i < FOUR; ++i)
                of[f].of[i] = fmaf(of[f].of[i] * scale, of_weight.of[i], of_bias.of[i]);
        });
    }
};
