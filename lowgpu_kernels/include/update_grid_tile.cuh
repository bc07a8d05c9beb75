// What a block of ppo_update_grid.cu has in shared memory: the weights of an update, its tile of 64 rows
// with every layer's output, the rows of the next, and what it owns of the parameters.
#pragma once
#include "adam_terms.cuh"
#include "bulk_copy.cuh"
#include "env.cuh"
#include "ppo_terms.cuh"
#include "warpgroup_gradient.cuh"

constexpr int PIECES = LG_PARTIAL / PIECE;                     // of a tile's gradient
constexpr int A_BLOCK = (PIECES + LG_GRID - 1) / LG_GRID;      // pieces that a block adds up
constexpr int WIDE = round_up(A_BLOCK, WARP_LANES);            // threads across them
constexpr int SLICES = THREADS / WIDE, AHEAD = LG_AHEAD;
constexpr int ELEMENTS = A_BLOCK * PIECE;                       // of the gradient that a block owns
static_assert(LG_PARTIAL % PIECE == 0 && SLICES >= 1, "whole pieces, and a thread for each");

constexpr int INPUT = column_blocks(LG_INPUTS) * ROWS * BLOCK_COLUMNS;  // elements

__host__ __device__ constexpr int output_offset(int layer) {
    int blocks = 0;
    for (int l = 0; l < layer; ++l) blocks += column_blocks(LAYERS[l].fan_out);
    return blocks * ROWS * BLOCK_COLUMNS;
}

// Adam's part of an element, and what it belongs to.
struct Owned {
    Place place;
    float parameter, m, v;
};
static_assert(WARPS > LOSS_SUMS, "a warp adds up a statistic, and one more has another task");

// What is brought in of a row, in shared memory: by asynchronous copies, because a thread would wait for
// loads into registers where its warp's ways meet again.
struct Row {
    State state;
    Taken taken;
    float mean, deviation;
    int following;  // the transition in the tile after this one
};

struct Tile {
    static constexpr int ROWS_END = output_offset(LAYER_COUNT) + 2 * INPUT, ONES = 8 * BLOCK_COLUMNS;
    static constexpr int BARRIERS = round_up((LAYER_COUNT + 1) * int(sizeof(CopyBarrier)), 16);
    static constexpr int FLOATS = LG_GRADIENTS + ROWS * LG_OUTPUTS + SLICES * ELEMENTS +
                                  ROWS * LOSS_SUMS + WARPS + 2;
    static constexpr int NBYTES = (IMAGE_WEIGHTS + ROWS_END + ONES) * int(sizeof(Bf16)) +
                                  FLOATS * int(sizeof(float)) + BARRIERS +
                                  ROWS * (2 * int(sizeof(Taken)) + int(sizeof(Row)) + int(sizeof(int))) +
                                  ELEMENTS * int(sizeof(Owned));

    const Team team;
    Bf16* const weights;        // the image of warpgroup_layers.cuh, without the biases
    Bf16* const outputs;        // of every layer
    Bf16* const inputs;         // [2], of this tile and of the next
    Bf16* const ones;
    float* const biases;
    float* const y;             // [ROWS][LG_OUTPUTS]
    float* const sums;          // [SLICES][ELEMENTS]
    CopyBarrier* const copies;  // a layer's weights, and the biases
    Taken* const taken;         // [2][ROWS], of this tile and of the next
    Row* const rows;            // [ROWS], on their way
    int* const table_rows;      // [ROWS]
    float* const loss_sums;     // [ROWS][LOSS_SUMS], over the block's tiles
    float* const squares;       // [WARPS]
    AdamRates* const rates;
    Owned* const owned;         // [ELEMENTS]
    int parity = 0;             // of the copies under way
    int now = 1;                // which of two is this tile's

    __device__ explicit Tile(uint4* memory)
        : weights(reinterpret_cast<Bf16*>(memory)),
          outputs(weights + IMAGE_WEIGHTS),
          inputs(outputs + output_offset(LAYER_COUNT)),
          ones(inputs + 2 * INPUT),
          biases(reinterpret_cast<float*>(ones + ONES)),
          y(biases + LG_GRADIENTS),
          sums(y + ROWS * LG_OUTPUTS),
          copies(reinterpret_cast<CopyBarrier*>(sums + SLICES * ELEMENTS)),
          taken(reinterpret_cast<Taken*>(copies + BARRIERS / int(sizeof(CopyBarrier)))),
          rows(reinterpret_cast<Row*>(taken + 2 * ROWS)),
          table_rows(reinterpret_cast<int*>(rows + ROWS)),
          loss_sums(reinterpret_cast<float*>(table_rows + ROWS)),
          squares(loss_sums + ROWS * LOSS_SUMS),
          rates(reinterpret_cast<AdamRates*>(squares + WARPS)),
          owned(reinterpret_cast<Owned*>(rates + 1)) {}

    template <int L>
    __device__ Bf16* output() const { return outputs + output_offset(L); }
    template <int L>
    __device__ Bf16* input() const {
        return LAYERS[L].depth == 0 ? inputs + now * INPUT : output<L - (L > 0)>();
    }

    // Where a layer is first used after the copies of an update were started.
    template <int L>
    __device__ void await_weights() const {
        if constexpr (L == 0) wait_for_bytes(copies + LAYER_COUNT, parity);
        wait_for_bytes(copies + L, parity);
    }
};
static_assert(Tile::NBYTES == LG_TILE_NBYTES, "grid_update.py counts the same shared memory");

// One thread: copies of all weights, a layer at a time, that the layers await.
template <int L = 0>
__device__ inline void copy_weights(const Tile& tile, const unsigned char* image) {
    if constexpr (L == 0) {
        show_to_copies();
        constexpr int NBYTES = LG_GRADIENTS * int(sizeof(float));
        expect_bytes(tile.copies + LAYER_COUNT, NBYTES);
        start_bulk_copy(tile.biases, image + IMAGE_WEIGHTS * sizeof(Bf16), NBYTES,
                        tile.copies + LAYER_COUNT);
    }
    if constexpr (L < LAYER_COUNT) {
        constexpr int NBYTES = weight_elements(L) * int(sizeof(Bf16));
        expect_bytes(tile.copies + L, NBYTES);
        start_bulk_copy(tile.weights + weight_offset(L), image + weight_offset(L) * sizeof(Bf16),
                        NBYTES, tile.copies + L);
        copy_weights<L + 1>(tile, image);
    }
}

// The gradient of one row at the heads, rounded; zeros behind it.
template <int L = 0>
__device__ inline void store_head_gradient(const Tile& tile, int row, const float* by_y) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        if constexpr (layer.head)
#pragma unroll
            for (int c = 0; c < round_up(layer.fan_out, 16); ++c)
                tile.output<L>()[swizzled(ROWS, row, c)] =
                    to_real(c < layer.fan_out ? by_y[layer.column + c] : 0.f);
        store_head_gradient<L + 1>(tile, row, by_y);
    }
}
