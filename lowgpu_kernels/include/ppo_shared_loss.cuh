// The clipped PPO loss of one row, and its gradient, by LANES neighbouring lanes of a warp: what
// loss_of_row of ppo_terms.cuh gives, by the GPU's own exponential and logarithm. Every lane of the warp
// must come.
#pragma once
#include "ppo_terms.cuh"
#include "tft_maths.cuh"
#include "warp.cuh"

// Within 2^-22 for x from 1/2 to 2, and of the result elsewhere.
__device__ inline float logarithm(float x) {
#ifdef __CUDACC__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.69314718055994531f;
#else
    return logf(x);
#endif
}

template <int LANES>
__device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int gap = 1; gap < LANES; gap *= 2) x += __shfl_xor_sync(ALL_LANES, x, gap);
    return x;
}

// Replaces ACTIONS logits and the value after them by the gradient of the loss, which counts `share` of
// the row; adds what the row adds to each of the sums, in every one of its lanes. A row that does not
// count, of action -1, gets zeros. Every LANES-th action is a lane's.
template <int ACTIONS, int LANES>
__device__ inline void loss_of_shared_row(float* y, const Taken& taken, const LossWeights& weights,
                                          float share, int lane, float (&sums)[LOSS_SUMS]) {
    constexpr int EACH = (ACTIONS + LANES - 1) / LANES;
    const bool counts = taken.action >= 0;
    const float v = y[ACTIONS], of_taken = y[counts ? taken.action : 0];
    float score[EACH], weight[EACH], peak = -infinity_f32();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int j = lane + i * LANES;
        score[i] = j < ACTIONS ? y[j] : -infinity_f32();
        peak = score[i] > peak ? score[i] : peak;
    }
#pragma unroll
    for (int gap = 1; gap < LANES; gap *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, peak, gap);
        peak = other > peak ? other : peak;
    }
    float total = 0.f, weighted = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        score[i] = score[i] - peak;
        weight[i] = exponential(score[i]);
        total += weight[i];
        // The score of a masked action is -inf, and 0 * -inf is NaN.
        weighted += weight[i] > 0.f ? weight[i] * score[i] : 0.f;
    }
    total = sum_of_lanes<LANES>(total);
    weighted = sum_of_lanes<LANES>(weighted);
    const float log_total = logarithm(total), inverse = reciprocal(total);
    const float entropy = log_total - weighted * inverse;
    const float log_ratio = of_taken - peak - log_total - taken.log_probability;
    const float ratio = exponential(log_ratio);
    const Term policy = policy_term(ratio, taken.gain, weights.clip);
    const Term value = value_term(v, taken.value, taken.returns, weights.value_clip);
    // Select, not multiply: a clipped ratio may be infinite.
    const float push = policy.slope == 0.f ? 0.f : policy.slope * ratio * share;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int j = lane + i * LANES;
        const float log_p = score[i] - log_total, p = weight[i] * inverse;
        const float chosen = j == taken.action ? 1.f : 0.f;
        const float by_logit = push * (chosen - p) + weights.entropy_weight * share * p * (log_p + entropy);
        if (j < ACTIONS) y[j] = !counts || log_p == -infinity_f32() ? 0.f : by_logit;
    }
    if (lane == LANES - 1) y[ACTIONS] = counts ? weights.value_weight * value.slope * share : 0.f;
    const float loss =
        policy.loss + weights.value_weight * value.loss - weights.entropy_weight * entropy;
    const float inside = 1.f - weights.clip <= ratio && ratio <= 1.f + weights.clip ? 0.f : 1.f;
    const float of_row[LOSS_SUMS] = {policy.loss, value.loss, entropy, ratio - 1.f - log_ratio,
                                     inside,      ratio,      loss - loss == 0.f ? 0.f : 1.f};
#pragma unroll
    for (int k = 0; k < LOSS_SUMS; ++k) sums[k] += counts ? of_row[k] : 0.f;
}
