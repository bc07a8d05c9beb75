// What a block of ppo_update_grid.cu has in shared memory beside what update_grid.cuh says: the rows of
// the next tile, and what it owns of the parameters.
#pragma once
#include "ppo_terms.cuh"
#include "update_grid.cuh"

// Adam's part of an element, and what it belongs to.
struct Owned {
    Place place;
    float parameter, m, v;
};

// What is brought in of a row, in shared memory: by asynchronous copies, because a thread would wait for
// loads into registers where its warp's ways meet again.
struct Row {
    State state;
    Taken taken;
    float mean, deviation;
    int following;  // the transition in the tile after this one
};

// Two inputs: this tile's and the next one's.
struct Tile : GridTile<2> {
    static constexpr int BARRIERS = round_up((LAYER_COUNT + 1) * int(sizeof(CopyBarrier)), 16);
    static constexpr int FLOATS = SLICES * ELEMENTS + ROWS * LOSS_SUMS + WARPS + 2;
    static constexpr int NBYTES = GridTile::NBYTES + FLOATS * int(sizeof(float)) + BARRIERS +
                                  ROWS * (2 * int(sizeof(Taken)) + int(sizeof(Row)) + int(sizeof(int))) +
                                  ELEMENTS * int(sizeof(Owned));

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
        : GridTile(memory),
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
static_assert(Tile::NBYTES == LG_TILE_NBYTES, "update_launch.py counts the same shared memory");

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
        copy_layer<L, false>(tile, image);
        copy_weights<L + 1>(tile, image);
    }
}
