// Products of a warpgroup (four warps, the first with a number divisible by four) on the tensor cores of
// sm_90a, both factors in shared memory. One PTX instruction a wrapper; every thread of the group must
// take part. Thread t holds, of 64 rows by N columns of sums, with w = t / 32 and l = t % 32:
//   sums[4g + 2h + j]   row 16w + 8h + l / 4, column 8g + l % 4 * 2 + j
// Factors lie as swizzled.cuh says.
#pragma once

__device__ inline unsigned shared_address(const void* at) { return unsigned(__cvta_generic_to_shared(at)); }

// The thread's number in its warp, asked anew each time: what follows from it is then worked out where
// it is used, and does not take registers from the sums.
__device__ inline int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The same of the thread's number in its block.
__device__ inline int thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Where a factor starts in shared memory, and how far apart its blocks of 64 columns are in bytes, for a
// factor that is summed over along its rows; one summed over along its columns is given a block at a
// time.
using Factor = unsigned long long;
__device__ inline Factor factor(unsigned address, int block_nbytes) {
    constexpr Factor SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 1024ull >> 4;
    return Factor((address & 0x3FFFFu) >> 4) | Factor(block_nbytes >> 4) << 16 | EIGHT_ROWS << 32 |
           SWIZZLE_128;
}
// The same factor from so many bytes further on, a multiple of 16.
__device__ inline Factor further(Factor from, int nbytes) { return from + Factor(nbytes >> 4); }

// Columns of ones, whose eight rows are read for any row.
__device__ inline Factor ones_factor(unsigned address) {
    constexpr Factor SWIZZLE_128 = 1ull << 62;
    return Factor((address & 0x3FFFFu) >> 4) | SWIZZLE_128;
}

