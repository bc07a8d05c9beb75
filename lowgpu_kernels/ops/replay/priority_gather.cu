// Kernel of priority_gather.py: rows are drawn as priority_sample.cu does, a few neighbouring lanes a row,
// and gathered by the same lanes. What the rows' weights are over is known when all blocks have drawn: they
// gather while they wait. The step of the clock is the barrier, so all blocks must be on the GPU at once.
#include "atomics.cuh"
#include "block.cuh"
#include "grid_order.cuh"
#include "memory_order.cuh"
#include "philox.cuh"
#include "priority_search.cuh"
#include "replay.cuh"

constexpr int ROWS = LG_ROWS, THREADS = ROWS * MEMBERS, LEVELS = LG_LEVELS, STEPS = LG_STEPS;
constexpr int FLOATS = LG_FLOATS, INTS = LG_INTS;
static_assert(LG_FAN == FAN && LG_TOP == TOP && LG_MEMBERS == MEMBERS, "tree.py lays out the same tree");

// Thread 0 of every block, behind the block's barrier: the last to come steps the clock on for all.
__device__ inline void arrive(unsigned long long* clock, unsigned long long now) {
    if (!arrives_last(reinterpret_cast<unsigned*>(clock + 1), gridDim.x)) return;
    acquire_all();
    release_store(clock, now + 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    priority_gather_kernel(const float* __restrict__ priority,
                           const unsigned long long* __restrict__ sums, unsigned long long* clock,
                           const int* __restrict__ head, const float* __restrict__ kept_floats,
                           const int* __restrict__ kept_ints,
                           const float* __restrict__ kept_next_floats,
                           const int* __restrict__ kept_next_ints,
                           const float* __restrict__ kept_reward,
                           const unsigned char* __restrict__ kept_mark, int groups, int rows, int slots,
                           int envs, unsigned long long seed, unsigned long long stride, float gamma,
                           float beta, int* index, float* state_floats, int* state_ints, int* action,
                           float* reward, float* discount, float* next_floats, int* next_ints,
                           float* weight, float* least) {
    __shared__ unsigned long long ends[TOP], of_warps[THREADS / WARP_LANES];
    __shared__ float shared[THREADS / WARP_LANES];
    __shared__ unsigned inverse;  // of the bits of the smallest priority
    const int member = threadIdx.x % MEMBERS;
    const bool speaks = member == 0;
    wait_for_grid_in_front();
    let_next_grid_begin();
    const unsigned long long now = clock[0];
    const int newest = head[0];
    const Levels<LEVELS> levels(groups);
    const unsigned long long total =
        add_up<THREADS>(sums + levels.at[LEVELS - 1], levels.top, ends, of_warps);
    const long long apart = (long long)gridDim.x * ROWS, mine = threadIdx.x / MEMBERS;
    const long long home = (long long)blockIdx.x * ROWS;
    float negative = -infinity_f32(), drawn = 0.f;
    int leaf = -1;
    long long last = home;
#pragma unroll 1
    for (long long first = home; first < rows; first += apart) {
        const long long b = first + mine;
        const uint4 words = draw(seed, SAMPLE, unsigned(b), now);
        const unsigned long long target = target_of(unsigned(b), words.x, words.y, stride, total);
        const int found = find(target, priority, sums, levels, ends);
        leaf = total > 0 ? found : -1;
        drawn = leaf < 0 ? 0.f : priority[leaf];
        last = first;
        if (b < rows) {
            negative = -drawn > negative ? -drawn : negative;
            if (speaks) {
                index[b] = leaf;
                weight[b] = drawn;  // until the least is known
            }
        }
        __syncwarp();
    }
    negative = block_max(negative, shared);
    if (threadIdx.x == 0) {
        least[blockIdx.x] = -negative;
        inverse = 0;
        arrive(clock, now);
    }
    // The rows found last are gathered first: they are in registers.
#pragma unroll 1
    for (long long first = last; first >= home; first -= apart) {
        const long long b = first + mine;
        if (b >= rows) continue;
        if (first < last) leaf = index[b];
        Window window = {nan_f32(), nan_f32(), -1};
        int taken = 0;
        if (leaf >= 0) {
            window = window_at<STEPS>(leaf, newest, slots, envs, gamma, kept_reward, kept_mark);
            taken = kept_mark[leaf] >> ACTION_SHIFT;
        }
        gather_fields<FLOATS, MEMBERS>(kept_floats, leaf, state_floats, b, member);
        gather_fields<INTS, MEMBERS>(kept_ints, leaf, state_ints, b, member);
        gather_fields<FLOATS, MEMBERS>(kept_next_floats, window.last, next_floats, b, member);
        gather_fields<INTS, MEMBERS>(kept_next_ints, window.last, next_ints, b, member);
        if (!speaks) continue;
        action[b] = taken;
        reward[b] = window.reward;
        discount[b] = window.discount;
    }
    if (threadIdx.x == 0)
        while (acquire_load(clock) == now) {
        }
    __syncthreads();
    // Bits of numbers above 0 are in their order. Not by shuffles, as thread 0 comes out of a loop.
    for (int g = threadIdx.x; g < int(gridDim.x); g += THREADS)
        raise_to(&inverse, ~bits_of(__ldcg(least + g)));
    __syncthreads();
    const float smallest = float_of(~inverse);
    if (!speaks) return;
#pragma unroll 1
    for (long long first = last; first >= home; first -= apart) {
        const long long b = first + mine;
        if (b >= rows) continue;
        if (first < last) drawn = weight[b];
        weight[b] = total > 0 ? weight_of(drawn, smallest, beta) : nan_f32();
    }
}
