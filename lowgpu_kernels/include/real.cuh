// Real, the element type a kernel computes in: float32 where LG_FLOAT32 is 1, else bfloat16.
#pragma once
#include "bf16.cuh"

#if LG_FLOAT32
using Real = float;
__device__ inline Real to_real(float x) { return x; }
#else
using Real = Bf16;
__device__ inline Real to_real(float x) { return {(unsigned short)pack_bf16(x, 0.f)}; }
#endif

constexpr int PIECE = 16 / sizeof(Real);  // elements in the 16 bytes that one thread moves at once
