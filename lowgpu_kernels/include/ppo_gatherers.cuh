// The two warps of ppo_update_grid.cu that bring in the next tile's rows, a thread a row: state and
// transition by asynchronous copies, then the observation.
#pragma once
#include "observe_tile.cuh"
#include "ppo_grid_tile.cuh"

// What rows are gathered from.
struct Rollout {
    const float* floats;
    const int* ints;
    const Bf16* table;
    const float* series;
    int series_rows, updates, batch;
    const int *index, *action;
    const float *log_probability, *value, *advantage, *returns, *moments;
};

struct Gatherers : Gathering<ROWS> {
    // Whether the thread has a row in a tile; none past the last update.
    static __device__ bool owns(const Rollout& from, const Turn& turn) {
        return turn.update < from.updates && turn.at * ROWS + thread() < from.batch;
    }
    // Where the thread's row of a tile finds its transition.
    static __device__ const int* place(const Rollout& from, const Turn& turn) {
        return from.index + (long long)turn.update * from.batch + turn.at * ROWS + thread();
    }

    // Starts the copies of the row of a tile, and of its transition in the tile after that.
    static __device__ void fetch(const Tile& tile, const Rollout& from, const Turn& turn, int tiles) {
        Row& row = tile.rows[thread()];
        const bool is = owns(from, turn);
        const long long n = is ? row.following : 0;
#pragma unroll
        for (int i = 0; i < STATE_FLOATS; ++i)
            start_copy_4(row.state.floats + i, from.floats + n * STATE_FLOATS + i, is);
#pragma unroll
        for (int i = 0; i < STATE_INTS; ++i)
            start_copy_4(row.state.ints + i, from.ints + n * STATE_INTS + i, is);
        start_copy_4(&row.taken.action, from.action + n, is);
        start_copy_4(&row.taken.log_probability, from.log_probability + n, is);
        start_copy_4(&row.taken.value, from.value + n, is);
        start_copy_4(&row.taken.gain, from.advantage + n, is);
        start_copy_4(&row.taken.returns, from.returns + n, is);
        if (from.moments != nullptr) {
            start_copy_4(&row.mean, from.moments + turn.update * 2, is);
            start_copy_4(&row.deviation, from.moments + turn.update * 2 + 1, is);
        }
        const Turn after = turn.next(tiles);
        const bool follows = owns(from, after);
        start_copy_4(&row.following, follows ? place(from, after) : from.index, follows);
        end_copy_group();
    }

    // What was fetched, where the next tile reads it.
    __device__ void leave(const Tile& tile, const Rollout& from, const Turn& turn) const {
        wait_for_copies_but<0>();
        const Row& row = tile.rows[thread()];
        const int next = tile.now ^ 1;
        const bool is = owns(from, turn);
        Taken taken = row.taken;
        if (from.moments != nullptr) taken.gain = (taken.gain - row.mean) / (row.deviation + 1e-8f);
        if (!is) taken.action = -1;
        tile.taken[next * ROWS + thread()] = taken;
        observe_tile<ROWS>(
            *this, [&](int r, int c) { return tile.inputs + next * INPUT + swizzled(ROWS, r, c); },
            row.state, is, from.table, from.series, from.series_rows, tile.table_rows);
    }
};
