// Samples made of random words: a pair of normals, an action. Twin of device/draws.py.
#pragma once
#include "maths.cuh"
#include "philox.cuh"

struct Action {
    int action;  // -1 where the logits have no softmax; the other two are then NaN
    float log_probability;
    float entropy;  // nats
};

// What is needed of a softmax; `largest` is NaN where there is none: a NaN, a +inf, or all -inf.
struct Softmax {
    float largest, total, entropy;
};

// Two independent standard normals, at most 5.77 in size (Box & Muller 1958).
__host__ __device__ inline float2 normal_pair(unsigned a, unsigned b) {
    const float radius = sqrtf(-2.f * log_f32(1.f - unit(a)));
    const float angle = 6.283185307179586f * unit(b);
    return make_float2(radius * cos_f32(angle), radius * sin_f32(angle));
}

__host__ __device__ inline Softmax softmax(const float* logits, int actions) {
    float largest = -infinity_f32();
    bool valid = true;
    for (int a = 0; a < actions; ++a) {
        const float logit = logits[a];
        // Written so that NaN, which compares false, is refused as well.
        valid = valid && logit < infinity_f32();
        if (logit > largest) largest = logit;
    }
    if (!valid || largest == -infinity_f32()) return {nan_f32(), nan_f32(), nan_f32()};
    float total = 0.f, weighted = 0.f;
    for (int a = 0; a < actions; ++a) {
        const float below = logits[a] - largest;
        const float weight = exp_f32(below);
        // A weight of zero has below = -inf or nearly: 0 * -inf would be NaN.
        if (weight > 0.f) {
            total += weight;
            weighted += weight * below;
        }
    }
    return {largest, total, log_f32(total) - weighted / total};
}

// An action drawn from softmax(logits) by u in [0, 1): the first whose cumulative probability
// exceeds u, or the last that can occur where rounding leaves u past the last edge.
__host__ __device__ inline Action categorical(const float* logits, int actions, float u) {
    const Softmax row = softmax(logits, actions);
    if (row.largest != row.largest) return {-1, nan_f32(), nan_f32()};
    const float target = u * row.total;
    float reached = 0.f;
    int chosen = -1;
    for (int a = 0; a < actions; ++a) {
        if (reached <= target) {
            const float weight = exp_f32(logits[a] - row.largest);
            if (weight > 0.f) {
                reached += weight;
                chosen = a;
            }
        }
    }
    return {chosen, (logits[chosen] - row.largest) - log_f32(row.total), row.entropy};
}

// The first action of the largest logit.
__host__ __device__ inline Action greedy(const float* logits, int actions) {
    const Softmax row = softmax(logits, actions);
    if (row.largest != row.largest) return {-1, nan_f32(), nan_f32()};
    int chosen = actions - 1;
    for (int a = actions - 1; a >= 0; --a)
        if (logits[a] == row.largest) chosen = a;
    return {chosen, -log_f32(row.total), row.entropy};
}
