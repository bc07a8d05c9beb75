// The warpgroup that brings in the next tile's rows, in kernels of DQN's updates in one launch: a thread a
// state, by asynchronous copies. Where rows come from, a From, is arrays of them or a replay ring.
#pragma once
#include "dqn_grid_tile.cuh"
#include "observe_tile.cuh"

// What observations are made of.
struct World {
    const Bf16* table;
    const float* series;
    int series_rows;
};

// Rows that lie in arrays, minibatch after minibatch.
struct Windows {
    World world;
    int updates, batch;
    const float* state_floats;
    const int* state_ints;
    const float* next_floats;
    const int* next_ints;
    const int* action;
    const float *reward, *discount, *weight;

    __device__ const float* floats(bool of_next) const { return of_next ? next_floats : state_floats; }
    __device__ const int* ints(bool of_next) const { return of_next ? next_ints : state_ints; }

    // Where a row's state lies; what else is known of it is put in `taken` by the thread with its state.
    __device__ long long find(int update, int row, bool is, bool of_next, Taken& taken) const {
        const long long n = is ? (long long)update * batch + row : 0;
        if (!of_next) {
            start_copy_4(&taken.action, action + n, is);
            start_copy_4(&taken.reward, reward + n, is);
            start_copy_4(&taken.discount, discount + n, is);
            if (weight != nullptr)
                start_copy_4(&taken.weight, weight + n, is);
            else
                taken.weight = 1.f;
        }
        return n;
    }
};

// Threads of the first half have next states, those of the second half states and the rest of a row.
struct Gatherers : Gathering<2 * ROWS> {
    static __device__ bool of_next() { return thread() < ROWS; }
    static __device__ int row() { return thread() % ROWS; }

    // Whether the thread's row is in a tile; none is past the last update.
    template <class From>
    static __device__ bool owns(const From& from, const Turn& turn) {
        return turn.update < from.updates && turn.at * ROWS + row() < from.batch;
    }

    // Starts the copies of the rows of a tile.
    template <class From>
    static __device__ void fetch(const Tile& tile, const From& from, const Turn& turn) {
        const bool is = owns(from, turn);
        const int row_of_batch = turn.at * ROWS + row();
        const long long n =
            from.find(turn.update, row_of_batch, is, of_next(), tile.taken[ROWS + row()]);
        const float* const floats = from.floats(of_next());
        const int* const ints = from.ints(of_next());
        State& state = tile.states[thread()];
#pragma unroll
        for (int i = 0; i < STATE_FLOATS; ++i)
            start_copy_4(state.floats + i, floats + n * STATE_FLOATS + i, is);
#pragma unroll
        for (int i = 0; i < STATE_INTS; ++i)
            start_copy_4(state.ints + i, ints + n * STATE_INTS + i, is);
        end_copy_group();
    }

    // What was fetched, where the next tile reads it.
    template <class From>
    __device__ void leave(const Tile& tile, const From& from, const Turn& turn) const {
        wait_for_copies_but<0>();
        const bool is = owns(from, turn);
        if (!of_next()) {
            Taken taken = tile.taken[ROWS + row()];
            if (!is) taken.action = -1;
            tile.taken[row()] = taken;
        }
        const int next = tile.now ^ 1;
        const World& world = from.world;
        observe_tile<SIZE>(
            *this,
            [&](int r, int c) {
                Bf16* const into = r < ROWS ? tile.next_states() : tile.inputs + next * INPUT;
                return into + swizzled(ROWS, r % ROWS, c);
            },
            tile.states[thread()], is, world.table, world.series, world.series_rows,
            tile.table_rows);
    }
};
