// The layers of a network over tiles of LG_ROWS rows in shared memory, a tile a team (team.cuh):
//
//     stage<0, LAYER_COUNT>(tile, parameters);  // once, by the whole block; then a block's barrier
//     ... every team writes its input rows; every number finite ...
//     tile.team.sync();
//     forward_from<0>(tile, parameters);        // ends with a team's barrier
//     ... read tile.y[row * LG_OUTPUTS + column] ...
//
// A Tile has its `team` and the `warp()` of it, and says where things lie: the block's `weights` and
// `biases`, the team's `y`, `input<L>()` and `output<L>()` with their strides. Where it KEEPS, every
// layer's output has a place of its own, and the weights may be multiplied on the way down too.
//
// Where LG_RESIDENT is 1 the weights lie in shared memory, rounded once; where they do not fit, each
// is read from L2 as it is needed. Warps share a product in rectangles as near to square as they
// come: a fragment of either factor then serves several products. Rows in shared memory are 16 bytes
// longer than a multiple of 32, so the rows that a warp reads together start in different banks.
#pragma once
#include "fragment.cuh"
#include "team.cuh"

constexpr int ROWS = LG_ROWS;
constexpr bool RESIDENT = LG_RESIDENT;
static_assert(ROWS % Fragment::ROWS == 0, "whole fragments of rows");
static_assert(!RESIDENT || !LG_FLOAT32, "weights in shared memory are read by ldmatrix");

__host__ __device__ constexpr int weight_stride(int layer) {
    return round_up(LAYERS[layer].fan_in, 16) + PIECE;
}

// Rows of a layer's weights, with zeros: whole column tiles on the way up, whole steps of the sum on
// the way down.
__host__ __device__ constexpr int weight_rows(int layer) {
    return round_up(LAYERS[layer].fan_out, LG_BACKWARD ? 16 : 8);
}

// Elements of the weights in front of a layer's; of all at LAYER_COUNT.
__host__ __device__ constexpr int weight_offset(int layer) {
    int offset = 0;
    if (RESIDENT)
        for (int l = 0; l < layer; ++l) offset += weight_rows(l) * weight_stride(l);
    return offset;
}

// Zeros behind the columns of layer L's output, up to the sixteen that the next layer reads at once.
template <int L, class Tile>
__device__ inline void clear_behind(const Tile& tile) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (!layer.head && layer.fan_out % 16) {
        constexpr int PIECES = 8 / PIECE;
        for (int i = Team::thread(); i < ROWS * PIECES; i += THREADS)
            *reinterpret_cast<uint4*>(tile.template output<L>() +
                                      i / PIECES * Tile::output_stride(L) + layer.fan_out +
                                      i % PIECES * PIECE) = make_uint4(0u, 0u, 0u, 0u);
    }
}

// Layers [L, END) made ready: biases, rounded weights where they are resident, and zeros behind the
// columns of each layer's output. Neighbouring threads read neighbouring 32 bytes.
template <int L, int END, class Tile>
__device__ inline void stage(const Tile& tile, const float* __restrict__ parameters) {
    if constexpr (L < END && L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        for (int i = threadIdx.x; i < layer.fan_out; i += BLOCK_THREADS)
            tile.biases[layer.gradient + i] = parameters[layer.bias + i];
#if LG_RESIDENT
        constexpr int EIGHTS = round_up(layer.fan_in, 16) / 8;
        Real* const weights = tile.weights + weight_offset(L);
#pragma unroll 8
        for (int i = threadIdx.x; i < weight_rows(L) * EIGHTS; i += BLOCK_THREADS) {
            const int row = i / EIGHTS, column = i % EIGHTS * 8;
            float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
            if (row < layer.fan_out && column < layer.fan_in) {
                const auto* from = reinterpret_cast<const float4*>(
                    parameters + layer.weight + row * layer.fan_in + column);
                low = from[0];
                high = from[1];
            }
            *reinterpret_cast<uint4*>(weights + row * weight_stride(L) + column) =
                make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w),
                           pack_bf16(high.x, high.y), pack_bf16(high.z, high.w));
        }
