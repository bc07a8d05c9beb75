// A row's part of DQN's loss, and the target's way after the parameters. Twin of the scalar steps of
// ops/dqn/dqn_update.py.
#pragma once
#include "action_values.cuh"

constexpr int ACTIONS = LG_ACTIONS;
constexpr bool DUELS = LG_HEADS == ACTIONS + 1;
static_assert(LG_HEADS == ACTIONS || DUELS, "action values, or advantages and a value");

constexpr int LOSS_SUMS = 4;  // statistics that are sums over rows, in the order of STATISTICS

// The reward and what the next state's best action is worth by the target's outputs `held`.
__device__ inline float goal_of_row(const float* held, int best, float reward, float discount) {
    // Select, not multiply: a value that nothing counts for may be infinite.
    if (discount == 0.f) return reward;
    return reward + discount * (held[best] + value_offset<ACTIONS, DUELS>(held));
}

// Replaces a row's outputs by the gradient of its loss; gives its error and adds to the sums.
__device__ inline float loss_of_row(float* y, int action, float goal, float weight, float share,
                                    float delta, float (&sums)[LOSS_SUMS]) {
    const float value = y[action] + value_offset<ACTIONS, DUELS>(y), error = value - goal;
    const float size = fabsf(error);
    const bool linear = delta > 0.f && size > delta;
    const float loss = weight * (linear ? delta * (size - 0.5f * delta) : 0.5f * error * error);
    const bool finite = loss - loss == 0.f;
    // Huber's slope is finite even where the error is not: NaN reaches the norm, and nothing changes.
    const float slope =
        finite ? weight * (linear ? copysignf(delta, error) : error) * share : nan_f32();
    const float others = DUELS ? -(slope / float(ACTIONS)) : 0.f;
    for (int a = 0; a < ACTIONS; ++a) y[a] = a == action ? others + slope : others;
    if (DUELS) y[ACTIONS] = slope;
    sums[0] += loss;
    sums[1] += value;
    sums[2] += goal;
    sums[3] += finite ? 0.f : 1.f;
    return error;
}

// What is left of the sums: means, and the count of rows that are not finite.
__device__ inline float statistic(int k, float total, int batch) {
    return k == LOSS_SUMS - 1 ? total : total / float(max(batch, 1));
}

// An element of the target after its move; a copy is exact.
__device__ inline float moved_target(float target, float parameter, float tau) {
    const float far = target + tau * (parameter - target);
    return tau == 1.f ? parameter : far;
}
