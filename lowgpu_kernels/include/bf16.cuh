// bfloat16 in storage, float32 in arithmetic. Needs no toolkit header, which keeps compiles short.
#pragma once

struct Bf16 {
    unsigned short bits;
};

// Two floats rounded to nearest even, the first in the low half.
__device__ inline unsigned pack_bf16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float low_bf16(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Within 2^-11 of tanh relatively, so good for a result that is stored as bfloat16.
__device__ inline float tanh_approximate(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
