// A quantized network in a warp's registers, sixteen rows or two times sixteen: what a lane of a product
// sums is, as levels, its part of the next product's left factor. The file that includes this says how
// columns are multiplied. With w the warp's first row, lane l has rows w + l / 4 and w + l / 4 + 8.
#pragma once
#include "real.cuh"
#include "int8_image.cuh"
#include "int8_levels.cuh"
#include "maths.cuh"
#include "warp.cuh"

constexpr int GROUPS = LG_GROUPS, WARP_ROWS = 16 * GROUPS;  // GROUPS: of sixteen rows
constexpr int INPUT_WORDS = INPUT_TERMS / 8;

// Where a lane finds what it multiplies by and where the heads go.
struct Place {
    const unsigned char* image;  // what of it follows the weights is read from here
    float* y;                    // the row of outputs that is the warp's first
    int y_stride, rows;          // in y; how many of the warp's rows are to be written
};

// What the lane's sums of eight columns from `first` on become values with; of the next eight, 4 further.
template <int L>
__device__ inline const SumTerms* sum_terms(const Place& place, int first) {
    const SumTerms* const all = reinterpret_cast<const SumTerms*>(place.image + SUMS_AT);
    return all + (image_channel(L) + first) / 2 + threadIdx.x % 4;
}

// Columns of layer L that are summed at once from FIRST on.
template <int L, int FIRST>
constexpr int at_once() {
    constexpr int NEXT = (FIRST / image_rows(L) + 1) * image_rows(L);  // the first of the next part
    constexpr int END = NEXT < image_columns(L) ? NEXT : image_columns(L);
    constexpr int MOST = GROUPS == 2 && image_columns(L) > 128 ? LG_AT_ONCE / 2 : LG_AT_ONCE;
    int n = image_multiple(L);
    while (2 * n <= MOST && 2 * n <= END - FIRST) n *= 2;
    return n;
}

// The level of any value but NaN, before it is kept to 0..255: with ROUNDER added a value is whole, and
// `offset` takes ROUNDER away again. Past 2^22 both only tell that it is.
__device__ inline float level_of(float value, LevelTerms terms) {
    return value * terms.inverse + ROUNDER + terms.offset;
}

// A hidden unit's, still to be rounded, where relu comes next, its zero point is 0 and the sum is in
// [-2^30, 2^23). Bits of 2^23 and a whole number below it added are their sum, so one fmaf gives
// float(sum) * factor, rounded once; of a sum below 0 the bits are another float, but one below 2^23.
__device__ inline float plain_level(int sum, float factor, float offset) {
    return fmaf(float_of(unsigned(sum)), factor, offset);
}

__device__ inline float hidden_level(int sum, float factor, LevelTerms terms) {
    const float z = float(int(unsigned(sum) - unsigned(POSITIVE))) * factor;
#if LG_TANH
    return level_of(tanh_f32(z), terms);
#else
    return level_of(z < 0.f ? 0.f : z, terms);
#endif
}

// Four values rounded to bytes, ties to even, those out of range at 0 or 255. Where one instruction does
// not convert and pack two, a product with the smallest denormal rounds to a whole number of them, whose
// bits are that number; below 0 the sign bit makes them a negative one.
__device__ inline unsigned round_and_pack(const float (&values)[4]) {
    int whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        whole[i] = LG_CONVERTS ? __float2int_rn(values[i]) : int(bits_of(values[i] * float_of(1u)));
    return pack_levels(whole[0], whole[1], pack_levels(whole[2], whole[3], 0u));
}

