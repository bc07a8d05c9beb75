// Kernel of replay_gather.py. A thread owns a row: its window's rewards and marks lie anywhere in the
// ring and are read all at once, then the states at both ends. Neighbouring threads write neighbouring
// rows.
#include "block.cuh"
#include "priority.cuh"
#include "replay.cuh"

constexpr int THREADS = LG_THREADS, STEPS = LG_STEPS, FLOATS = LG_FLOATS, INTS = LG_INTS;

// One block an SM would do: without the 1, ptxas saves on registers and spills around a division.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    replay_gather_kernel(const int* __restrict__ index, const int* __restrict__ head,
                         const float* __restrict__ kept_floats, const int* __restrict__ kept_ints,
                         const float* __restrict__ kept_next_floats,
                         const int* __restrict__ kept_next_ints,
                         const float* __restrict__ kept_reward,
                         const unsigned char* __restrict__ kept_mark,
                         const float* __restrict__ drawn, const float* __restrict__ least, int rows,
                         int groups, int slots, int envs, float gamma, float beta,
                         float* state_floats, int* state_ints, int* action, float* reward,
                         float* discount, float* next_floats, int* next_ints, float* weight) {
    __shared__ float shared[THREADS / WARP_LANES];
    const long long b = (long long)blockIdx.x * THREADS + threadIdx.x;
    const int i = b < rows ? index[b] : -1;
    // First, while the index is on its way: every thread of the block, with a row or without.
    float smallest = 0.f;
    if (drawn != nullptr) {
        float negative = -infinity_f32();
        for (int g = threadIdx.x; g < groups; g += THREADS) {
            const float other = -least[g];
            negative = other > negative ? other : negative;
        }
        smallest = -block_max(negative, shared);
    }
    if (b >= rows) return;  // no barrier and no shuffle follows
    float heavy = nan_f32();
    if (i >= 0) heavy = drawn != nullptr ? weight_of(drawn[b], smallest, beta) : 1.f;
    weight[b] = heavy;
    Window window = {nan_f32(), nan_f32(), -1};
    int taken = 0;
    if (i >= 0) {
        window = window_at<STEPS>(i, head[0], slots, envs, gamma, kept_reward, kept_mark);
        taken = kept_mark[i] >> ACTION_SHIFT;
    }
    gather_fields<FLOATS, 1>(kept_floats, i, state_floats, b);
    gather_fields<INTS, 1>(kept_ints, i, state_ints, b);
    gather_fields<FLOATS, 1>(kept_next_floats, window.last, next_floats, b);
    gather_fields<INTS, 1>(kept_next_ints, window.last, next_ints, b);
    action[b] = taken;
    reward[b] = window.reward;
    discount[b] = window.discount;
}
