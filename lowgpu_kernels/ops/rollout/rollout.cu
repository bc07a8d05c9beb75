// Kernel of rollout.py: T steps of LG_ROWS environments a block, in one launch. A thread of the first
// LG_ROWS owns an environment and keeps its state in registers for the whole rollout; all threads
// together copy table rows into the tile, as 16-byte pieces of adjacent lanes, and run the network
// over it (mlp_tile.cuh). Trajectories are time-major, so neighbouring environments write
// neighbouring elements.
#include "draws.cuh"
#include "env.cuh"
#include "mlp_tile.cuh"
#include "observe_tile.cuh"

constexpr int ROWS = LG_ROWS, ACTIONS = LG_ACTIONS;
static_assert(MlpTile<ROWS>::NBYTES == LG_TILE_NBYTES, "tile.py counts the same shared memory");
static_assert(LG_INPUTS == WIDTH && LG_HEADS == ACTIONS + 1, "the network is the env's");

// What the block is working on: the first of its environments, and how many it has.
struct Block {
    long long first;
    int count;
    __device__ bool owns() const { return threadIdx.x < count; }
};

extern "C" __global__ void __launch_bounds__(MLP_THREADS)
    rollout_kernel(const float* __restrict__ parameters, float* floats, int* ints,
                   const unsigned long long* clock, const Real* __restrict__ table,
                   const float* __restrict__ series, int rows, unsigned long long seed, int envs,
                   int steps, float* state_floats, int* state_ints, int* actions,
                   float* log_probabilities, float* values, float* rewards, bool* terminated,
                   bool* truncated, float* final_values, float* last_values) {
    extern __shared__ uint4 memory[];
    __shared__ long long table_rows[ROWS];
    const MlpTile<ROWS> tile(memory);
    const long long first = (long long)blockIdx.x * ROWS;
    const Block block{first, int(min((long long)ROWS, envs - first))};
    const long long e = first + threadIdx.x;
    const float* const y = tile.y + threadIdx.x * LG_OUTPUTS;
    State state = {};
    if (block.owns()) state = load_state(floats, ints, e);
    const auto run_policy = [&] {
        observe_tile<ROWS, MLP_THREADS>(tile.input, tile.INPUT, state, block.owns(), table, series, rows,
                                        table_rows);
        wait_for_copies_but<0>();
        mlp_tile_forward(tile, parameters, nullptr, block.count);
    };
    const unsigned long long start = *clock;
    for (int t = 0; t < steps; ++t) {
        run_policy();
        const long long at = (long long)t * envs + e;
        const unsigned long long now = start + t;
        int ended = 0;
        if (block.owns()) {
            store_state(state, state_floats, state_ints, at);
#if LG_GREEDY
            Action chosen = greedy(y, ACTIONS);
#else
            Action chosen = categorical(y, ACTIONS, unit(draw(seed, ACTION, unsigned(e), now).x));
#endif
            chosen.action = max(chosen.action, 0);
            float reward = 0.f;
            ended = step_env(state, chosen.action, draw(seed, STEP, unsigned(e), now), series, rows, reward);
            actions[at] = chosen.action;
            log_probabilities[at] = chosen.log_probability;
            values[at] = y[ACTIONS];
            rewards[at] = reward;
            terminated[at] = ended == 1;
            truncated[at] = ended == 2;
        }
        // Every thread has read its y before the policy runs again.
        const bool any_limit = __syncthreads_or(ended == 2);
        if (any_limit) run_policy();  // for V of the states that truncated episodes led to
        if (block.owns()) {
            final_values[at] = ended == 2 ? y[ACTIONS] : 0.f;
            if (ended) reset_env(state, draw(seed, RESET, unsigned(e), now + 1), series, rows);
        }
    }
    run_policy();
    if (block.owns()) {
        last_values[e] = y[ACTIONS];
        store_state(state, floats, ints, e);
    }
}

// One thread, after every block of the rollout has read the clock.
extern "C" __global__ void advance_clock(unsigned long long* clock, int steps) {
    if (threadIdx.x == 0) *clock += steps;
}
