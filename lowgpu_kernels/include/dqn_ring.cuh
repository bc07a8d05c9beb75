// Rows drawn from the replay ring as an update takes them, and the steps of environments that go into it,
// in a kernel that makes whole rounds of DQN (ops/dqn/dqn_rounds.cu).
#pragma once
#include "dqn_grid_rows.cuh"
#include "explore.cuh"
#include "replay.cuh"
#include "rollout_ahead.cuh"

constexpr int STEPS = LG_STEPS;  // most of a return

// The same number, as if it might be another each time. Else the compiler works out before the first
// round what follows from it, as the keys of all rounds of a draw, and keeps that in registers that
// the sums of products need.
template <class T>
__device__ inline T afresh(T number) {
#ifdef __CUDACC__
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(number));
    else
        asm volatile("" : "+r"(number));
#endif
    return number;
}

struct Ring {
    float* floats;
    int* ints;
    float* next_floats;
    int* next_ints;
    float* reward;
    unsigned char* mark;
    int slots, envs;
};

// How far a launch has come, in a block's shared memory: one thread keeps it, and registers are free for
// the sums of products.
struct Progress {
    unsigned long long clock, draws;
    unsigned long long rest, further;  // env steps so far and of a round, modulo `every`
    int head, filled;                  // of the ring
    bool follows;                      // whether a move falls due before the next round's updates

    // Twin of is_due of target_move.py, which divides once a call; here once a launch. `every` is 0 for
    // a target that does not move by env steps.
    __device__ void begin(const unsigned long long* from_clock, const unsigned long long* from_draws,
                          const int* from_head, unsigned long long every, int steps, int envs) {
        clock = *from_clock;
        draws = *from_draws;
        head = from_head[0];
        filled = from_head[1];
        rest = every > 0 ? clock * envs % every : 0;
        further = every > 0 ? (unsigned long long)steps * envs % every : 0;
    }

    // After the steps of a round.
    __device__ void play(int steps, int envs, int slots, unsigned long long every) {
        clock += steps;
        head = int((unsigned(head) + unsigned(steps)) % unsigned(slots));
        filled = steps < slots - filled ? filled + steps : slots;
        rest += further;
        if (rest >= every) rest -= every;
        const unsigned long long a_round = (unsigned long long)afresh(steps) * envs;
        follows = every > 0 && (rest == 0 || a_round > every - rest);
    }
};

// Rows of a round's minibatches: uniform draws from what the ring holds, and windows that start there.
struct Drawn {
    World world;
    int updates, batch;
    Ring ring;
    float gamma;
    unsigned long long seed;
    const Progress& progress;

    __device__ const float* floats(bool of_next) const { return of_next ? ring.next_floats : ring.floats; }
    __device__ const int* ints(bool of_next) const { return of_next ? ring.next_ints : ring.ints; }

    __device__ long long find(int update, int row, bool is, bool of_next, Taken& taken) const {
        if (!is) return 0;
        const unsigned count = unsigned(progress.filled) * unsigned(ring.envs);
        const unsigned number = unsigned(update) * unsigned(batch) + unsigned(row);
        const uint4 words = draw(afresh(seed), SAMPLE, number, progress.draws);
        const int index = int(uniform_of(words.x, words.y, count));
        const Window window =
            window_at<STEPS>(index, progress.head, ring.slots, ring.envs, gamma, ring.reward, ring.mark);
        if (of_next) return window.last;
        taken = {ring.mark[index] >> ACTION_SHIFT, window.reward, window.discount, 1.f};
        return index;
    }
};

// What environments are stepped by, where their states are kept between rounds, and where it is written
// how steps went.
struct Acting {
    World world;
    int table_count, steps;
    unsigned long long seed, epsilon_steps;
    float epsilon_start, epsilon_end;
    float* floats;
    int* ints;
    float* reward;
    bool *terminated, *truncated;

    // The action of environment e at a step of the clock, where it explores; else -1.
    __device__ int explored(int e, unsigned long long now) const {
        const uint4 words = draw(afresh(seed), EXPLORE, unsigned(e), now);
        const bool explores =
            unit(words.x) < epsilon_at(now, epsilon_start, epsilon_end, epsilon_steps);
        return explores ? uniform_action<ACTIONS>(words.y) : -1;
    }

    // One environment's step into the ring's slot, and on to the state after it.
    __device__ void step(State& state, int e, int action, unsigned long long now, const Ring& ring,
                         int slot, long long log) const {
        const long long there = (long long)slot * ring.envs + e;
        store_state(state, ring.floats, ring.ints, there);
        float gained = 0.f;
        const int ended = step_env(state, action, draw(afresh(seed), STEP, unsigned(e), now), world.series,
                                   world.series_rows, gained);
        store_state(state, ring.next_floats, ring.next_ints, there);
        ring.reward[there] = gained;
        ring.mark[there] = mark_of(action, ended == 1, ended == 2);
        reward[log] = gained;
        terminated[log] = ended == 1;
        truncated[log] = ended == 2;
        if (ended)
            reset_env(state, draw(afresh(seed), RESET, unsigned(e), now + 1), world.series, world.series_rows);
    }
};

// The whole block: all steps of a round of the environments that are its, 64 a warpgroup at a time. `log`
// is the first step's number in the launch. The weights' place is free.
__device__ inline void act(Tile& tile, const Acting& acting, const Ring& ring, bool has_weights,
                           const Progress& progress, int log) {
    const int tiles = (ring.envs - 1) / ROWS + 1;
    if (blockIdx.x >= tiles) return;
    if (!has_weights) {
        if (thread_index() == 0) copy_image(tile, tile.image);
    } else {
        tile.came ^= 1;  // they came in the phase before
    }
    const Group group;
    Bf16* const rows = tile.inputs + group.index * INPUT;
    float* const y = group.index > 0 ? tile.online : tile.y;
    const World& world = acting.world;
    for (int at = blockIdx.x + group.index * LG_GRID; at < tiles; at += GROUPS * LG_GRID) {
        const int thread = group.thread(), e = at * ROWS + thread;
        const bool owns = thread < ROWS && e < ring.envs;
        State state = {};
        if (owns) state = load_state(acting.floats, acting.ints, e);
#pragma unroll 1
        for (int t = 0; t < acting.steps; ++t) {
            observe_tile<ROWS>(
                group, [&](int r, int c) { return rows + swizzled(ROWS, r, c); }, state, owns,
                world.table, world.series, world.series_rows,
                tile.table_rows + group.index * ROWS);
            const unsigned long long now = progress.clock + t;
            int action = -1;
            if (owns) {
                fetch_ahead(state, world.table, acting.table_count, world.series);
                action = acting.explored(e, now);
            }
            wait_for_copies_but<0>();
            show_to_products();
            group.sync();
            run_chain<0>(tile, Chain{tile, group, rows, y, false, false, false});
            group.sync();
            if (owns) {
                if (action < 0) action = best_action<ACTIONS>(y + thread * LG_OUTPUTS);
                const int slot = int((unsigned(progress.head) + unsigned(t)) % unsigned(ring.slots));
                acting.step(state, e, action, now, ring, slot,
                            (long long)(log + t) * ring.envs + e);
            }
        }
        if (owns) store_state(state, acting.floats, acting.ints, e);
    }
    tile.came ^= 1;
}
