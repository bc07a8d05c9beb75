// What a block of dqn_update_grid.cu has in shared memory beside what update_grid.cuh says, and the
// warpgroup that brings in the next tile's rows: a thread a state, by asynchronous copies.
#pragma once
#include "dqn_terms.cuh"
#include "observe_tile.cuh"
#include "update_grid.cuh"

// The passes over a tile: the target over the next states; the parameters over them too where these
// choose the action; and then over the states that actions were taken in.
constexpr int PASSES = LG_DOUBLE ? 3 : 2, LAST_PASS = PASSES - 1;

// Adam's part of an element and the target's, and what it belongs to.
struct Owned {
    Place place;
    float parameter, m, v, target;
};

// What is known of a row besides its states.
struct Window {
    int action;  // -1 where the row does not count
    float reward, discount, weight;
};

// Three inputs: the states of this tile, those of the next one, and this tile's next states, which
// are done with before the next tile's come.
struct Tile : GridTile<3> {
    static constexpr int BARRIERS = round_up(LAYER_COUNT * int(sizeof(CopyBarrier)), 16);
    static constexpr int STATES = 2 * (STATE_FLOATS + STATE_INTS);
    static constexpr int HELD = STATES > LG_OUTPUTS ? STATES : LG_OUTPUTS;
    static constexpr int FLOATS = ROWS * (HELD + 1 + LOSS_SUMS) + WARPS + 2;
    static constexpr int NBYTES = GridTile::NBYTES + FLOATS * int(sizeof(float)) + BARRIERS +
                                  2 * ROWS * int(sizeof(Window) + sizeof(int)) +
                                  ELEMENTS * int(sizeof(Owned));

    float* const sums;           // [SLICES][ELEMENTS], where the layers' outputs were
    CopyBarrier* const copies;   // a layer's weights and biases
    State* const states;         // [2][ROWS], next states and states, on their way from the loss on
    float* const held;           // [ROWS][LG_OUTPUTS], in their place: the target's, until goals are known
    float* const goals;          // [ROWS]
    float* const loss_sums;      // [ROWS][LOSS_SUMS], over the block's tiles
    Window* const windows;       // [2][ROWS], of this tile and on their way
    int* const table_rows;       // [2][ROWS]
    float* const squares;        // [WARPS]
    AdamRates* const rates;
    Owned* const owned;          // [ELEMENTS]
    const unsigned char* image;  // of the parameters, which follow the target's
    int now = 1;                 // which of two inputs has this tile's states
    int pass = 0;

    __device__ Tile(uint4* memory, const unsigned char* of_parameters)
        : GridTile(memory),
          sums(reinterpret_cast<float*>(outputs)),
          copies(reinterpret_cast<CopyBarrier*>(y + ROWS * LG_OUTPUTS)),
          states(reinterpret_cast<State*>(copies + BARRIERS / int(sizeof(CopyBarrier)))),
          held(reinterpret_cast<float*>(states)),
          goals(held + ROWS * HELD),
          loss_sums(goals + ROWS),
          windows(reinterpret_cast<Window*>(loss_sums + ROWS * LOSS_SUMS)),
          table_rows(reinterpret_cast<int*>(windows + 2 * ROWS)),
          squares(reinterpret_cast<float*>(table_rows + 2 * ROWS)),
          rates(reinterpret_cast<AdamRates*>(squares + WARPS)),
          owned(reinterpret_cast<Owned*>(rates + 1)),
          image(of_parameters) {}

    __device__ Bf16* next_states() const { return inputs + 2 * INPUT; }

    template <int L>
    __device__ Bf16* input() const {
        if constexpr (LAYERS[L].depth > 0) return output<L - (L > 0)>();
        return pass == LAST_PASS ? inputs + now * INPUT : next_states();
    }

    // Where a layer is first used in a pass. Every thread is done with the layer before it then: behind
    // the target the parameters take its place.
    template <int L>
    __device__ void await_weights() const {
        if constexpr (L > 0)
            if (pass == 0) follow_target<L - 1>();
        wait_for_bytes(copies + L, pass > 0);
    }
    template <int L>
    __device__ void follow_target() const {
        if (threadIdx.x == 0) copy_layer<L, true>(*this, image);
    }
};
static_assert(Tile::NBYTES == LG_TILE_NBYTES, "dqn_launch.py counts the same shared memory");
static_assert(SLICES * ELEMENTS * sizeof(float) <= output_offset(LAYER_COUNT) * sizeof(Bf16),
              "sums lie where the outputs were");

// One thread: copies of all the target's weights, a layer at a time, that the layers await.
template <int L = 0>
__device__ inline void copy_target(const Tile& tile, const unsigned char* image) {
    if constexpr (L < LAYER_COUNT) {
        copy_layer<L, true>(tile, image);
        copy_target<L + 1>(tile, image);
    }
}

// What rows are gathered from.
struct Windows {
    const float* state_floats;
    const int* state_ints;
    const float* next_floats;
    const int* next_ints;
    const int* action;
    const float *reward, *discount, *weight;
    const Bf16* table;
    const float* series;
    int series_rows, updates, batch;
};

// Threads of the first half have next states, those of the second half states and the rest of a row.
struct Gatherers : Gathering<2 * ROWS> {
    static __device__ bool of_next() { return thread() < ROWS; }
    static __device__ int row() { return thread() % ROWS; }

    // Whether the thread's row is in a tile; none is past the last update.
    static __device__ bool owns(const Windows& from, const Turn& turn) {
        return turn.update < from.updates && turn.at * ROWS + row() < from.batch;
    }

    // Starts the copies of the rows of a tile.
    static __device__ void fetch(const Tile& tile, const Windows& from, const Turn& turn) {
        const bool is = owns(from, turn);
        const long long n = is ? (long long)turn.update * from.batch + turn.at * ROWS + row() : 0;
        const float* const floats = of_next() ? from.next_floats : from.state_floats;
        const int* const ints = of_next() ? from.next_ints : from.state_ints;
        State& state = tile.states[thread()];
#pragma unroll
        for (int i = 0; i < STATE_FLOATS; ++i)
            start_copy_4(state.floats + i, floats + n * STATE_FLOATS + i, is);
#pragma unroll
        for (int i = 0; i < STATE_INTS; ++i)
            start_copy_4(state.ints + i, ints + n * STATE_INTS + i, is);
        if (!of_next()) {
            Window& window = tile.windows[ROWS + row()];
            start_copy_4(&window.action, from.action + n, is);
            start_copy_4(&window.reward, from.reward + n, is);
            start_copy_4(&window.discount, from.discount + n, is);
            if (from.weight != nullptr) start_copy_4(&window.weight, from.weight + n, is);
        }
        end_copy_group();
    }

    // What was fetched, where the next tile reads it.
    __device__ void leave(const Tile& tile, const Windows& from, const Turn& turn) const {
        wait_for_copies_but<0>();
        const bool is = owns(from, turn);
        if (!of_next()) {
            Window window = tile.windows[ROWS + row()];
            if (from.weight == nullptr) window.weight = 1.f;
            if (!is) window.action = -1;
            tile.windows[row()] = window;
        }
        const int next = tile.now ^ 1;
        observe_tile<SIZE>(
            *this,
            [&](int r, int c) {
                Bf16* const into = r < ROWS ? tile.next_states() : tile.inputs + next * INPUT;
                return into + swizzled(ROWS, r % ROWS, c);
            },
            tile.states[thread()], is, from.table, from.series, from.series_rows, tile.table_rows);
    }
};
