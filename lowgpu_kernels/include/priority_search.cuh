// Where a target falls in the tree of priorities (priority.cuh), found by MEMBERS neighbouring lanes for one
// row: the block adds the highest level up in shared memory; below, each lane reads its part of the FAN
// entries of a sum, 16 bytes at a time, and the lanes add up and count together. Lanes of a warp go side
// by side, whether their rows are there or not.
#pragma once
#include "priority.cuh"
#include "warp.cuh"

constexpr int MEMBERS = 8, PART = FAN / MEMBERS;

__device__ inline unsigned long long shuffle(unsigned long long word, int lane) {
    const unsigned low = __shfl_sync(ALL_LANES, unsigned(word), lane);
    return (unsigned long long)__shfl_sync(ALL_LANES, unsigned(word >> 32), lane) << 32 | low;
}

// What lanes up to this one have, this one's included: of SIZE neighbours.
template <int SIZE>
__device__ inline unsigned long long sum_up_to(unsigned long long word) {
    const int lane = threadIdx.x % WARP_LANES;
#pragma unroll
    for (int gap = 1; gap < SIZE; gap *= 2) {
        const unsigned long long before = shuffle(word, lane < gap ? lane : lane - gap);
        if (lane % SIZE >= gap) word += before;
    }
    return word;
}

// The first of the lanes' entries at which what is added up passes `left`, which loses what lies before.
template <typename Entry>
__device__ inline int first_past(const Entry (&entries)[PART], unsigned long long& left) {
    const int lane = threadIdx.x % WARP_LANES, first = lane / MEMBERS * MEMBERS;
    unsigned long long sum = 0;
#pragma unroll
    for (int i = 0; i < PART; ++i) sum += entries[i];
    const unsigned long long upto = sum_up_to<MEMBERS>(sum);
    const unsigned past = __ballot_sync(ALL_LANES, upto <= left) >> first & ((1u << MEMBERS) - 1u);
    unsigned long long mine = left - (upto - sum);
    int place = 0;
#pragma unroll
    for (int i = 0; i < PART - 1; ++i) {
        const bool passed = place == i && entries[i] <= mine;
        mine -= passed ? entries[i] : 0;
        place += passed;
    }
    // A lane's entries pass at the last member at the latest, where anything is left to find.
    const int owner = first + min(__popc(past), MEMBERS - 1);
    left = shuffle(mine, owner);
    return __shfl_sync(ALL_LANES, lane % MEMBERS * PART + place, owner);
}

// The block's: in `ends` the sum of all entries of the highest level up to each; gives the sum of all.
// `sums` holds a word a warp.
template <int THREADS>
__device__ inline unsigned long long add_up(const unsigned long long* entries, int count,
                                            unsigned long long* ends, unsigned long long* sums) {
    constexpr int SHARE = TOP / THREADS, WARPS = THREADS / WARP_LANES;
    static_assert(TOP % THREADS == 0 && THREADS % WARP_LANES == 0, "whole shares and whole warps");
    const int warp = threadIdx.x / WARP_LANES;
    unsigned long long upto[SHARE], share = 0;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        const int at = threadIdx.x * SHARE + i;
        share += at < count ? entries[at] : 0;
        upto[i] = share;
    }
    const unsigned long long of_warp = sum_up_to<WARP_LANES>(share);
    if (threadIdx.x % WARP_LANES == WARP_LANES - 1) sums[warp] = of_warp;
    __syncthreads();
    unsigned long long total = 0, before = of_warp - share;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        before += w < warp ? sums[w] : 0;
        total += sums[w];
    }
#pragma unroll
    for (int i = 0; i < SHARE; ++i) ends[threadIdx.x * SHARE + i] = before + upto[i];
    __syncthreads();
    return total;
}

// The leaf that holds the target, which is below the total; of a tree with nothing in it, any leaf. No branch
// is around the lanes' shuffles, behind which ptxas would have to bring them together again.
template <int LEVELS>
__device__ inline int find(unsigned long long target, const float* priority, const unsigned long long* sums,
                           const Levels<LEVELS>& levels, const unsigned long long* ends) {
    const int part = threadIdx.x % MEMBERS * PART;
    int place = 0;
    // The entries whose end is not past the target are the first ones: count them by halves.
#pragma unroll
    for (int half = TOP / 2; half > 0; half /= 2)
        if (ends[place + half - 1] <= target) place += half;
    place = min(place, levels.top - 1);
    if (place > 0) target -= ends[place - 1];
#pragma unroll
    for (int l = LEVELS - 2; l >= 0; --l) {
        unsigned long long entries[PART];
        const unsigned long long* const from = sums + levels.at[l] + (long long)place * FAN + part;
#pragma unroll
        for (int i = 0; i < PART; i += 2) {
            const uint4 two = *reinterpret_cast<const uint4*>(from + i);
            entries[i] = (unsigned long long)two.y << 32 | two.x;
            entries[i + 1] = (unsigned long long)two.w << 32 | two.z;
        }
        place = place * FAN + first_past(entries, target);
    }
    const uint4 four =
        *reinterpret_cast<const uint4*>(priority + (long long)place * FAN + part);
    const unsigned leaves[PART] = {units_of(float_of(four.x)), units_of(float_of(four.y)),
                                   units_of(float_of(four.z)), units_of(float_of(four.w))};
    return place * FAN + first_past(leaves, target);
}
