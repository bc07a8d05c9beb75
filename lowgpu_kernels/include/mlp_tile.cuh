// A tile of ROWS rows in shared memory, and the layers of a network run over it by one block.
//
//     extern __shared__ uint4 memory[];
//     MlpTile<ROWS> tile(memory);            // MlpTile<ROWS>::NBYTES of shared memory
//     ... write tile.input[row * tile.INPUT + column]: all ROWS rows, LG_INPUTS columns and then
//         zeros to a multiple of 16 columns (load_tile_rows does all of it); every number finite ...
//     mlp_tile_forward(tile, parameters, hidden, rows);
//     ... read tile.y[row * LG_OUTPUTS + column], float32, pad columns zero ...
//
// All MLP_THREADS threads of the block call it, whatever they own outside. It begins and ends with a
// barrier, so input written and y read by any thread need none of their own. The input rows are
// written over where the network has one tower: write them again before the next call. `hidden` is
// where the first row's stored activations go, [.., LG_HIDDEN] in global memory, for the first `rows`
// rows of the tile; nullptr stores none. What a row gives depends on no other row.
//
// Warps share the columns of a layer in tiles of 8, for all rows of the tile, so a block reads each
// weight once, from the float32 parameters in L2; where a layer has fewer column tiles than there
// are warps, the warps share its rows too. Rows of a tile are 16 bytes longer than a multiple of 32,
// so the rows that a warp reads together start in different banks.
#pragma once
#include "async_copy.cuh"
#include "mlp_rows.cuh"

constexpr int MLP_THREADS = 256;
constexpr int MLP_WARPS = MLP_THREADS / 32;

// How the warps of a block share ROWS x COLUMNS.
template <int ROWS, int COLUMNS>
struct Share {
    static constexpr int COLUMN_TILES = (COLUMNS + 7) / 8;
    static constexpr int COLUMN_WARPS =
        COLUMN_TILES >= 8 ? 8 : COLUMN_TILES >= 4 ? 4 : COLUMN_TILES >= 2 ? 2 : 1;
    static constexpr int ALL_ROW_TILES = ROWS / Fragment::ROWS;
    static constexpr int ROW_WARPS =
        MLP_WARPS / COLUMN_WARPS < ALL_ROW_TILES ? MLP_WARPS / COLUMN_WARPS : ALL_ROW_TILES;
    static constexpr int ROW_TILES = ALL_ROW_TILES / ROW_WARPS;
    // Column tiles a warp has, cut into passes of at most four so that the sums stay in registers.
    static constexpr int A_WARP = (COLUMN_TILES + COLUMN_WARPS - 1) / COLUMN_WARPS;
    static constexpr int PASSES = (A_WARP + 3) / 4;
    static constexpr int A_PASS = (A_WARP + PASSES - 1) / PASSES;
    static constexpr int UNROLL = A_PASS > 2 ? 2 : 4;
    static_assert(ROW_TILES * ROW_WARPS == ALL_ROW_TILES, "every row has a warp");
};

// rows times weights: start(sums, column) fills the sums of a fragment whose first column that is,
// finish(sums, row, column) takes them. No barrier inside.
template <int ROWS, class Map, class Start, class Finish>
__device__ inline void product(const Real* rows, int stride, const float* __restrict__ weight,
                               Start start, Finish finish) {
    using S = Share<ROWS, Map::COLUMNS>;
    const int warp = threadIdx.x / 32;
    const int first_row = warp / S::COLUMN_WARPS * S::ROW_TILES * Fragment::ROWS;
    if (first_row >= ROWS) return;  // the whole warp leaves: this layer has no work for it
    rows += first_row * stride;
#pragma unroll 1
    for (int pass = 0; pass < S::PASSES; ++pass) {
        int tile[S::A_PASS];
        float sums[S::ROW_TILES][S::A_PASS][Fragment::SUMS];
#pragma unroll
        for (int c = 0; c < S::A_PASS; ++c) {
            tile[c] = (pass * S::A_PASS + c) * S::COLUMN_WARPS + warp % S::COLUMN_WARPS;
            // A warp with fewer tiles than others computes the last one again and drops it.
            const int column = min(tile[c], S::COLUMN_TILES - 1) * 8;
            start(sums[0][c], column);
#pragma unroll
            for (int r = 1; r < S::ROW_TILES; ++r)
#pragma unroll
                for (int i = 0; i < Fragment::SUMS; ++i) sums[r][c][i] = sums[0][c][i % 2];
        }
        const auto step = [&](int k, auto weights_of) {
            typename Fragment::Weights w[S::A_PASS];
#pragma unroll
            for (int c = 0; c < S::A_PASS; ++c)
                w[c] = weights_of(k, min(tile[c], S::COLUMN_TILES - 1) * 8);
#pragma unroll
            for (int r = 0; r < S::ROW_TILES; ++r) {
                const auto a = Fragment::activations(rows + r * Fragment::ROWS * stride, stride, k);
#pragma unroll
                for (int c = 0; c < S::A_PASS; ++c) Fragment::multiply_add(sums[r][c], a, w[c]);
            }
        };
        constexpr int WHOLE = Map::SUMMED / Fragment::STEP * Fragment::STEP;
#pragma unroll S::UNROLL
        for (int k = 0; k < WHOLE; k += Fragment::STEP)
            step(k, [&](int at, int column) {
                return Fragment::weights<Map, false>(weight, at, column);
            });
        if constexpr (WHOLE < Map::SUMMED)
            step(WHOLE, [&](int at, int column) {
                return Fragment::weights<Map, true>(weight, at, column);
            });
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < S::A_PASS; ++c)
                if (tile[c] < S::COLUMN_TILES)
                    finish(sums[r][c], first_row + r * Fragment::ROWS, tile[c] * 8);
    }
}

