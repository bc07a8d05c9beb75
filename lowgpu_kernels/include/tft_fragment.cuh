// What a warp of the transformer's kernels multiplies at once: rows in shared memory by rows of weights,
// both stored with what is summed over along them, read 16 bytes at a time.
//
// A strip is TILES fragments of eight columns side by side. Which weight is whose column is chosen so that
// a lane ends up with columns that are neighbours: RUN of them in each of two rows of a fragment. Which term
// a lane multiplies is chosen alike on both sides, so 16 bytes hold what a lane needs of a row of weights; for
// tensor cores a row in shared memory has its terms in the order in which these take them.
//
// With LG_INT8 terms are int8 levels and sums are int32, exact; all else of a kernel is as in bfloat16.
#pragma once
#include "mma.cuh"
#include "real.cuh"
#include "warp.cuh"
#if LG_INT8
#include "int8_product.cuh"

using Term = signed char;
using Sum = int;
#else
using Term = Real;
using Sum = float;
#endif

constexpr int TERMS = 16 / sizeof(Term);  // of a product in 16 bytes

__device__ inline int lane_of_warp() { return threadIdx.x % WARP_LANES; }

// The 16 bytes at `from`, of which `left` elements are there and further ones are zeros. `whole` says that
// rows start at multiples of 16 bytes.
template <class Element>
__device__ inline uint4 load_piece(const Element* from, int left, bool whole) {
    if (whole && left > 0) return *reinterpret_cast<const uint4*>(from);
    uint4 piece = make_uint4(0u, 0u, 0u, 0u);
    if (!whole) {
        Element* const to = reinterpret_cast<Element*>(&piece);
#pragma unroll
        for (int i = 0; i < int(16 / sizeof(Element)); ++i)
            if (i < left) to[i] = from[i];
    }
    return piece;
}

#if LG_FLOAT32

// Eight rows by eight columns, by FFMA: lane l holds rows l / 8 and l / 8 + 4 of column l % 8.
struct Fragment {
    static constexpr int ROWS = 8, STEP = 4, SUMS = 2, RUN_OF_TILE = 1;
    struct Left {
        uint4 of[2];
    };

    static __device__ int row(int half) { return lane_of_warp() / 8 + half * 4; }
    static __device__ int holder() { return lane_of_warp() % 8; }  // of a run
    static __device__ int term() { return 0; }
    template <int TILES>
    static __device__ int weight_column(int tile) {
        return lane_of_warp() % 8 * TILES + tile;
    }

    static __device__ void multiply_add(float (&sums)[SUMS], const Left& left, const uint4& right) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& sum = sums[half];
            sum = fmaf(__uint_as_float(left.of[half].x), __uint_as_float(right.x), sum);
            sum = fmaf(__uint_as_float(left.of[half].y), __uint_as_float(right.y), sum);
            sum = fmaf(__uint_as_float(left.of[half].z), __uint_as_float(right.z), sum);
            sum = fmaf(__uint_as_float(left.of[half].w), __uint_as_float(right.w), sum);
        }
    }
};

#else

// Sixteen rows by eight columns, by tensor cores: lane l holds rows l / 4 and l / 4 + 8 of columns
// l % 4 * 2 and the next.
struct Fragment {
    static constexpr int ROWS = 16, STEP = 4 * TERMS, SUMS = 4, RUN_OF_TILE = 2;
    struct Left {
        unsigned of[2][4];  // as mma.cuh has it, of either half of the terms
    };

    static __device__ int row(int half) { return lane_of_warp() / 4 + half * 8; }
    static __device__ int holder() { return lane_of_warp() % 4; }
    static __device__ int term() { return lane_of_warp() % 4 * TERMS; }
    template <int TILES>
    static __device__ int weight_column(int tile) {
        const int column = lane_of_warp() / 4;
        return column / 2 * 2 * TILES + 2 * tile + column % 2;
    }

    // Of pieces of a lane's two rows.
    static __device__ Left left_of(const uint4& upper, const uint4& lower) {
        return {{{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}}};
    }

    static __device__ void multiply_add(Sum (&sums)[SUMS], const Left& left, const uint4& right) {
#if LG_INT8
        multiply_add_int8(sums, left.of[0], right.x, right.y);
        multiply_add_int8(sums, left.of[1], right.z, right.w);
#else
        multiply_add_bf16(sums, left.of[0], right.x, right.y);
        multiply_add_bf16(sums, left.of[1], right.z, right.w);
#endif
    }
};

#endif

// The lane's `half` of a run: columns first_of_run() on, in row Fragment::row(half).
template <int TILES>
struct Strip {
    static constexpr int COLUMNS = 8 * TILES, RUN = TILES * Fragment::RUN_OF_TILE;

    static __device__ int first_of_run() { return Fragment::holder() * RUN; }

    static __device__ Sum of_run(const Sum (*sums)[Fragment::SUMS], int half, int i) {
        constexpr int A_TILE = Fragment::RUN_OF_TILE;
        return sums[i / A_TILE][half * A_TILE + i % A_TILE];
    }
};

// Words of a row of a tile, the first for a multiple of the words' columns. For tensor cores the words of the
// four pieces of a step are dealt out: first every piece's first word, then every second, third and fourth.
template <int WORDS>
__device__ inline void store_words(Term* row, int column, const unsigned (&words)[WORDS]) {
    unsigned* const to = reinterpret_cast<unsigned*>(row);
    const int first = column * int(sizeof(Term)) / 4;
#if LG_FLOAT32
    *reinterpret_cast<uint4*>(to + first) = make_uint4(words[0], words[1], words[2], words[3]);
#else
#pragma unroll
    for (int i = 0; i < WORDS; ++i) to[first / 16 * 16 + (first % 4 + i) * 4 + first % 16 / 4] = words[i];
#endif
}
__device__ inline void store_piece(Term* row, int column, const uint4& piece) {
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
    store_words(row, column, words);
}

// What a lane needs of the rows of a fragment, of the step of terms from k on.
__device__ inline Fragment::Left load_left(const Term* rows, int stride, int k) {
    Fragment::Left left;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if LG_FLOAT32
        left.of[half] = *reinterpret_cast<const uint4*>(rows + Fragment::row(half) * stride + k);
#else
        const int lane = lane_of_warp();
        load_matrices(left.of[half], rows + lane % 16 * stride + k + (half * 2 + lane / 16) * TERMS);
#endif
    }
    return left;
}

#if LG_INT8
// What a product takes of x: the nearest whole number, of which `levels` are a 1. Packing ends it at -128
// and 127. NaN is 0.
__device__ inline int level_of(float x, float levels) { return __float2int_rn(x * levels); }
__device__ inline unsigned four_levels(float a, float b, float c, float d, float levels) {
    return pack_int8(level_of(a, levels), level_of(b, levels),
                     pack_int8(level_of(c, levels), level_of(d, levels), 0u));
}
// Eight bfloat16 as levels, two words.
__device__ inline uint2 levels_of(const uint4& x, float levels) {
    return make_uint2(four_levels(low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y), levels),
                      four_levels(low_bf16(x.z), high_bf16(x.z), low_bf16(x.w), high_bf16(x.w), levels));
}
#endif