// What was written to shared memory so far is seen by products that start after a barrier.
__device__ inline void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Before the first product after its sums or other registers were touched.
__device__ inline void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_product_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int GROUPS>
__device__ inline void wait_for_products_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Keeps the compiler from using sums before the wait that this follows.
template <int COUNT>
__device__ inline void take_sums(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// sums = a b, or sums += a b where `adds`; a is [64, 16] and b [16, N]. A factor that is TALL is stored
// with what is summed over along its rows, else along its columns.
template <int N, bool TALL_A, bool TALL_B>
struct Product;

#define LG_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define LG_16(i) LG_4(i), LG_4(i + 4), LG_4(i + 8), LG_4(i + 12)
#define LG_PRODUCT(N, NAMES, A, B, ADDS, TALL_A_, TALL_B_, ...)                                      \
    template <bool TALL_A, bool TALL_B>                                                              \
    struct Product<N, TALL_A, TALL_B> {                                                              \
        static __device__ inline void start(float (&sums)[N / 2], Factor a, Factor b, bool adds) {       \
            asm volatile(                                                                            \
                "{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                                       \
                ", 0;\n"                                                                             \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B    \
                ", adds, 1, 1, " TALL_A_ ", " TALL_B_ ";\n}"                                         \
                : __VA_ARGS__                                                                        \
                : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TALL_A)), "n"(int(TALL_B)));               \
        }                                                                                            \
    };
#define LG_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LG_NAMES_16 LG_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LG_NAMES_32 \
    LG_NAMES_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LG_NAMES_64                                                                                  \
    LG_NAMES_32                                                                                      \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"               \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
LG_PRODUCT(8, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", LG_4(0))
LG_PRODUCT(16, LG_NAMES_8, "%8", "%9", "%10", "%11", "%12", LG_4(0), LG_4(4))
LG_PRODUCT(32, LG_NAMES_16, "%16", "%17", "%18", "%19", "%20", LG_16(0))
LG_PRODUCT(64, LG_NAMES_32, "%32", "%33", "%34", "%35", "%36", LG_16(0), LG_16(16))
LG_PRODUCT(128, LG_NAMES_64, "%64", "%65", "%66", "%67", "%68", LG_16(0), LG_16(16), LG_16(32),
           LG_16(48))

// sums += a b, a in registers as sums of an earlier product are held: of 64 rows by 16 columns, with g = 0
// and 1,
//     a[2g + h]   row 16w + 8h + l / 4, columns 8g + l % 4 * 2 and the next
// and b not TALL; nothing may be written to `a` before the product is waited for. First products are
// sums = a b: what lay in the sums before does not stay alive for them, from one round of a loop to
// the next.
template <int N>
struct ProductOf;

#define LG_FRESH_4(i) "=&f"(sums[i]), "=&f"(sums[i + 1]), "=&f"(sums[i + 2]), "=&f"(sums[i + 3])
#define LG_FRESH_16(i) LG_FRESH_4(i), LG_FRESH_4(i + 4), LG_FRESH_4(i + 8), LG_FRESH_4(i + 12)
#define LG_MULTIPLY(N, NAMES, A, B, ADDS) \
    "{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
    "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B ", adds, 1, 1"
#define LG_PRODUCT_OF(N, NAMES, A, B, FIRST_A, FIRST_B, FRESH, ...)                                  \
    template <>                                                                                      \
    struct ProductOf<N> {                                                                            \
        static __device__ inline void first(float (&sums)[N / 2], Factor a, Factor b) {              \
            asm volatile(LG_MULTIPLY(N, NAMES, FIRST_A, FIRST_B, "0") ", 0, 0;\n}"                   \
                         : FRESH()                                                                   \
                         : "l"(a), "l"(b));                                                          \
        }                                                                                            \
        static __device__ inline void first(float (&sums)[N / 2], const unsigned* a, Factor b) {     \
            asm volatile(LG_MULTIPLY(N, NAMES, A, B, "0") ", 0;\n}"                                  \
                         : FRESH()                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
        }                                                                                            \
        static __device__ inline void add(float (&sums)[N / 2], const unsigned* a, Factor b) {       \
            asm volatile(LG_MULTIPLY(N, NAMES, A, B, "1") ", 0;\n}"                                  \
                         : __VA_ARGS__                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
        }                                                                                            \
    };
#define LG_FRESH_TWO() LG_FRESH_4(0), LG_FRESH_4(4)
#define LG_FRESH_ALL_16() LG_FRESH_16(0)
#define LG_FRESH_32() LG_FRESH_16(0), LG_FRESH_16(16)
#define LG_FRESH_64() LG_FRESH_32(), LG_FRESH_16(32), LG_FRESH_16(48)
LG_PRODUCT_OF(16, LG_NAMES_8, "{%8, %9, %10, %11}", "%12", "%8", "%9", LG_FRESH_TWO,
              LG_4(0), LG_4(4))
LG_PRODUCT_OF(32, LG_NAMES_16, "{%16, %17, %18, %19}", "%20", "%16", "%17", LG_FRESH_ALL_16,
              LG_16(0))
LG_PRODUCT_OF(64, LG_NAMES_32, "{%32, %33, %34, %35}", "%36", "%32", "%33", LG_FRESH_32,
              LG_16(0), LG_16(16))
LG_PRODUCT_OF(128, LG_NAMES_64, "{%64, %65, %66, %67}", "%68", "%64", "%65", LG_FRESH_64,
              LG_16(0), LG_16(16), LG_16(32), LG_16(48))

// Keeps words that a product reads where they are until the wait that this follows.
template <int COUNT>
__device__ inline void keep_words(unsigned (&words)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// Four 8 x 8 matrices to shared memory: lanes 8i..8i+7 give the addresses of the eight 16 B rows of
// matrix i; lane l holds of each row l / 4, columns l % 4 * 2 and the next.
__device__ inline void store_matrices(unsigned row, const unsigned (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}
// The same matrices from shared memory.
__device__ inline void load_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Of two bfloat16: the larger of each and zero; NaN stays NaN.
__device__ inline unsigned relu_pair(unsigned pair) {
    unsigned larger;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(pair), "r"(0u));
    return larger;
}
// All bits of a half are ones where that bfloat16 is above zero.
__device__ inline unsigned where_positive(unsigned pair) {
    unsigned where;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(where) : "r"(pair), "r"(0u));
    return where;
}