// Starts copying `rows` rows of COLUMNS elements, a multiple of 8, into a tile. Further rows of the
// tile, and further columns up to a multiple of 16, become zero. Ends a copy group.
template <int ROWS, int COLUMNS>
__device__ inline void load_tile_rows(Real* tile, int stride, const Real* source, long long source_stride,
                                 int rows) {
    constexpr int PIECES = round_up(COLUMNS, 16) / PIECE;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += MLP_THREADS) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        const bool valid = row < rows && column < COLUMNS;
        start_copy_16(tile + row * stride + column,
                      valid ? source + row * source_stride + column : source, valid);
    }
    end_copy_group();
}

// Copies `rows` rows of COLUMNS elements, a multiple of 8, out of a tile.
template <int ROWS, int COLUMNS>
__device__ inline void store_tile_rows(Real* to, long long to_stride, const Real* tile, int stride,
                                  int rows) {
    constexpr int PIECES = COLUMNS / PIECE;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += MLP_THREADS) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        if (row < rows)
            *reinterpret_cast<uint4*>(to + row * to_stride + column) =
                *reinterpret_cast<const uint4*>(tile + row * stride + column);
    }
}

template <int ROWS, int L>
__device__ inline void forward_from(const MlpTile<ROWS>& tile, const float* __restrict__ parameters,
                                    Real* hidden, int rows) {
    if constexpr (L < LAYER_COUNT) {
        constexpr int DEPTH = LAYERS[L].depth, FAN_OUT = LAYERS[L].fan_out;
        constexpr int COLUMN = LAYERS[L].column;
        constexpr bool HEAD = LAYERS[L].head;
        constexpr int STRIDE = MlpTile<ROWS>::stride(DEPTH);
        Real* const out = tile.at(DEPTH);
        product<ROWS, Map<L, false>>(
            tile.at(DEPTH - 1), MlpTile<ROWS>::stride(DEPTH - 1),
            parameters + LAYERS[L].weight,
            [&](float (&sums)[Fragment::SUMS], int column) {
#pragma unroll
                for (int i = 0; i < Fragment::SUMS; ++i) {
                    const int at = column + Fragment::column(i);
                    sums[i] = at < FAN_OUT ? parameters[LAYERS[L].bias + at] : 0.f;
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
                    Fragment::store(out + row * STRIDE + column, STRIDE, sums);
                }
            });
        if constexpr (!HEAD && FAN_OUT % Fragment::STEP) {
            // The next layer sums in whole steps; what is past its columns must be zero.
            constexpr int PIECES = 8 / PIECE;
            for (int i = threadIdx.x; i < ROWS * PIECES; i += MLP_THREADS)
                *reinterpret_cast<uint4*>(out + i / PIECES * STRIDE + FAN_OUT +
                                          i % PIECES * PIECE) = make_uint4(0u, 0u, 0u, 0u);
        }
        __syncthreads();
        if constexpr (!HEAD) {
            // The buffer is next written by the layer after the next, which a barrier holds back.
            if (hidden != nullptr)
                store_tile_rows<ROWS, FAN_OUT>(hidden + COLUMN, LG_HIDDEN, out, STRIDE, rows);
        }
        forward_from<ROWS, L + 1>(tile, parameters, hidden, rows);
    }
}

template <int ROWS>
__device__ inline void mlp_tile_forward(const MlpTile<ROWS>& tile,
                                        const float* __restrict__ parameters, Real* hidden,
                                        int rows) {
    constexpr int PADS = LG_OUTPUTS - LG_HEADS;
    if constexpr (PADS > 0)
        for (int i = threadIdx.x; i < ROWS * PADS; i += MLP_THREADS)
            tile.y[i / PADS * LG_OUTPUTS + LG_HEADS + i % PADS] = 0.f;
    __syncthreads();
    forward_from<ROWS, 0>(tile, parameters, hidden, rows);
}
