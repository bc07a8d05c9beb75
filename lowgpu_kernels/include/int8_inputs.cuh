// A warp's rows of a batch as levels in its registers. A lane reads eight neighbouring columns at once, four
// lanes a row, from global memory or from shared, where a copy engine has put them.
#pragma once
#include "int8_policy.cuh"
#include "prefetch.cuh"

// Rows that lie one after another; what is asked of one past `last` is that of `last`.
struct Rows {
    const Real* first;
    int last;
};

// What tells whether any of an observation's elements was a NaN: as many bits as are read at once.
struct Largest {
    unsigned found;

    __device__ void take(const uint4& read) {
#if LG_FLOAT32
        const float low = larger_or_nan(float_of(read.x), float_of(read.y));
        const float all = larger_or_nan(low, larger_or_nan(float_of(read.z), float_of(read.w)));
        found = bits_of(larger_or_nan(float_of(found), all));
#else
        const unsigned low = larger_pair_or_nan(read.x, read.y);
        found = larger_pair_or_nan(found, larger_pair_or_nan(low, larger_pair_or_nan(read.z, read.w)));
#endif
    }

    __device__ bool is_nan() const {
#if LG_FLOAT32
        return float_of(found) != float_of(found);
#else
        return low_bf16(found) != low_bf16(found) || high_bf16(found) != high_bf16(found);
#endif
    }
};

// Eight neighbouring columns as float32.
__device__ inline void read_eight(const Real* from, float (&eight)[8], Largest& largest) {
    const uint4* const at = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < int(sizeof(Real)) / 2; ++i) {
        const uint4 read = at[i];
        const unsigned words[4] = {read.x, read.y, read.z, read.w};
        largest.take(read);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#if LG_FLOAT32
            eight[4 * i + k] = float_of(words[k]);
#else
            eight[2 * k] = low_bf16(words[k]);
            eight[2 * k + 1] = high_bf16(words[k]);
#endif
        }
    }
}

// The levels of rows, and the bits of those with a NaN. Columns past the input's are others of the row,
// which have no weights: so nothing is asked of a lane.
__device__ inline unsigned read_inputs(const Place& place, const Rows& rows,
                                       unsigned (&to)[GROUPS][INPUT_WORDS]) {
    const int lane = threadIdx.x % WARP_LANES;
    Largest largest[2 * GROUPS] = {};
#pragma unroll
    for (int step = 0; step < INPUT_TERMS / STEP_TERMS; ++step) {
        const int column = step * STEP_TERMS + lane % 4 * 8;
        const LevelTerms* const terms = reinterpret_cast<const LevelTerms*>(place.image + INPUTS_AT) + column;
        float eight[2 * GROUPS][8];
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
            const int row = min(lane / 4 + i * 8, rows.last);
            read_eight(rows.first + row * LG_INPUTS + min(column, LG_INPUTS - 8), eight[i], largest[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                float level[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) level[k] = level_of(eight[i][half * 4 + k], terms[half * 4 + k]);
                to[i / 2][step * 4 + half * 2 + i % 2] = round_and_pack(level);
            }
    }
    unsigned absent = 0u;
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) absent |= largest[i].is_nan() ? 1u << i : 0u;
    // The four lanes of a row agree.
    absent |= __shfl_xor_sync(ALL_LANES, absent, 1);
    return absent | __shfl_xor_sync(ALL_LANES, absent, 2);
}

// Rows from global memory.
struct FromMemory {
    const Real* const observation;
    const int batch;

    __device__ Rows rows(long long first) const {
        const long long from = min(first, batch - 1ll);
        return {observation + from * LG_INPUTS, int(min(batch - 1 - from, WARP_ROWS - 1ll))};
    }

    // A warp that has read its rows asks for its next, to be in L2 then.
    __device__ void go_on(long long next) const {
        const long long rows = min(batch - next, (long long)WARP_ROWS);
        const char* const from = reinterpret_cast<const char*>(observation + next * LG_INPUTS);
        for (int at = threadIdx.x % WARP_LANES * SECTOR_NBYTES; at < rows * LG_INPUTS * int(sizeof(Real));
             at += WARP_LANES * SECTOR_NBYTES)
            fetch_to_l2(from + at);
    }
};
