// A quantized network in a warp's registers, sixteen rows or two times sixteen: what a lane of a product
// sums is, as levels, its part of the next product's left factor. The file that includes this says how
// columns are multiplied. With w the warp's first row, lane l has rows w + l / 4 and w + l / 4 + 8.
#pragma once
#include "real.cuh"
#include "int8_image.cuh"
#include "int8_levels.cuh"
#include "maths.cuh"
#include "prefetch.cuh"
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
    int n = image_multiple(L);
    while (2 * n <= LG_AT_ONCE && 2 * n <= END - FIRST) n *= 2;
    return n;
}

// The level of any value but NaN, before it is kept to 0..255: with ROUNDER added a value is whole, and
// `offset` takes ROUNDER away again. Past 2^22 both only tell that it is.
__device__ inline float level_of(float value, LevelTerms terms) {
    return value * terms.inverse + ROUNDER + terms.offset;
}

// A hidden unit's, still to be rounded, where relu comes next, its zero point is 0 and the sum is in
// [-2^30, 2^23). Bits of 2^23 and a whole number below it added are their sum, so one fmaf gives
// float(sum) * scale, rounded once; of a sum below 0 the bits are another float, but one below 2^23.
__device__ inline float plain_level(int sum, float scale, float offset, float inverse) {
    return fmaf(float_of(unsigned(sum)), scale, offset) * inverse;
}

__device__ inline float hidden_level(int sum, float scale, LevelTerms terms) {
    const float z = float(int(unsigned(sum) - unsigned(POSITIVE))) * scale;
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
template <int L, int N, bool PLAIN, class Out>
__device__ inline void finish_hidden(const Place& place, int first, const int (&sums)[GROUPS][N / 8][4],
                                     Out& out) {
    const LevelTerms levels = reinterpret_cast<const LevelTerms*>(place.image + HIDDEN_AT)[hidden_index(L)];
    const SumTerms* const terms = sum_terms<L>(place, first);
#pragma unroll
    for (int g = 0; g < N / 8; g += 2) {
        float level[GROUPS][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int f = g + i / 2, j = i % 2;
            const unsigned bias = unsigned(terms[f * 4].bias[j]);
            const float scale = terms[f * 4].scale[j], offset = -8388608.f * scale;
#pragma unroll
            for (int r = 0; r < GROUPS; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int sum = int(unsigned(sums[r][f][2 * h + j]) + bias);
                    level[r][h][i] = PLAIN ? plain_level(sum, scale, offset, levels.inverse)
                                           : hidden_level(sum, scale, levels);
                }
        }
#pragma unroll
        for (int r = 0; r < GROUPS; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                out[r][first / 8 + g + h] = round_and_pack(level[r][h]);
    }
}

template <int L, int N>
__device__ inline void finish_head(const Place& place, int first, const int (&sums)[GROUPS][N / 8][4],
                                   const float (&taint)[GROUPS][2]) {
    const int lane = threadIdx.x % WARP_LANES;
    const SumTerms* const terms = sum_terms<L>(place, first);
#pragma unroll
    for (int g = 0; g < N / 8; ++g) {
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) {
            const int r = i / 4, h = i / 2 % 2, j = i % 2;
            const int column = first + g * 8 + lane % 4 * 2 + j, row = r * 16 + h * 8 + lane / 4;
            const int sum = int(unsigned(sums[r][g][2 * h + j]) + unsigned(terms[g * 4].bias[j]));
            const float z = float(sum) * terms[g * 4].scale[j];
            if (column < LAYERS[L].fan_out && row < place.rows)
                place.y[(long long)row * place.y_stride + LAYERS[L].column + column] =
                    taint[r][h] != taint[r][h] ? nan_f32() : z;
        }
    }
}

// Columns FIRST and on of layer L, from the levels `in`.
template <int L, int FIRST, class Multiply, int WORDS, class Out>
__device__ inline void columns_from(const Multiply& multiply, const Place& place, bool plain,
                                    const float (&taint)[GROUPS][2], const unsigned (&in)[GROUPS][WORDS],
                                    Out& out) {
    if constexpr (FIRST < image_columns(L)) {
        constexpr int N = at_once<L, FIRST>();
        int sums[GROUPS][N / 8][4];
        multiply.template columns<L, FIRST, N>(in, sums);
        if constexpr (LAYERS[L].head)
            finish_head<L, N>(place, FIRST, sums, taint);
        else if (!LG_TANH && plain)
            finish_hidden<L, N, true>(place, FIRST, sums, out);
        else
            finish_hidden<L, N, false>(place, FIRST, sums, out);
        columns_from<L, FIRST + N>(multiply, place, plain, taint, in, out);
    }
}

// Layers L and on of the network whose input's levels are `inputs`.
template <int L, class Multiply, int WORDS>
__device__ inline void forward_from(const Multiply& multiply, const Place& place, bool plain,
                                    const float (&taint)[GROUPS][2],
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
            columns_from<L, 0>(multiply, place, plain, taint, inputs, out);
        else
            columns_from<L, 0>(multiply, place, plain, taint, in, out);
        forward_from<L + 1>(multiply, place, plain, taint, inputs, out);
    }
}

