// Kernel of rollout.py: T steps of LG_ROWS environments a team (team.cuh), in one launch. A thread of
// the team's first LG_ROWS owns an environment and keeps its state in registers for the whole rollout;
// all of its threads together copy table rows into the tile, as 16-byte pieces of adjacent lanes, and
// run the network over it. Where the weights fit, a block stages them once and all steps read them in
// shared memory (tile_layers.cuh); else every step reads them from L2 (mlp_tile.cuh), and a block is
// one team. Trajectories are time-major, so neighbouring environments write neighbouring elements.
#include "draws.cuh"
#include "mlp_rows.cuh"
#include "observe_tile.cuh"
#if LG_RESIDENT
#include "rollout_tile.cuh"
#else
#include "mlp_tile.cuh"
#endif

constexpr int ACTIONS = LG_ACTIONS;
static_assert(LG_INPUTS == WIDTH && LG_HEADS == ACTIONS + 1, "the network is the env's");

#if LG_RESIDENT
struct Policy : Tile {
    using Tile::Tile;

    // Barriers before and after: rows written and y read by any thread of the team need none.
    __device__ void operator()(const float* __restrict__ parameters) const {
        team.sync();
        forward_from<0>(*this, parameters);
    }
};
#else
constexpr int ROWS = LG_ROWS;
static_assert(THREADS == MLP_THREADS && TEAMS == 1, "mlp_tile.cuh is for a block");

struct Policy {
    static constexpr int NBYTES = MlpTile<ROWS>::NBYTES;
    const Team team;
    const MlpTile<ROWS> rows;
    float* const y;

    __device__ explicit Policy(uint4* memory) : rows(memory), y(rows.y) {}
    __device__ void operator()(const float* __restrict__ parameters) const {
        mlp_tile_forward(rows, parameters, nullptr, ROWS);
    }
};
#endif
static_assert(Policy::NBYTES == LG_BLOCK_NBYTES, "rollout_tile.py counts the same shared memory");

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, LG_BLOCKS_A_SM)
    rollout_kernel(const float* __restrict__ parameters, float* floats, int* ints,
                   const unsigned long long* clock, const Real* __restrict__ table,
                   const float* __restrict__ series, int rows, unsigned long long seed, int envs,
                   int steps, float* state_floats, int* state_ints, int* actions,
                   float* log_probabilities, float* values, float* rewards, bool* terminated,
                   bool* truncated, float* final_values, float* last_values) {
    extern __shared__ uint4 memory[];
    __shared__ int table_rows[TEAMS][ROWS];
    const Policy policy(memory);
    const Team& team = policy.team;
#if LG_RESIDENT
    stage<0, LAYER_COUNT>(policy, parameters);
    __syncthreads();
#endif
    const long long first = ((long long)blockIdx.x * TEAMS + team.index) * ROWS;
    if (first >= envs) return;  // a whole team leaves: only its own barriers follow
    const long long e = first + team.thread();
    const bool owns = team.thread() < ROWS && e < envs;
    const float* const y = policy.y + team.thread() * LG_OUTPUTS;
    State state = {};
    if (owns) state = load_state(floats, ints, e);
    const unsigned long long start = *clock;
    int t = 0, ended = 0;
    // Whether the policy runs a second time in a step: for V of the states truncated episodes led to.
    bool again = false;
    while (true) {
        observe_tile<ROWS>(team, policy.rows.input, policy.rows.INPUT, state, owns, table, series,
                           rows, table_rows[team.index]);
        wait_for_copies_but<0>();
        policy(parameters);
        const long long at = (long long)t * envs + e;
        const unsigned long long now = start + t;
        if (!again) {
            if (t == steps) break;
            if (owns) {
                store_state(state, state_floats, state_ints, at);
#if LG_GREEDY
                Action chosen = greedy(y, ACTIONS);
#else
                Action chosen = categorical(y, ACTIONS, unit(draw(seed, ACTION, unsigned(e), now).x));
#endif
                chosen.action = max(chosen.action, 0);
                float reward = 0.f;
                ended = step_env(state, chosen.action, draw(seed, STEP, unsigned(e), now), series,
                                 rows, reward);
                actions[at] = chosen.action;
                log_probabilities[at] = chosen.log_probability;
                values[at] = y[ACTIONS];
                rewards[at] = reward;
                terminated[at] = ended == 1;
                truncated[at] = ended == 2;
            }
            again = team.sync_or(ended == 2);
            if (again) continue;
        }
        again = false;
        if (owns) {
            final_values[at] = ended == 2 ? y[ACTIONS] : 0.f;
            if (ended) reset_env(state, draw(seed, RESET, unsigned(e), now + 1), series, rows);
        }
        ++t;
    }
    if (owns) {
        last_values[e] = y[ACTIONS];
        store_state(state, floats, ints, e);
    }
}

// One thread, after every block of the rollout has read the clock.
extern "C" __global__ void advance_clock(unsigned long long* clock, int steps) {
    if (threadIdx.x == 0) *clock += steps;
}
