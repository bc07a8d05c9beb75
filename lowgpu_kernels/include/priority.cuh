// The tree of priorities. Twin of ops/replay/tree.py, which says how it lies and why it is integers.
#pragma once
#include "maths.cuh"

constexpr int FAN = 32, TOP = 1024;
constexpr float UNITS_PER_ONE = 1048576.f, UNIT = 1.f / 1048576.f;
constexpr float LARGEST_PRIORITY = 4095.999755859375f;

// A leaf in units: exact, since leaves are whole units below 2^32.
__host__ __device__ inline unsigned units_of(float priority) { return unsigned(priority * UNITS_PER_ONE); }

// A positive priority as a leaf: rounded down to units, at least one; NaN is the largest.
__host__ __device__ inline float whole_units(float priority) {
    if (!(priority < LARGEST_PRIORITY)) return LARGEST_PRIORITY;
    const float whole = float(unsigned(priority * UNITS_PER_ONE)) * UNIT;
    return whole > UNIT ? whole : UNIT;
}

// The leaf of a temporal-difference error: (|error| + eps)^alpha.
__host__ __device__ inline float priority_of(float error, float alpha, float eps) {
    return whole_units(exp_f32(alpha * log_f32((error < 0.f ? -error : error) + eps)));
}

__host__ __device__ inline unsigned long long high_product(unsigned long long a, unsigned long long b) {
#ifdef __CUDACC__
    return __umul64hi(a, b);
#else
    return (unsigned long long)((unsigned __int128)a * b >> 64);
#endif
}

// Where row's draw falls in [0, total): within its own of the strata, `stride` / 2^64 of it each.
__host__ __device__ inline unsigned long long target_of(unsigned row, unsigned high, unsigned low,
                                                        unsigned long long stride,
                                                        unsigned long long total) {
    const unsigned long long word = (unsigned long long)high << 32 | low;
    return high_product(row * stride + high_product(word, stride), total);
}

// The importance weight of a drawn leaf over the largest of its batch.
__host__ __device__ inline float weight_of(float drawn, float least, float beta) {
    return exp_f32(beta * log_f32(least / drawn));
}

// Where the levels of sums start, lowest first, and how many entries the highest has.
template <int LEVELS>
struct Levels {
    int at[LEVELS], top;

    // `groups` is the number of leaves over FAN.
    __host__ __device__ explicit Levels(int groups) {
        at[0] = 0;
        top = groups;
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int l = 1; l < LEVELS; ++l) {
            top = (top + FAN - 1) / FAN;
            at[l] = at[l - 1] + top * FAN;
        }
    }
};
