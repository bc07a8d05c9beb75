// An env's state in registers, and its linked functions with C++ types. A file that includes this is
// compiled with linked.env_macros(env) and linked.env_links(env), which declare the functions.
#pragma once
#include "philox.cuh"

constexpr int STATE_FLOATS = LG_FLOATS, STATE_INTS = LG_INTS;
constexpr int OBSERVATION = LG_OBSERVATION, WIDTH = LG_WIDTH, TABLE_COLUMNS = LG_TABLE_COLUMNS;
static_assert(WIDTH % 8 == 0 && OBSERVATION <= WIDTH, "rows are whole 16-byte vectors");
static_assert(TABLE_COLUMNS <= OBSERVATION, "the table's columns lead the observation");

struct State {
    float floats[STATE_FLOATS];
    int ints[STATE_INTS];
};

__device__ inline State load_state(const float* floats, const int* ints, long long at) {
    State state;
#pragma unroll
    for (int i = 0; i < STATE_FLOATS; ++i) state.floats[i] = floats[at * STATE_FLOATS + i];
#pragma unroll
    for (int i = 0; i < STATE_INTS; ++i) state.ints[i] = ints[at * STATE_INTS + i];
    return state;
}

__device__ inline void store_state(const State& state, float* floats, int* ints, long long at) {
#pragma unroll
    for (int i = 0; i < STATE_FLOATS; ++i) floats[at * STATE_FLOATS + i] = state.floats[i];
#pragma unroll
    for (int i = 0; i < STATE_INTS; ++i) ints[at * STATE_INTS + i] = state.ints[i];
}

struct Units {
    float u[4];
};

// The four unit floats an env function is given, of the four words drawn for it.
__device__ inline Units units(uint4 words) {
    return {{unit(words.x), unit(words.y), unit(words.z), unit(words.w)}};
}

// The linked functions take plain pointers; none of them writes to `series`.
__device__ inline void reset_env(State& state, uint4 words, const float* series, int rows) {
    Units given = units(words);
    env_reset(state.floats, state.ints, given.u, const_cast<float*>(series), rows);
}

// 0, 1 (terminated) or 2 (truncated).
__device__ inline int step_env(State& state, int action, uint4 words, const float* series, int rows,
                               float& reward) {
    Units given = units(words);
    return env_step(state.floats, state.ints, action, given.u, const_cast<float*>(series), rows, &reward);
}

// Writes columns [TABLE_COLUMNS, OBSERVATION) of the observation to `out` and the places after it.
__device__ inline void observe_env(State state, const float* series, int rows, float* out) {
    env_observe(state.floats, state.ints, const_cast<float*>(series), rows, out);
}

#if LG_TABLE_COLUMNS > 0
__device__ inline int table_row(State state) { return env_table_row(state.floats, state.ints); }
#endif
