// Exponentials, sigmoids and hyperbolic tangents of the transformer, by the GPU's own approximations:
// within 2^-21 for |x| up to 8 in float32. In bfloat16 a sigmoid and a tangent are one instruction, within
// 2^-11, as their result is rounded to bfloat16 or multiplied by what was.
#pragma once
#include "real.cuh"

__device__ inline float power_of_two(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

__device__ inline float reciprocal(float x) {
#ifdef __CUDACC__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.f / x;
#endif
}

__device__ inline float reciprocal_root(float x) {
#ifdef __CUDACC__
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.f / sqrtf(x);
#endif
}

__device__ inline float exponential(float x) { return power_of_two(x * 1.4426950408889634f); }

// Both sides are made, so that nothing branches.
__device__ inline float elu(float x) {
    const float below = exponential(x) - 1.f;
    return x > 0.f ? x : below;
}

#if LG_FLOAT32
__device__ inline float sigmoid(float x) { return reciprocal(1.f + exponential(-x)); }
__device__ inline float hyperbolic_tangent(float x) { return fmaf(2.f, sigmoid(2.f * x), -1.f); }
#else
__device__ inline float sigmoid(float x) { return fmaf(0.5f, tanh_approximate(0.5f * x), 0.5f); }
__device__ inline float hyperbolic_tangent(float x) { return tanh_approximate(x); }
#endif
