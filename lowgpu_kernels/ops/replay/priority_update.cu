// Kernels of priority_update.py. A thread owns a row; its leaf and the sums above lie anywhere. Sums
// are integers changed by atomic additions, so rows may come in any order. Which of several rows
// with one index counts must not depend on that order: where indices do not decrease it is the one
// whose neighbour has another index. Elsewhere each row claims its leaf first.
#include "atomics.cuh"
#include "grid_order.cuh"
#include "priority.cuh"
#include "warp.cuh"

constexpr int THREADS = LG_THREADS, LEVELS = LG_LEVELS;
static_assert(THREADS % WARP_LANES == 0, "whole warps");

// A claimed leaf: the sign bit, which no priority has, and the row. A later row's claim is larger.
constexpr unsigned CLAIM = 0x80000000u;

__device__ inline void add_above(unsigned long long* sums, int groups, int leaf,
                                 unsigned long long more) {
    const Levels<LEVELS> levels(groups);
    int place = leaf;
#pragma unroll
    for (int l = 0; l < LEVELS; ++l) {
        place /= FAN;
        add_to(sums + levels.at[l] + place, more);
    }
}

// The largest row that has an index leaves its claim; whoever comes first takes the old priority out
// of the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    claim_kernel(const int* __restrict__ index, float* priority, unsigned long long* sums, int rows,
                 int groups) {
    wait_for_grid_in_front();
    let_next_grid_begin();
    const unsigned b = blockIdx.x * THREADS + threadIdx.x;
    if (b >= unsigned(rows)) return;  // no barrier and no shuffle follows
    const int leaf = index[b];
    if (leaf < 0) return;
    const unsigned before = raise_to(reinterpret_cast<unsigned*>(priority) + leaf, CLAIM | b);
    if (before < CLAIM) add_above(sums, groups, leaf, -(unsigned long long)units_of(float_of(before)));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    settle_kernel(const int* __restrict__ index, const float* __restrict__ error, float* priority,
                  unsigned long long* sums, float* highest, int rows, int groups, float alpha,
                  float eps) {
    wait_for_grid_in_front();
    let_next_grid_begin();
    const unsigned b = blockIdx.x * THREADS + threadIdx.x;
    const int leaf = b < unsigned(rows) ? index[b] : -1;
    float fresh = 0.f;
    if (leaf >= 0) {
#if LG_IN_ORDER
        const bool counts = b + 1 == unsigned(rows) || index[b + 1] != leaf;
        const unsigned before = counts ? units_of(priority[leaf]) : 0;
#else
        // Nobody else writes this leaf once its claim is this row's; a priority has no sign bit.
        const bool counts = reinterpret_cast<unsigned*>(priority)[leaf] == (CLAIM | b);
        const unsigned before = 0;
#endif
        if (counts) {
            fresh = priority_of(error[b], alpha, eps);
            priority[leaf] = fresh;
            add_above(sums, groups, leaf, (unsigned long long)units_of(fresh) - before);
        }
    }
    // All lanes of a warp; few warps find more than the highest there is, so few wait for each other.
    const float largest = warp_max(fresh);
    if (threadIdx.x % WARP_LANES == 0 && largest > *highest)
        raise_to(reinterpret_cast<unsigned*>(highest), bits_of(largest));
}
