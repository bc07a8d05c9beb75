// Kernel of replay_write.py. A warp owns a group of FAN neighbouring leaves and a lane one of them: the
// transition of environment e = leaf - slot * envs, so neighbouring lanes copy neighbouring elements.
// A block has the groups of one step. They do not start where its slot does: lanes of other slots stay,
// for the group's sum.
#include "atomics.cuh"
#include "priority.cuh"
#include "replay.cuh"
#include "warp.cuh"

constexpr int THREADS = LG_THREADS, FLOATS = LG_FLOATS, INTS = LG_INTS, LEVELS = LG_LEVELS;
static_assert(FAN == WARP_LANES && THREADS % FAN == 0, "a warp is a group of leaves");

template <int COUNT, typename T>
__device__ inline void copy_fields(const T* __restrict__ from, long long at, T* __restrict__ to,
                                   long long there) {
#pragma unroll(COUNT < 8 ? COUNT : 8)
    for (int i = 0; i < COUNT; ++i) to[there * COUNT + i] = from[at * COUNT + i];
}

// The sum over a warp of differences of units. Halves of 16 bits keep it within 32.
__device__ inline long long warp_total(long long difference) {
    int low = int(difference & 0xFFFF), high = int(difference >> 16);
#pragma unroll
    for (int gap = WARP_LANES / 2; gap > 0; gap /= 2) {
        low += __shfl_xor_sync(ALL_LANES, low, gap);
        high += __shfl_xor_sync(ALL_LANES, high, gap);
    }
    return (long long)high * 65536 + low;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    replay_write_kernel(const float* state_floats, const int* state_ints, const int* action,
                        const float* reward, const bool* terminated, const bool* truncated,
                        const float* next_floats, const int* next_ints, int* head,
                        float* kept_floats, int* kept_ints, float* kept_next_floats,
                        int* kept_next_ints, float* kept_reward, unsigned char* kept_mark,
                        float* priority, unsigned long long* sums, const float* highest, int steps,
                        int slots, int envs, int groups) {
    const unsigned start = head[0];
    const int filled = head[1];
    __syncthreads();
    // After the barrier, so that the last block to come here knows that all have read the head.
    bool last = false;
    if (threadIdx.x == 0) last = arrives_last(reinterpret_cast<unsigned*>(head + 2), gridDim.x);
    const int kept = steps < slots ? steps : slots;
    const unsigned blocks_a_step = gridDim.x / unsigned(kept), step = blockIdx.x / blocks_a_step;
    const unsigned t = unsigned(steps - kept) + step;
    const unsigned slot = (start + t) % unsigned(slots);
    const long long leaf_of_first = (long long)slot * envs;
    const long long leaf = leaf_of_first / FAN * FAN +
                           (long long)(blockIdx.x - step * blocks_a_step) * THREADS + threadIdx.x;
    const long long e = leaf - leaf_of_first;
    const bool owns = e >= 0 && e < envs;
    if (owns) {
        const long long at = (long long)t * envs + e;
        copy_fields<FLOATS>(state_floats, at, kept_floats, leaf);
        copy_fields<INTS>(state_ints, at, kept_ints, leaf);
        copy_fields<FLOATS>(next_floats, at, kept_next_floats, leaf);
        copy_fields<INTS>(next_ints, at, kept_next_ints, leaf);
        kept_reward[leaf] = reward[at];
        kept_mark[leaf] = mark_of(action[at], terminated[at], truncated[at]);
    }
#if LG_PRIORITIZED
    long long more = 0;
    if (owns) {
        const float fresh = *highest;
        more = (long long)units_of(fresh) - units_of(priority[leaf]);
        priority[leaf] = fresh;
    }
    more = warp_total(more);
    if (threadIdx.x % WARP_LANES == 0 && more != 0) {
        const Levels<LEVELS> levels(groups);
        long long place = leaf;
#pragma unroll
        for (int l = 0; l < LEVELS; ++l) {
            place /= FAN;
            add_to(sums + levels.at[l] + place, (unsigned long long)more);
        }
    }
#endif
    if (last) {
        head[0] = int((start + unsigned(steps)) % unsigned(slots));
        head[1] = steps < slots - filled ? filled + steps : slots;
    }
}
