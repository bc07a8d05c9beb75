// Reductions across a block, in an order that never changes: warps by shuffles, then the warps'
// results one after the other. Blocks are whole warps, one-dimensional; every thread calls and every
// thread gets the results. `shared` holds VALUES floats a warp and is free again on return.
#pragma once
#include "warp.cuh"

template <int VALUES>
__device__ inline void block_sum(float (&values)[VALUES], float* shared) {
    const int warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        values[i] = warp_sum(values[i]);
        if (threadIdx.x % WARP_LANES == 0) shared[warp * VALUES + i] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        values[i] = shared[i];
        for (int w = 1; w < warps; ++w) values[i] += shared[w * VALUES + i];
    }
    __syncthreads();
}

template <int VALUES>
__device__ inline void block_max(float (&values)[VALUES], float* shared) {
    const int warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        values[i] = warp_max(values[i]);
        if (threadIdx.x % WARP_LANES == 0) shared[warp * VALUES + i] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        values[i] = shared[i];
        for (int w = 1; w < warps; ++w) {
            const float other = shared[w * VALUES + i];
            values[i] = values[i] > other || values[i] != values[i] ? values[i] : other;
        }
    }
    __syncthreads();
}

__device__ inline float block_sum(float value, float* shared) {
    float values[1] = {value};
    block_sum(values, shared);
    return values[0];
}

__device__ inline float block_max(float value, float* shared) {
    float values[1] = {value};
    block_max(values, shared);
    return values[0];
}
