// Kernel of rollout.py: T steps of LG_ROWS environments a team (team.cuh), in one launch. A thread of
// the team's first LG_ROWS owns an environment and keeps its state in registers for the whole rollout;
// all of its threads together copy table rows into the tile, as 16-byte pieces of adjacent lanes, and
// run the network over it. Where the weights fit, a block stages them once and all steps read them in
// shared memory, by the tensor cores' instructions for whole warpgroups (warpgroup_layers.cuh) or for
// warps (tile_layers.cuh); else every step reads them from L2 (mlp_tile.cuh), and a block is one team.
// Trajectories are time-major, so neighbouring environments write neighbouring elements.
//
// A step is a chain: observe, multiply layer after layer, draw, step the environment. What it does not
// wait for, random words, stores and a logarithm, is done while the copies of an observation are under
// way.
#include "rollout_action.cuh"
#include "rollout_policy.cuh"

constexpr int ACTIONS = LG_ACTIONS;
static_assert(LG_HEADS == ACTIONS + 1, "logits and a value");

// What came of a step.
struct Outcome {
    Choice choice;
    int action;
    float value, reward;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, LG_BLOCKS_A_SM)
    rollout_kernel(const float* __restrict__ parameters, float* floats, int* ints,
                   const unsigned long long* clock, const Real* __restrict__ table, int table_count,
                   const float* __restrict__ series, int rows, unsigned long long seed, int envs,
                   int steps, float* state_floats, int* state_ints, int* actions,
                   float* log_probabilities, float* values, float* rewards, bool* terminated,
                   bool* truncated, float* final_values, float* last_values) {
    extern __shared__ __align__(1024) uint4 memory[];
    const Policy policy(memory);
    const Team& team = policy.team;
    int* const table_rows =
        reinterpret_cast<int*>(memory) + Policy::NBYTES / int(sizeof(int)) + team.index * ROWS;
    policy.prepare(parameters);
    const long long first = ((long long)blockIdx.x * TEAMS + team.index) * ROWS;
    if (first >= envs) return;  // a whole team leaves: only its own barriers follow
    const long long e = first + team.thread();
    const bool owns = team.thread() < ROWS && e < envs;
    const float* const y = policy.y + team.thread() * LG_OUTPUTS;
    State state = {};
    if (owns) state = load_state(floats, ints, e);
    const unsigned long long start = *clock;
    Outcome outcome = {};  // of step t - 1, as is `ended`
    int t = 0, ended = 0;
    // Whether the policy ran a second time before step t, for V of the states that truncated episodes
    // led to.
    bool again = false;
    while (true) {
        observe_tile<ROWS>(
            team, [&](int r, int c) { return policy.place(r, c); }, state, owns, table, series, rows,
            table_rows);
        const long long at = (long long)t * envs + e;
        const unsigned long long now = start + t, key = policy.afresh(seed);
        uint4 for_step = {};
        unsigned for_action = 0;
        if (owns) {
#if LG_WARPGROUPS
            fetch_ahead(state, table, table_count, series);
#endif
            if (t > 0 && !again) {
                const long long before = at - envs;
                actions[before] = outcome.action;
                log_probabilities[before] = outcome.choice.below - log_f32(outcome.choice.total);
                values[before] = outcome.value;
                rewards[before] = outcome.reward;
                terminated[before] = ended == 1;
                truncated[before] = ended == 2;
                final_values[before] = 0.f;
            }
            if (t < steps && ended != 2) store_state(state, state_floats, state_ints, at);
            for_step = draw(key, STEP, unsigned(e), now);
            if (!LG_GREEDY) for_action = draw(key, ACTION, unsigned(e), now).x;
        }
        const Policy& multiplies = policy.afresh(memory);
        wait_for_copies_but<0>();
        policy.show();
        again = team.sync_or(ended == 2);
        multiplies(parameters);
        if (again) {
            if (ended == 2) {
                final_values[at - envs] = y[ACTIONS];
                reset_env(state, draw(key, RESET, unsigned(e), now), series, rows);
            }
            ended = 0;
            continue;
        }
        if (t == steps) break;
        if (owns) {
            const Choice choice = choose<ACTIONS, LG_GREEDY>(y, unit(for_action));
            outcome = {choice, max(choice.action, 0), y[ACTIONS], 0.f};
            ended = step_env(state, outcome.action, for_step, series, rows, outcome.reward);
            if (ended == 1)
                reset_env(state, draw(key, RESET, unsigned(e), now + 1), series, rows);
        }
        ++t;
    }
    if (owns) {
        last_values[e] = y[ACTIONS];
        store_state(state, floats, ints, e);
    }
}
