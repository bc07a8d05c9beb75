// Kernel of priority_sample.py. A thread owns a row. The block adds the highest level up in shared
// memory, where every thread finds its place; below, a thread reads all FAN entries of one sum at
// once, as 16-byte pieces, and goes on to the entry that holds its target.
#include "atomics.cuh"
#include "philox.cuh"
#include "priority.cuh"
#include "warp.cuh"

constexpr int THREADS = LG_THREADS, LEVELS = LG_LEVELS, SHARE = TOP / THREADS;
static_assert(LG_FAN == FAN && LG_TOP == TOP, "tree.py lays out the same tree");
static_assert(TOP % THREADS == 0 && THREADS % WARP_LANES == 0, "whole shares and whole warps");

// A place in shared memory for entry i: a gap after each share, so that threads which walk their
// shares side by side are in different banks.
__device__ inline int spaced(int i) { return i + i / SHARE; }

// The first of FAN entries at which what is added up passes `left`, which loses what lies before.
template <typename Entry>
__device__ inline int first_past(const Entry (&entries)[FAN], unsigned long long& left) {
    unsigned long long sum = 0, before = 0;
    int place = 0;
#pragma unroll
    for (int i = 0; i < FAN - 1; ++i) {
        sum += entries[i];
        if (sum <= left) {
            before = sum;
            place = i + 1;
        }
    }
    left -= before;
    return place;
}

__device__ inline int child_of(const unsigned long long* sums, unsigned long long& left) {
    unsigned long long entries[FAN];
#pragma unroll
    for (int i = 0; i < FAN / 2; ++i) {
        const uint4 two = reinterpret_cast<const uint4*>(sums)[i];
        entries[2 * i] = (unsigned long long)two.y << 32 | two.x;
        entries[2 * i + 1] = (unsigned long long)two.w << 32 | two.z;
    }
    return first_past(entries, left);
}

__device__ inline int leaf_of(const float* priority, unsigned long long& left) {
    unsigned entries[FAN];
#pragma unroll
    for (int i = 0; i < FAN / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(priority)[i];
        entries[4 * i] = units_of(float_of(four.x));
        entries[4 * i + 1] = units_of(float_of(four.y));
        entries[4 * i + 2] = units_of(float_of(four.z));
        entries[4 * i + 3] = units_of(float_of(four.w));
    }
    return first_past(entries, left);
}

// Leaves in `ends` the sum of all entries up to each; every thread gets the sum of all.
__device__ inline unsigned long long add_up(const unsigned long long* sums, int count,
                                            unsigned long long* ends, unsigned long long* shares) {
    unsigned long long entries[SHARE], share = 0;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        const int at = threadIdx.x * SHARE + i;
        entries[i] = at < count ? sums[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < SHARE; ++i) share += entries[i];
    shares[threadIdx.x] = share;
    __syncthreads();
    unsigned long long total = 0, sum = 0;
#pragma unroll 16
    for (int thread = 0; thread < THREADS; ++thread) {
        total += shares[thread];
        sum += thread < int(threadIdx.x) ? shares[thread] : 0;
    }
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        sum += entries[i];
        ends[spaced(threadIdx.x * SHARE + i)] = sum;
    }
    __syncthreads();
    return total;
}

// The leaf that holds the target, which is below the total.
__device__ inline int find(unsigned long long target, const float* priority,
                           const unsigned long long* sums, const Levels<LEVELS>& levels,
                           const unsigned long long* ends) {
    int place = 0;
    // The entries whose end is not past the target are the first ones: count them by halves.
#pragma unroll
    for (int half = TOP / 2; half > 0; half /= 2)
        if (ends[spaced(place + half - 1)] <= target) place += half;
    if (place > 0) target -= ends[spaced(place - 1)];
#pragma unroll
    for (int l = LEVELS - 2; l >= 0; --l)
        place = place * FAN + child_of(sums + levels.at[l] + (long long)place * FAN, target);
    return place * FAN + leaf_of(priority + (long long)place * FAN, target);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    priority_sample_kernel(const float* __restrict__ priority,
                           const unsigned long long* __restrict__ sums, unsigned long long* clock,
                           int groups, int rows, unsigned long long seed,
                           unsigned long long stride, int* index, float* drawn, float* least) {
    __shared__ unsigned long long ends[TOP + THREADS], shares[THREADS];
    __shared__ float smallest[THREADS / WARP_LANES];
    const unsigned b = blockIdx.x * THREADS + threadIdx.x;
    const unsigned long long now = clock[0];
    const uint4 words = draw(seed, SAMPLE, b, now);
    const Levels<LEVELS> levels(groups);
    const unsigned long long total = add_up(sums + levels.at[LEVELS - 1], levels.top, ends, shares);
    // After a barrier, so that the last block to come here knows that all have read the clock.
    bool last = false;
    if (threadIdx.x == 0) last = arrives_last(reinterpret_cast<unsigned*>(clock + 1), gridDim.x);
    float mine = infinity_f32();
    if (b < unsigned(rows)) {
        int leaf = -1;
        mine = 0.f;
        if (total > 0) {
            leaf = find(target_of(b, words.x, words.y, stride, total), priority, sums, levels, ends);
            mine = priority[leaf];
        }
        index[b] = leaf;
        drawn[b] = mine;
    }
    const float largest_negative = warp_max(-mine);
    if (threadIdx.x % WARP_LANES == 0) smallest[threadIdx.x / WARP_LANES] = -largest_negative;
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = smallest[0];
        for (int w = 1; w < THREADS / WARP_LANES; ++w) all = smallest[w] < all ? smallest[w] : all;
        least[blockIdx.x] = all;
        if (last) clock[0] = now + 1;
    }
}
