// The clipped PPO loss of one row, and its gradient. Twin of the scalar steps of ops/ppo/ppo_loss.py.
#pragma once
#include "maths.cuh"

constexpr int LOSS_SUMS = 7;  // statistics that are sums over rows, in the order of STATISTICS

// What the rollout knows of a row's transition; `gain` is its advantage, normalised or not.
struct Taken {
    int action;
    float log_probability, value, gain, returns;
};

struct LossWeights {
    float clip, value_clip, value_weight, entropy_weight;
};

struct Term {
    float loss, slope;
};

// Policy loss of a row, and d loss / d ratio.
__host__ __device__ inline Term policy_term(float ratio, float gain, float clip) {
    const float low = 1.f - clip, high = 1.f + clip;
    const float nearest = ratio < low ? low : ratio > high ? high : ratio;
    const float unclipped = -ratio * gain, clipped = -nearest * gain;
    const bool whole = nearest == ratio || unclipped > clipped, even = unclipped == clipped;
    const float at_edge = clipped > unclipped ? clipped : nan_f32();
    // Chosen last, and not by leaving early: lanes stay together.
    return {whole || even ? unclipped : at_edge,
            whole ? -gain : even ? -0.5f * gain : clipped > unclipped ? 0.f : nan_f32()};
}

// Value loss of a row, and d loss / d v.
__host__ __device__ inline Term value_term(float v, float old, float target, float value_clip) {
    const float error = v - target, moved = v - old;
    const float square = error * error;
    const float nearest = moved < -value_clip ? -value_clip : moved > value_clip ? value_clip : moved;
    const float clipped_error = old + nearest - target;
    const float clipped_square = clipped_error * clipped_error;
    const bool whole = value_clip == 0.f || nearest == moved || square > clipped_square;
    const bool even = square == clipped_square, over = clipped_square > square;
    return {whole || even ? 0.5f * square : over ? 0.5f * clipped_square : nan_f32(),
            whole ? error : even ? 0.5f * error : over ? 0.f : nan_f32()};
}

// Replaces ACTIONS logits and the value after them by the gradient of the loss, which counts `share`
// of the row; adds what the row adds to each of the sums.
template <int ACTIONS>
__host__ __device__ inline void loss_of_row(float* y, const Taken& taken, const LossWeights& weights,
                                            float share, float (&sums)[LOSS_SUMS]) {
    float peak = y[0];
    for (int j = 1; j < ACTIONS; ++j)
        if (y[j] > peak) peak = y[j];
    float total = 0.f, weighted = 0.f;
    for (int j = 0; j < ACTIONS; ++j) {
        const float score = y[j] - peak, weight = exp_f32(score);
        total += weight;
        // The score of a masked action is -inf, and 0 * -inf is NaN.
        if (weight > 0.f) weighted += weight * score;
    }
    const float log_total = log_f32(total), entropy = log_total - weighted / total;
    const float log_ratio = y[taken.action] - peak - log_total - taken.log_probability;
    const float ratio = exp_f32(log_ratio);
    const Term policy = policy_term(ratio, taken.gain, weights.clip);
    const Term value = value_term(y[ACTIONS], taken.value, taken.returns, weights.value_clip);
    // Select, not multiply: a clipped ratio may be infinite.
    const float push = policy.slope == 0.f ? 0.f : policy.slope * ratio * share;
    for (int j = 0; j < ACTIONS; ++j) {
        const float log_p = y[j] - peak - log_total, p = exp_f32(log_p);
        const float chosen = j == taken.action ? 1.f : 0.f;
        y[j] = log_p == -infinity_f32()
                   ? 0.f
                   : push * (chosen - p) + weights.entropy_weight * share * p * (log_p + entropy);
    }
    y[ACTIONS] = weights.value_weight * value.slope * share;
    const float loss =
        policy.loss + weights.value_weight * value.loss - weights.entropy_weight * entropy;
    sums[0] += policy.loss;
    sums[1] += value.loss;
    sums[2] += entropy;
    sums[3] += ratio - 1.f - log_ratio;
    sums[4] += 1.f - weights.clip <= ratio && ratio <= 1.f + weights.clip ? 0.f : 1.f;
    sums[5] += ratio;
    sums[6] += loss - loss == 0.f ? 0.f : 1.f;
}
