// The same actions and log-probabilities as draws.cuh gives, of few actions sooner: all exponentials are
// worked out at once and but once, and the logarithm can wait until the environment has been stepped.
#pragma once
#include "draws.cuh"

struct Choice {
    int action;          // -1 where the logits have no softmax; the other two are then NaN
    float below, total;  // of the log-probability, which is below - log_f32(total)
};

// The action that `u` draws from softmax(logits), or the first of the largest logit.
template <int ACTIONS, bool GREEDY>
__host__ __device__ inline Choice choose(const float* logits, float u) {
    if constexpr (ACTIONS > 16) {  // more than registers can hold
        const Action chosen = GREEDY ? greedy(logits, ACTIONS) : categorical(logits, ACTIONS, u);
        return {chosen.action, chosen.log_probability, 1.f};
    }
    float largest = -infinity_f32(), below[ACTIONS], weights[ACTIONS], total = 0.f;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int a = 0; a < ACTIONS; ++a) largest = logits[a] > largest ? logits[a] : largest;
    // A NaN, a +inf, or all -inf: each makes a difference NaN, and so the total.
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int a = 0; a < ACTIONS; ++a) {
        below[a] = logits[a] - largest;
        weights[a] = exp_f32(below[a]);
        total += weights[a];
    }
    const float target = u * total;
    float reached = 0.f;
    Choice choice = {-1, nan_f32(), total};
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int a = 0; a < ACTIONS; ++a) {
        const bool taken = GREEDY ? total == total && choice.action < 0 && logits[a] == largest
                                  : reached <= target && weights[a] > 0.f;
        reached += taken ? weights[a] : 0.f;
        choice.action = taken ? a : choice.action;
        choice.below = taken ? below[a] : choice.below;
    }
    return choice;
}
