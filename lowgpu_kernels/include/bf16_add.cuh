// Additions to bfloat16 numbers in global memory, done where they lie: no thread waits for them. Of one
// thread's additions to a number the order is the program's, so bits repeat where every number has one
// thread. Each sum is rounded to nearest even.
#pragma once
#include "bf16.cuh"
#include "host.cuh"

#ifdef __CUDACC__
__device__ inline void add_bf16(Bf16* to, Bf16 more) {
    asm volatile("red.relaxed.gpu.global.add.noftz.bf16 [%0], %1;" ::"l"(to), "h"(more.bits) : "memory");
}

// Eight side by side, at a multiple of 16 bytes.
__device__ inline void add_eight_bf16(Bf16* to, uint4 more) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(more.x),
                 "r"(more.y), "r"(more.z), "r"(more.w)
                 : "memory");
}
#else
inline void add_bf16(Bf16* to, Bf16 more) {
    to->bits = (unsigned short)pack_bf16(low_bf16(to->bits) + low_bf16(more.bits), 0.f);
}

inline void add_eight_bf16(Bf16* to, uint4 more) {
    const unsigned words[4] = {more.x, more.y, more.z, more.w};
    for (int i = 0; i < 8; ++i) add_bf16(to + i, {(unsigned short)(words[i / 2] >> i % 2 * 16)});
}
#endif
