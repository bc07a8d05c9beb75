// What becomes of the int32 sums of an int8 product, and how a warp stores them: LG_RESULT is int, float,
// Bf16 or Int8. LG_WHOLE says that rows of the result start at multiples of what a lane stores at once.
#pragma once
#include "bf16.cuh"
#include "int8_product.cuh"
#include "warp.cuh"

using Int8 = signed char;
using Result = LG_RESULT;

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;
constexpr bool SCALED = !same<Result, int>;

// Of the whole matrix; a null array has ones, or zeros where it is added.
struct Scales {
    const float *of_row, *of_column, *bias;
    float scale;

    __device__ float row_factor(int row, int rows) const {
        return of_row != nullptr && row < rows ? scale * of_row[row] : scale;
    }
    // A column's scale and what is added to it.
    __device__ float2 column_terms(int column, int columns) const {
        return make_float2(of_column != nullptr && column < columns ? of_column[column] : 1.f,
                           bias != nullptr && column < columns ? bias[column] : 0.f);
    }
};

// Each operation rounds to float32, in this order on every device.
__device__ inline float scaled(int sum, float row_factor, float column_scale, float bias) {
    const float value = float(sum) * row_factor * column_scale + bias;
    return LG_RELU && value < 0.f ? 0.f : value;  // and not fmaxf, which would hide a NaN
}

// To the nearest, ties to even; NaN gives 0.
__device__ inline Int8 to_int8(float value) { return Int8(min(max(__float2int_rn(value), -128), 127)); }

template <class To>
__device__ inline void store_result(To* to, int sum, float row_factor, float2 column) {
    if constexpr (same<To, int>) {
        *to = sum;
    } else {
        const float value = scaled(sum, row_factor, column.x, column.y);
        if constexpr (same<To, float>) *to = value;
        if constexpr (same<To, Bf16>) *to = {(unsigned short)pack_bf16(value, 0.f)};
        if constexpr (same<To, Int8>) *to = to_int8(value);
    }
}

// The part of the result that a tile makes: rows and columns before the end of the matrix.
struct ResultTile {
    Result* first;       // of the tile
    int rows, columns;   // that are left from there; the tile may be larger
    long long stride;    // columns of the matrix
    const float2* terms; // of the tile's columns, in shared memory
};

// Two neighbouring sums of a lane as words that lanes exchange: one each for 4 bytes, one for both else.
__device__ inline void pack_pair(unsigned (&words)[2], const int (&sums)[2], float factor, float4 terms) {
    if constexpr (!SCALED) {
        words[0] = sums[0];
        words[1] = sums[1];
    } else {
        const float low = scaled(sums[0], factor, terms.x, terms.y);
        const float high = scaled(sums[1], factor, terms.z, terms.w);
        if constexpr (sizeof(Result) == 4) {
            words[0] = __float_as_uint(low);
            words[1] = __float_as_uint(high);
        } else if constexpr (sizeof(Result) == 2) {
            words[0] = pack_bf16(low, high);
        } else {
            words[0] = pack_int8(__float2int_rn(low), __float2int_rn(high), 0u);
        }
    }
}

// Lanes of a pair change halves: the even one gives `right` for the other's `left`, so that it holds
// four neighbouring columns of the left fragment, and the odd one of the right.
template <int WORDS>
__device__ inline void exchange(unsigned (&four)[2 * WORDS], const unsigned* left, const unsigned* right) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const unsigned got = __shfl_xor_sync(ALL_LANES, odd ? left[w] : right[w], 1);
        four[w] = odd ? got : left[w];
        four[WORDS + w] = odd ? right[w] : got;
    }
}

// One row of neighbouring fragments, at (row, column) of the tile: lanes exchange words and store what
// they then hold.
template <int FRAGMENTS>
__device__ inline void store_group(const ResultTile& tile, int row, int column, bool inside,
                                   const unsigned (&words)[FRAGMENTS][2]) {
    const int odd = threadIdx.x % 2, high = threadIdx.x % 4 / 2;
    if constexpr (sizeof(Result) == 1) {
        // Two fragments travel in a word; then lanes two apart change halves as well.
        const unsigned left = words[0][0] | words[2][0] << 16, right = words[1][0] | words[3][0] << 16;
        unsigned both[2];
        exchange<1>(both, &left, &right);
        const unsigned lower = __byte_perm(both[0], both[1], 0x5410);
        const unsigned upper = __byte_perm(both[0], both[1], 0x7632);
        const unsigned got = __shfl_xor_sync(ALL_LANES, high ? lower : upper, 2);
        column += 8 * (odd + 2 * high);
        if (inside && column < tile.columns)
            *reinterpret_cast<uint2*>(tile.first + row * tile.stride + column) =
                high ? make_uint2(got, upper) : make_uint2(lower, got);
    } else {
        constexpr int WORDS = sizeof(Result) == 4 ? 2 : 1;
        unsigned four[2 * WORDS];
        exchange<WORDS>(four, words[0], words[1]);
        column += 8 * odd + 4 * high;
        if (inside && column < tile.columns) {
            Result* const to = tile.first + row * tile.stride + column;
            if constexpr (WORDS == 2)
                *reinterpret_cast<uint4*>(to) = make_uint4(four[0], four[1], four[2], four[3]);
            else
                *reinterpret_cast<uint2*>(to) = make_uint2(four[0], four[1]);
        }
    }
}

// A warp, whole: sixteen rows by FRAGMENTS fragments of eight columns, sums[f][2h + j] in the lane of row
// 8h + l / 4 and column 8f + l % 4 * 2 + j, at (row, column) of the tile. Lanes first exchange sums, so
// that each stores 8 or 16 bytes and four of them whole sectors of 32.
template <int FRAGMENTS>
__device__ inline void store_fragments(const ResultTile& tile, int row, int column,
                                       const int (&sums)[FRAGMENTS][4], const float (&factors)[2]) {
    const int quad = threadIdx.x % 4, first = row + threadIdx.x % WARP_LANES / 4;
    constexpr int AT_ONCE = sizeof(Result) == 1 ? 4 : 2;
    static_assert(FRAGMENTS % AT_ONCE == 0, "fragments are stored in groups");
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f += AT_ONCE) {
        unsigned words[2][AT_ONCE][2];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = column + 8 * (f + i) + quad * 2;
            float4 terms = make_float4(1.f, 0.f, 1.f, 0.f);
            if constexpr (SCALED) terms = *reinterpret_cast<const float4*>(tile.terms + at);
            // Both rows at once, or the compiler would keep the terms of all columns in registers.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int pair[2] = {sums[f + i][2 * h], sums[f + i][2 * h + 1]};
                if constexpr (LG_WHOLE) {
                    pack_pair(words[h][i], pair, factors[h], terms);
                } else if (first + 8 * h < tile.rows) {
                    Result* const to = tile.first + (first + 8 * h) * tile.stride + at;
                    if (at < tile.columns)
                        store_result(to, pair[0], factors[h], make_float2(terms.x, terms.y));
                    if (at + 1 < tile.columns)
                        store_result(to + 1, pair[1], factors[h], make_float2(terms.z, terms.w));
                }
            }
        }
        if constexpr (LG_WHOLE)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool inside = first + 8 * h < tile.rows;
                store_group(tile, first + 8 * h, column + 8 * f, inside, words[h]);
            }
    }
}
