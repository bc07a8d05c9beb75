// Kernel of priority_sample.py. A few neighbouring lanes own a row (priority_search.cuh); a block has GROUP
// rows, and leaves the smallest priority of them.
#include "atomics.cuh"
#include "philox.cuh"
#include "priority_search.cuh"

constexpr int ROWS = LG_ROWS, THREADS = ROWS * MEMBERS, LEVELS = LG_LEVELS;
static_assert(LG_FAN == FAN && LG_TOP == TOP && LG_MEMBERS == MEMBERS, "tree.py lays out the same tree");

extern "C" __global__ void __launch_bounds__(THREADS)
    priority_sample_kernel(const float* __restrict__ priority,
                           const unsigned long long* __restrict__ sums, unsigned long long* clock,
                           int groups, int rows, unsigned long long seed,
                           unsigned long long stride, int* index, float* drawn, float* least) {
    __shared__ unsigned long long ends[TOP], of_warps[THREADS / WARP_LANES];
    __shared__ float smallest[THREADS / WARP_LANES];
    const unsigned b = blockIdx.x * ROWS + threadIdx.x / MEMBERS;
    const unsigned long long now = clock[0];
    const uint4 words = draw(seed, SAMPLE, b, now);
    const Levels<LEVELS> levels(groups);
    const unsigned long long total =
        add_up<THREADS>(sums + levels.at[LEVELS - 1], levels.top, ends, of_warps);
    // After a barrier, so that the last block to come here knows that all have read the clock.
    bool last = false;
    if (threadIdx.x == 0) last = arrives_last(reinterpret_cast<unsigned*>(clock + 1), gridDim.x);
    const int found = find(target_of(b, words.x, words.y, stride, total), priority, sums, levels, ends);
    const int leaf = total > 0 ? found : -1;
    const float mine = b >= unsigned(rows) ? infinity_f32() : leaf < 0 ? 0.f : priority[leaf];
    if (b < unsigned(rows) && threadIdx.x % MEMBERS == 0) {
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
