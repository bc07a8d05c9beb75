// Kernel of experience.py: T steps of LG_ROWS environments a team (team.cuh), in one launch. A thread of
// the team's first LG_ROWS owns an environment and keeps its state in registers throughout; all of the
// team's threads copy table rows into the tile, as 16-byte pieces of adjacent lanes, and run the network
// over it (rollout_policy.cuh). Arrays are time-major, so neighbouring environments write neighbouring
// elements.
//
// A step is a chain: observe, multiply layer after layer, step the environment. What it does not wait
// for, random words, epsilon and stores, is done while the copies of an observation are under way.
#include "action_values.cuh"
#include "explore.cuh"
#include "rollout_policy.cuh"

constexpr int ACTIONS = LG_ACTIONS;
static_assert(LG_HEADS == ACTIONS || LG_HEADS == ACTIONS + 1, "action values, or advantages and a value");

// What came of a step.
struct Outcome {
    int action, ended;
    float reward;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, LG_BLOCKS_A_SM)
    experience_kernel(const float* __restrict__ parameters, float* floats, int* ints,
                      const unsigned long long* clock, const Real* __restrict__ table, int table_count,
                      const float* __restrict__ series, int rows, unsigned long long seed, int envs,
                      int steps, float epsilon_start, float epsilon_end,
                      unsigned long long epsilon_steps, float* state_floats, int* state_ints,
                      int* actions, float* rewards, bool* terminated, bool* truncated,
                      float* next_floats, int* next_ints) {
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
    Outcome outcome = {};
    // Where a step ended an episode, what it led to was stored before the reset.
    const auto report = [&](long long at) {
        actions[at] = outcome.action;
        rewards[at] = outcome.reward;
        terminated[at] = outcome.ended == 1;
        truncated[at] = outcome.ended == 2;
        if (!outcome.ended) store_state(state, next_floats, next_ints, at);
    };
    for (int t = 0; t < steps; ++t) {
        observe_tile<ROWS>(
            team, [&](int r, int c) { return policy.place(r, c); }, state, owns, table, series, rows,
            table_rows);
        const long long at = (long long)t * envs + e;
        const unsigned long long now = start + t, key = policy.afresh(seed);
        uint4 for_step = {};
        int explored = -1;  // the uniform action, where it is to be taken
        if (owns) {
#if LG_WARPGROUPS
            fetch_ahead(state, table, table_count, series);
#endif
            if (t > 0) report(at - envs);
            store_state(state, state_floats, state_ints, at);
            for_step = draw(key, STEP, unsigned(e), now);
            const uint4 words = draw(key, EXPLORE, unsigned(e), now);
            if (unit(words.x) < epsilon_at(now, epsilon_start, epsilon_end, epsilon_steps))
                explored = uniform_action<ACTIONS>(words.y);
        }
        const Policy& multiplies = policy.afresh(memory);
        wait_for_copies_but<0>();
        policy.show();
        team.sync();
        multiplies(parameters);
        if (owns) {
            outcome = {explored < 0 ? best_action<ACTIONS>(y) : explored, 0, 0.f};
            outcome.ended = step_env(state, outcome.action, for_step, series, rows, outcome.reward);
            if (outcome.ended) {
                store_state(state, next_floats, next_ints, at);
                reset_env(state, draw(key, RESET, unsigned(e), now + 1), series, rows);
            }
        }
    }
    if (owns) {
        if (steps > 0) report((long long)(steps - 1) * envs + e);
        store_state(state, floats, ints, e);
    }
}