// Eight neighbouring columns of an observation as float32; `taint` becomes NaN with any of them.
__device__ inline void read_eight(const Real* from, float (&eight)[8], float& taint) {
    const uint4* const at = reinterpret_cast<const uint4*>(from);
#if LG_FLOAT32
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 four = at[i];
        const unsigned words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            eight[4 * i + k] = float_of(words[k]);
            taint = larger_or_nan(taint, eight[4 * i + k]);
        }
    }
#else
    const uint4 all = *at;
    const unsigned most =
        larger_pair_or_nan(larger_pair_or_nan(all.x, all.y), larger_pair_or_nan(all.z, all.w));
    taint = larger_or_nan(taint, larger_or_nan(low_bf16(most), high_bf16(most)));
    const unsigned pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        eight[2 * i] = low_bf16(pairs[i]);
        eight[2 * i + 1] = high_bf16(pairs[i]);
    }
#endif
}

// The levels of the warp's rows from `first` on, and in `taint` a NaN for a row that has one. Rows past
// the batch are its last again, columns past the input's are others of the row, which have no weights: so
// nothing is asked of a lane.
__device__ inline void read_inputs(const Place& place, const Real* __restrict__ observation, long long first,
                                   int batch, unsigned (&to)[GROUPS][INPUT_WORDS], float (&taint)[GROUPS][2]) {
    const int lane = threadIdx.x % WARP_LANES;
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) taint[i / 2][i % 2] = 0.f;
#pragma unroll
    for (int step = 0; step < INPUT_TERMS / STEP_TERMS; ++step) {
        const int column = step * STEP_TERMS + lane % 4 * 8;
        const LevelTerms* const terms = reinterpret_cast<const LevelTerms*>(place.image + INPUTS_AT) + column;
        float eight[GROUPS][2][8];
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
            const long long row = min(first + lane / 4 + i * 8, batch - 1ll);
            read_eight(observation + row * LG_INPUTS + min(column, LG_INPUTS - 8), eight[i / 2][i % 2],
                       taint[i / 2][i % 2]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                float level[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    level[k] = level_of(eight[i / 2][i % 2][half * 4 + k], terms[half * 4 + k]);
                to[i / 2][step * 4 + half * 2 + i % 2] = round_and_pack(level);
            }
    }
    // The four lanes of a row agree.
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) {
        float& mine = taint[i / 4][i / 2 % 2];
        mine = larger_or_nan(mine, __shfl_xor_sync(ALL_LANES, mine, 1 + i % 2));
    }
}

// A warp: asks for its rows of the batch from `first` on, to be in L2 when they are read.
__device__ inline void fetch_ahead(const Real* observation, long long first, int batch) {
    const long long rows = min(batch - first, (long long)WARP_ROWS);
    const char* const from = reinterpret_cast<const char*>(observation + first * LG_INPUTS);
    for (int at = threadIdx.x % WARP_LANES * SECTOR_NBYTES; at < rows * LG_INPUTS * int(sizeof(Real));
         at += WARP_LANES * SECTOR_NBYTES)
        fetch_to_l2(from + at);
}

// A warp: its rows of the batch from `first` on, into place.y.
template <class Multiply>
__device__ inline void forward(const Multiply& multiply, const Place& place, bool plain,
                               const Real* __restrict__ observation, long long first, int batch) {
    unsigned inputs[GROUPS][INPUT_WORDS];
    float taint[GROUPS][2];
    read_inputs(place, observation, first, batch, inputs, taint);
    forward_from<0>(multiply, place, plain, taint, inputs, inputs);
}
