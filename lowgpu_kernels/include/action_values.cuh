// Action values in a network's output row: those of ACTIONS actions, or as many advantages and then the
// state's value. Twin of ops/dqn/action_values.py.
#pragma once
#include "maths.cuh"

// The first action of the largest value, which a NaN never is; 0 where none is above -inf.
template <int ACTIONS>
__device__ inline int best_action(const float* values) {
    int best = 0;
    float largest = -infinity_f32();
#pragma unroll 8
    for (int a = 0; a < ACTIONS; ++a) {
        const bool better = values[a] > largest;
        best = better ? a : best;
        largest = better ? values[a] : largest;
    }
    return best;
}

// What is added to values[a] to make it the value of action a.
template <int ACTIONS, bool DUELS>
__device__ inline float value_offset(const float* values) {
    if constexpr (!DUELS) return 0.f;
    float total = 0.f;
#pragma unroll 8
    for (int a = 0; a < ACTIONS; ++a) total += values[a];
    return values[ACTIONS] - total / float(ACTIONS);
}
