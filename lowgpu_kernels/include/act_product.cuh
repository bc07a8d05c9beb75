// Products of a warpgroup whose left factor is in registers, and how one layer's sums become the next
// layer's factor. One PTX instruction a wrapper. Thread t holds of the factor, 64 rows by 16 columns,
// with w = t / 32 and l = t % 32:
//   a[h + 2p]   row 16w + 8h + l / 4, columns 8p + l % 4 * 2 and the next
// which is how warpgroup.cuh lays out sums of sixteen columns: they are packed where they are.
#pragma once
#include "bf16.cuh"
#include "warpgroup.cuh"

// sums = a b, or sums += a b where `adds`; b is [16, N], summed over along its columns, in shared
// memory as swizzled.cuh says.
template <int N>
struct RowsProduct;

#define LG_ROWS_PRODUCT(N, NAMES, A0, A1, A2, A3, B, ADDS, ...)                                      \
    template <>                                                                                      \
    struct RowsProduct<N> {                                                                          \
        static __device__ inline void start(float (&sums)[N / 2], const unsigned* a, Factor b,       \
                                            bool adds) {                                             \
            asm volatile(                                                                            \
                "{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                                       \
                ", 0;\n"                                                                             \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {" A0 ", " A1 \
                ", " A2 ", " A3 "}, " B ", adds, 1, 1, 0;\n}"                                        \
                : __VA_ARGS__                                                                        \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));               \
        }                                                                                            \
    };
LG_ROWS_PRODUCT(16, LG_NAMES_8, "%8", "%9", "%10", "%11", "%12", "%13", LG_4(0), LG_4(4))
LG_ROWS_PRODUCT(32, LG_NAMES_16, "%16", "%17", "%18", "%19", "%20", "%21", LG_16(0))
LG_ROWS_PRODUCT(64, LG_NAMES_32, "%32", "%33", "%34", "%35", "%36", "%37", LG_16(0), LG_16(16))
LG_ROWS_PRODUCT(128, LG_NAMES_64, "%64", "%65", "%66", "%67", "%68", "%69", LG_16(0), LG_16(16),
                LG_16(32), LG_16(48))

// Two floats rounded, negative ones to zero; a NaN stays one.
__device__ inline unsigned pack_positive_bf16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