#endif
        if constexpr (Tile::KEEPS) clear_behind<L>(tile);
        stage<L + 1, END>(tile, parameters);
    }
}

// How the warps of a team share ROWS x COLUMNS.
template <int COLUMNS>
struct Split {
    static constexpr int COLUMN_TILES = (COLUMNS + 7) / 8, ALL_ROW_TILES = ROWS / Fragment::ROWS;

    // The most warps along the rows that leave a warp four column tiles, where there are so many.
    static constexpr int row_warps() {
        int count = 1;
        while (count < ALL_ROW_TILES && count < WARPS && 2 * count * COLUMN_TILES <= 4 * WARPS)
            count *= 2;
        return count;
    }

    static constexpr int ROW_WARPS = row_warps(), COLUMN_WARPS = WARPS / ROW_WARPS;
    static constexpr int ROW_TILES = ALL_ROW_TILES / ROW_WARPS;
    // Column tiles a warp has, cut into passes of at most four so that the sums stay in registers.
    static constexpr int A_WARP = (COLUMN_TILES + COLUMN_WARPS - 1) / COLUMN_WARPS;
    static constexpr int PASSES = (A_WARP + 3) / 4;
    static constexpr int A_PASS = (A_WARP + PASSES - 1) / PASSES;
    // Whether every warp has as many tiles as every other, in every pass.
    static constexpr bool EVEN = COLUMN_TILES == COLUMN_WARPS * PASSES * A_PASS;
    static_assert(ROW_TILES * ROW_WARPS == ALL_ROW_TILES, "every row has a warp");
};

// Fragments of layer L's weights from summed index k, for column tiles first, first + 1, ..; past the
// last tile that one again.
template <class Map, int L, bool TAIL, int COUNT, class Tile>
__device__ inline void load_weights(typename Fragment::Weights (&to)[COUNT], const Tile& tile,
                                    const float* __restrict__ parameters, int k, int first) {
    constexpr int LAST = (Map::COLUMNS + 7) / 8 - 1;
#if LG_RESIDENT
    // Four 8 x 8 matrices at a time: two column tiles, each for the low and the high eight of k.
    const int lane = threadIdx.x % 32, in_row = lane % 8, half = lane / 8 % 2 * 8;
    const Real* const weights = tile.weights + weight_offset(L);
#pragma unroll
    for (int c = 0; c < COUNT; c += 2) {
        const int column = min(first + c + lane / 16, LAST) * 8;
        unsigned four[4];
        if constexpr (Map::BACKWARD)
            load_matrices_transposed(four,
                                     weights + (k + half + in_row) * weight_stride(L) + column);
        else
            load_matrices(four, weights + (column + in_row) * weight_stride(L) + k + half);
        to[c] = {four[0], four[1]};
        if (c + 1 < COUNT) to[c + 1] = {four[2], four[3]};
    }
#else
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
        to[c] = Fragment::weights<Map, TAIL>(parameters + LAYERS[L].weight, k,
                                             min(first + c, LAST) * 8);
#endif
}