// Sums of N columns of layer L, as levels: two words for sixteen columns of each eight rows.
template <bool PLAIN, int L, int N, class Out>
__device__ inline void finish_hidden(const Place& place, int first, const int (&sums)[GROUPS][N / 8][4],
                                     Out& out) {
    const SumTerms* const terms = sum_terms<L>(place, first);
    LevelTerms levels{};
    if constexpr (!PLAIN) levels = reinterpret_cast<const LevelTerms*>(place.image + HIDDEN_AT)[hidden_index(L)];
#pragma unroll
    for (int g = 0; g < N / 8; g += 2) {
        float level[GROUPS][2][4];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const SumTerms of = terms[(g + f) * 4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float offset = -8388608.f * of.factor[j];
#pragma unroll
                for (int i = 0; i < 2 * GROUPS; ++i) {
                    const int sum = int(unsigned(sums[i / 2][g + f][i % 2 * 2 + j]) + unsigned(of.bias[j]));
                    level[i / 2][i % 2][f * 2 + j] = PLAIN ? plain_level(sum, of.factor[j], offset)
                                                           : hidden_level(sum, of.factor[j], levels);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i)
            out[i / 2][first / 8 + g + i % 2] = round_and_pack(level[i / 2][i % 2]);
    }
}

// A row with a NaN has a bit in `absent`: that of its group and eight rows.
template <int L, int N>
__device__ inline void finish_head(const Place& place, int first, const int (&sums)[GROUPS][N / 8][4],
                                   unsigned absent) {
    const int lane = lane_index();
    const SumTerms* const terms = sum_terms<L>(place, first);
#pragma unroll
    for (int g = 0; g < N / 8; ++g) {
        const SumTerms of = terms[g * 4];
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) {
            const int row = i / 2 * 8 + lane / 4, j = i % 2, column = first + g * 8 + lane % 4 * 2 + j;
            const int sum = int(unsigned(sums[i / 4][g][i % 4]) + unsigned(of.bias[j]));
            const float z = float(sum) * of.factor[j];
            if (column < LAYERS[L].fan_out && row < place.rows)
                place.y[(long long)row * place.y_stride + LAYERS[L].column + column] =
                    absent >> i / 2 & 1 ? nan_f32() : z;
        }
    }
}

// Columns FIRST and on of layer L, from the levels `in`.
template <int L, int FIRST, class Multiply, class Plain, int WORDS, class Out>
__device__ inline void columns_from(const Multiply& multiply, const Place& place, Plain plain, unsigned absent,
                                    const unsigned (&in)[GROUPS][WORDS], Out& out) {
    if constexpr (FIRST < image_columns(L)) {
        constexpr int N = at_once<L, FIRST>();
        int sums[GROUPS][N / 8][4];
        multiply.template columns<L, FIRST, N>(in, sums);
        if constexpr (LAYERS[L].head)
            finish_head<L, N>(place, FIRST, sums, absent);
        else if (!LG_TANH && plain)
            finish_hidden<true, L, N>(place, FIRST, sums, out);
        else
            finish_hidden<false, L, N>(place, FIRST, sums, out);
        columns_from<L, FIRST + N>(multiply, place, plain, absent, in, out);
    }
}

// Layers L and on of the network whose input's levels are `inputs`, into place.y; `plain` where every hidden
// level is what plain_level gives.
template <int L, class Multiply, class Plain, int WORDS>
__device__ inline void forward_from(const Multiply& multiply, const Place& place, Plain plain, unsigned absent,
                                    const unsigned (&inputs)[GROUPS][INPUT_WORDS],
                                    const unsigned (&in)[GROUPS][WORDS]) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        // A head's sums go to y: what stands here is not used.
        unsigned out[GROUPS][round_up(layer.fan_out, STEP_TERMS) / 8];
        // Levels of no column have no weights, but they are read.
        if constexpr (!layer.head && image_columns(L) % STEP_TERMS != 0)
#pragma unroll
            for (int r = 0; r < GROUPS; ++r)
#pragma unroll
                for (int w = 0; w < 2; ++w) out[r][image_columns(L) / 8 + w] = 0u;
        if constexpr (layer.depth == 0)
            columns_from<L, 0>(multiply, place, plain, absent, inputs, out);
        else
            columns_from<L, 0>(multiply, place, plain, absent, in, out);
        forward_from<L + 1>(multiply, place, plain, absent, inputs, out);
    }
}
