// Products of levels, unsigned bytes, with int8 weights into exact int32 sums, and values as levels. One
// PTX instruction a wrapper. Factors and sums lie as int8_product.cuh says; a warpgroup's left factor is
// in registers, each warp's sixteen rows as a warp's are.
#pragma once
#include "int8_product.cuh"

// A warp: sums += levels weights.
__device__ inline void multiply_add_levels(int (&sums)[4], const unsigned* levels, unsigned low, unsigned high) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(levels[0]), "r"(levels[1]), "r"(levels[2]), "r"(levels[3]), "r"(low), "r"(high));
}

// A warpgroup: sums = levels weights, or sums += where `adds`; [64, 32] by [32, N].
template <int N>
struct LevelsProduct;

#define LG_LEVELS_PRODUCT(N, NAMES, A0, A1, A2, A3, B, ADDS, ...)                                        \
    template <>                                                                                          \
    struct LevelsProduct<N> {                                                                            \
        static __device__ inline void start(int (&sums)[N / 8][4], const unsigned* levels, Factor weights, \
                                            bool adds) {                                                 \
            asm volatile(                                                                                \
                "{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                                           \
                ", 0;\n"                                                                                 \
                "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 {" NAMES "}, {" A0 ", " A1 ", " A2 \
                ", " A3 "}, " B ", adds;\n}"                                                             \
                : __VA_ARGS__                                                                            \
                : "r"(levels[0]), "r"(levels[1]), "r"(levels[2]), "r"(levels[3]), "l"(weights),          \
                  "r"(int(adds)));                                                                       \
        }                                                                                                \
    };
LG_LEVELS_PRODUCT(8, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", "%9", LG_INT_4(0))
LG_LEVELS_PRODUCT(16, LG_NAMES_8, "%8", "%9", "%10", "%11", "%12", "%13", LG_INT_4(0), LG_INT_4(1))
LG_LEVELS_PRODUCT(32, LG_NAMES_16, "%16", "%17", "%18", "%19", "%20", "%21", LG_INT_16(0))
LG_LEVELS_PRODUCT(64, LG_NAMES_32, "%32", "%33", "%34", "%35", "%36", "%37", LG_INT_16(0), LG_INT_16(4))
LG_LEVELS_PRODUCT(128, LG_NAMES_64, "%64", "%65", "%66", "%67", "%68", "%69", LG_INT_64(0))

// Two of int32 as unsigned bytes, those out of range at 0 or 255, the first in the low byte; the low half
// of `above` comes in the upper half.
__device__ inline unsigned pack_levels(int low, int high, unsigned above) {
    unsigned packed;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(high), "r"(low), "r"(above));
    return packed;
}

// The larger; NaN where either is.
__device__ inline float larger_or_nan(float x, float y) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}
// The same of each of two bfloat16.
__device__ inline unsigned larger_pair_or_nan(unsigned x, unsigned y) {
    unsigned larger;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
}
