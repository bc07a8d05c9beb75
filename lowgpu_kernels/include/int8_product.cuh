// Products of int8 on the tensor cores, into int32 sums that are exact. One PTX instruction a wrapper.
// A warp's are laid out as mma.cuh says, four elements of a factor where that has two of 16 bits: of a
// [16, 32] factor registers hold columns 4t.. | 4t.. | 4t + 16.. | 4t + 16.., of a [32, 8] one rows
// 4t.. | 4t + 16... A warpgroup's are laid out as warpgroup.cuh says, its sums[4g + i] here sums[g][i],
// and 128 elements of a factor to a row.
#pragma once
#include "mma.cuh"
#include "warpgroup.cuh"

// A warp: sums += a b.
__device__ inline void multiply_add_int8(int (&sums)[4], const unsigned (&a)[4], unsigned b_low,
                                         unsigned b_high) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// A warpgroup: sums = a b, or sums += a b where `adds`; a is [64, 32] and b [32, N], both stored
// with what is summed over along their rows.
template <int N>
struct Int8Product;

#define LG_INT_4(f) "+r"(sums[f][0]), "+r"(sums[f][1]), "+r"(sums[f][2]), "+r"(sums[f][3])
#define LG_INT_16(f) LG_INT_4(f), LG_INT_4(f + 1), LG_INT_4(f + 2), LG_INT_4(f + 3)
#define LG_INT_64(f) LG_INT_16(f), LG_INT_16(f + 4), LG_INT_16(f + 8), LG_INT_16(f + 12)
#define LG_INT8_PRODUCT(N, NAMES, A, B, ADDS, ...)                                                   \
    template <>                                                                                      \
    struct Int8Product<N> {                                                                          \
        static __device__ inline void start(int (&sums)[N / 8][4], unsigned long long a,             \
                                            unsigned long long b, bool adds) {                       \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                              \
                         ", 0;\n"                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" NAMES "}, " A      \
                         ", " B ", adds;\n}"                                                         \
                         : __VA_ARGS__                                                               \
                         : "l"(a), "l"(b), "r"(int(adds)));                                          \
        }                                                                                            \
    };
#define LG_NAMES_128                                                                                 \
    LG_NAMES_64                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"               \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"               \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"   \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
LG_INT8_PRODUCT(128, LG_NAMES_64, "%64", "%65", "%66", LG_INT_64(0))
LG_INT8_PRODUCT(256, LG_NAMES_128, "%128", "%129", "%130", LG_INT_64(0), LG_INT_64(16))

// Keeps what reads sums behind the wait for the products that make them: to the compiler they are made
// when the products start.
template <int FRAGMENTS>
__device__ inline void hold(int (&sums)[FRAGMENTS][4]) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) asm volatile("" : LG_INT_4(f)::"memory");
}

// Two of int32 as int8, those out of range at its ends, the first in the low byte; `above` comes in the
// upper half.
__device__ inline unsigned pack_int8(int low, int high, unsigned above) {
    unsigned packed;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(high), "r"(low), "r"(above));
    return packed;
}