// rows times layer L's weights: start(sums, column) fills the sums of a fragment whose first column
// that is, finish(sums, row, column) takes them. No barrier inside.
template <int L, bool BACKWARD, class Tile, class Start, class Finish>
__device__ inline void product(const Tile& tile, const float* __restrict__ parameters,
                               const Real* rows, int stride, Start start, Finish finish) {
    using M = Map<L, BACKWARD>;
    using S = Split<M::COLUMNS>;
    const int warp = tile.warp();
    const int first_row = warp / S::COLUMN_WARPS * S::ROW_TILES * Fragment::ROWS;
    const int first_tile = warp % S::COLUMN_WARPS * S::A_WARP;
    if (first_tile >= S::COLUMN_TILES) return;  // the whole warp leaves: no work for it here
    rows += first_row * stride;
#pragma unroll 1
    for (int pass = 0; pass < S::PASSES; ++pass) {
        const int first = first_tile + pass * S::A_PASS;
        const int past = min(first_tile + S::A_WARP, S::COLUMN_TILES);
        float sums[S::ROW_TILES][S::A_PASS][Fragment::SUMS];
#pragma unroll
        for (int c = 0; c < S::A_PASS; ++c) {
            start(sums[0][c], min(first + c, S::COLUMN_TILES - 1) * 8);
#pragma unroll
            for (int r = 1; r < S::ROW_TILES; ++r)
#pragma unroll
                for (int i = 0; i < Fragment::SUMS; ++i) sums[r][c][i] = sums[0][c][i % 2];
        }
        const auto step = [&](int k, const typename Fragment::Weights (&w)[S::A_PASS]) {
#pragma unroll
            for (int r = 0; r < S::ROW_TILES; ++r) {
                const auto a = Fragment::activations(rows + r * Fragment::ROWS * stride, stride, k);
#pragma unroll
                for (int c = 0; c < S::A_PASS; ++c) Fragment::multiply_add(sums[r][c], a, w[c]);
            }
        };
        // Resident weights have zeros behind them, so every step is a whole one.
        constexpr int SUMMED = RESIDENT ? round_up(M::SUMMED, Fragment::STEP) : M::SUMMED;
        constexpr int WHOLE = SUMMED / Fragment::STEP * Fragment::STEP;
        // From L2 a fourth step in flight takes more than the 128 registers of two blocks an SM.
        constexpr int UNROLL = LG_FLOAT32 ? 1 : RESIDENT ? 4 : 3;
        typename Fragment::Weights w[S::A_PASS];
#pragma unroll UNROLL
        for (int k = 0; k < WHOLE; k += Fragment::STEP) {
            load_weights<M, L, false>(w, tile, parameters, k, first);
            step(k, w);
        }
        if constexpr (WHOLE < SUMMED) {
            load_weights<M, L, true>(w, tile, parameters, WHOLE, first);
            step(WHOLE, w);
        }
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < S::A_PASS; ++c)
                if (S::EVEN || first + c < past)
                    finish(sums[r][c], first_row + r * Fragment::ROWS, (first + c) * 8);
    }
}

template <int L, class Tile>
__device__ inline void forward_from(const Tile& tile, const float* __restrict__ parameters) {
    if constexpr (L < LAYER_COUNT) {
        constexpr int FAN_OUT = LAYERS[L].fan_out, COLUMN = LAYERS[L].column;
        constexpr bool HEAD = LAYERS[L].head;
        const float* const biases = tile.biases + LAYERS[L].gradient;
        product<L, false>(
            tile, parameters, tile.template input<L>(), Tile::template input_stride<L>(),
            [&](float (&sums)[Fragment::SUMS], int column) {
#pragma unroll
                for (int i = 0; i < Fragment::SUMS; ++i) {
                    const int at = column + Fragment::column(i);
                    sums[i] = at < FAN_OUT ? biases[at] : 0.f;
                }
            },
            [&](float (&sums)[Fragment::SUMS], int row, int column) {
                if constexpr (HEAD) {
#pragma unroll
                    for (int i = 0; i < Fragment::SUMS; ++i) {
                        const int at = column + Fragment::column(i);
                        if (at < FAN_OUT)
                            tile.y[(row + Fragment::row(i)) * LG_OUTPUTS + COLUMN + at] =
                                sums[i];
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < Fragment::SUMS; ++i) sums[i] = activation(sums[i]);
                    Fragment::store(tile.template output<L>() + row * Tile::output_stride(L) + column,
                                    Tile::output_stride(L), sums);
                }
            });
        if constexpr (!Tile::KEEPS) clear_behind<L>(tile);
        tile.team.sync();
        forward_from<L + 1>(tile, parameters);
    }
}
