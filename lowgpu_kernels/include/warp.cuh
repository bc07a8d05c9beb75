// Reductions across the 32 lanes of a warp, in an order that never changes. Every lane must be
// active; every lane gets the result.
#pragma once

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP_LANES = 32;

// The warp's number in a one-dimensional block, from its first lane, so that the compiler sees that
// the lanes agree on it and on every branch it decides.
__device__ inline int warp_index() { return __shfl_sync(ALL_LANES, int(threadIdx.x) / WARP_LANES, 0); }

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int gap = WARP_LANES / 2; gap > 0; gap /= 2) x += __shfl_xor_sync(ALL_LANES, x, gap);
    return x;
}

// fmaxf would drop a NaN: here one lane's NaN is everybody's.
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int gap = WARP_LANES / 2; gap > 0; gap /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, gap);
        x = x > other || x != x ? x : other;
    }
    return x;
}
