// What a block of dqn_update_grid.cu and of dqn_rounds.cu has in shared memory beside what update_grid.cuh
// says.
#pragma once
#include "dqn_terms.cuh"
#include "update_grid.cuh"
#include "warpgroup_chain.cuh"

// The passes over a tile: the target over the next states; the parameters over them too where these
// choose the action; and then over the states that actions were taken in.
constexpr int PASSES = LG_DOUBLE ? 3 : 2, LAST_PASS = PASSES - 1;
// Adam's part of an element and the target's, and what it belongs to.
struct Owned {
    Place place;
    float parameter, m, v, target;
};

// What is known of a row besides its states.
struct Taken {
    int action;  // -1 where the row does not count
    float reward, discount, weight;
};

// Three inputs: the states of this tile, those of the next one, and this tile's next states, which
// are done with before the next tile's come.
struct Tile : GridTile<3> {
    static constexpr int BARRIERS = 2 * LAYER_COUNT * int(sizeof(CopyBarrier));
    static constexpr int NOTES = 64;
    static constexpr int STATES = 2 * (STATE_FLOATS + STATE_INTS);
    static constexpr int HELD = STATES > LG_OUTPUTS ? STATES : LG_OUTPUTS;
    static constexpr int FLOATS = ROWS * (HELD + LG_OUTPUTS + 1 + LOSS_SUMS) + WARPS + 2;
    static constexpr int NBYTES = GridTile::NBYTES + FLOATS * int(sizeof(float)) + BARRIERS +
                                  2 * ROWS * int(sizeof(Taken) + sizeof(int)) +
                                  ELEMENTS * int(sizeof(Owned)) + NOTES;

    float* const sums;           // [SLICES][ELEMENTS], where the layers' outputs were
    CopyBarrier* const copies;   // [2][LAYER_COUNT], a layer's weights: those first, and those that follow
    void* const notes;           // of a kernel's own, NOTES bytes
    State* const states;         // [2][ROWS], next states and states, on their way from the loss on
    float* const held;           // [ROWS][LG_OUTPUTS], in their place: the target's, until goals are known
    float* const online;         // [ROWS][LG_OUTPUTS], the parameters' of the next states
    float* const goals;          // [ROWS]
    float* const loss_sums;      // [ROWS][LOSS_SUMS], over the block's tiles
    Taken* const taken;          // [2][ROWS], of this tile and on their way
    int* const table_rows;       // [2][ROWS]
    float* const squares;        // [WARPS]
    AdamRates* const rates;
    Owned* const owned;          // [ELEMENTS]
    const unsigned char* image;  // of the parameters, which follow the target's
    int now = 1;                 // which of two inputs has this tile's states
    int came = 0, followed = 0;  // how often weights came first, and those that follow, modulo 2

    __device__ Tile(uint4* memory, const unsigned char* of_parameters)
        : GridTile(memory),
          sums(reinterpret_cast<float*>(outputs)),
          copies(reinterpret_cast<CopyBarrier*>(y + ROWS * LG_OUTPUTS)),
          notes(copies + BARRIERS / int(sizeof(CopyBarrier))),
          states(reinterpret_cast<State*>(static_cast<char*>(notes) + NOTES)),
          held(reinterpret_cast<float*>(states)),
          online(held + ROWS * HELD),
          goals(online + ROWS * LG_OUTPUTS),
          loss_sums(goals + ROWS),
          taken(reinterpret_cast<Taken*>(loss_sums + ROWS * LOSS_SUMS)),
          table_rows(reinterpret_cast<int*>(taken + 2 * ROWS)),
          squares(reinterpret_cast<float*>(table_rows + 2 * ROWS)),
          rates(reinterpret_cast<AdamRates*>(squares + WARPS)),
          owned(reinterpret_cast<Owned*>(rates + 1)),
          image(of_parameters) {}

    __device__ Bf16* next_states() const { return inputs + 2 * INPUT; }

    template <int L>
    __device__ Bf16* input() const {
        if constexpr (LAYERS[L].depth > 0) return output<L - (L > 0)>();
        return inputs + now * INPUT;
    }
};
static_assert(Tile::NBYTES == LG_TILE_NBYTES, "dqn_launch.py counts the same shared memory");
static_assert(SLICES * ELEMENTS * sizeof(float) <= output_offset(LAYER_COUNT) * sizeof(Bf16),
              "sums lie where the outputs were");

// One thread: the copy of a layer's weights and biases that it awaits as the first or as those that follow.
template <int L>
__device__ inline void copy_layer_of(const Tile& tile, const unsigned char* image, bool follows) {
    struct {
        CopyBarrier* copies;
        Bf16* weights;
        float* biases;
    } const to = {tile.copies + follows * LAYER_COUNT, tile.weights, tile.biases};
    // Once, for what other blocks wrote.
    if constexpr (L == 0) show_to_copies();
    copy_layer<L, true>(to, image);
}
template <int L = 0>
__device__ inline void copy_image(const Tile& tile, const unsigned char* image) {
    if constexpr (L < LAYER_COUNT) {
        copy_layer_of<L>(tile, image, false);
        copy_image<L + 1>(tile, image);
    }
}

// A warpgroup on its own: threads, and a barrier of theirs.
struct Group {
    static constexpr int SIZE = GROUP_THREADS;
    const int index;
    __device__ Group() : index(warp_index() / 4) {}
    static __device__ int thread() { return thread_index() % SIZE; }
    // The second one's is Gathering's.
    __device__ void sync() const { named_barrier<SIZE>(2 - index); }
};

// A warpgroup's way through the network over 64 rows.
struct Chain {
    const Tile& tile;
    const Group& group;
    const Bf16* const rows;
    float* const y;
    const bool keeps;
    const bool waits_second;  // for the parameters that follow the target's, not for what came first
    const bool follows;       // by the target, whose place the parameters take layer after layer

    template <int L>
    __device__ void await_weights() const {
        wait_for_bytes(tile.copies + waits_second * LAYER_COUNT + L, waits_second ? tile.followed : tile.came);
    }
    template <int L>
    __device__ void done_with() const {
        if (!follows) return;
        group.sync();
        if (group.thread() == 0) copy_layer_of<L>(tile, tile.image, true);
    }
};
