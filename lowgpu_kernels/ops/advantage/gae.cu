// Kernels of gae.py for few environments. A block owns 2^lane_bits environments and walks back through
// time in tiles, a group of steps a thread; chunk 0 is the latest. Lanes of a warp hold neighbouring
// environments, so every load is a coalesced row, all of a group's are in flight at once, and memory is
// passed over once. A group is an affine map of the advantage behind it: threads compose the maps of
// their warp, leave the warp's map in shared memory, walk those behind theirs, and fill their group in.
#include "block.cuh"
#include "grid_order.cuh"

constexpr int GROUP = LG_GROUP, THREADS = LG_THREADS, MERGE_THREADS = LG_MERGE_THREADS;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr bool LIMITS = LG_LIMITS;  // whether truncated and final_value are given
static_assert(THREADS % WARP_LANES == 0 && MERGE_THREADS % WARP_LANES == 0, "whole warps");

struct Map {
    float offset, slope;  // a slope below 0 stands for an episode's end: nothing behind it counts

    // Select, not a slope of 0: 0 * NaN is NaN.
    __device__ float operator()(float ahead) const {
        return slope < 0.f ? offset : offset + slope * ahead;
    }
    __device__ Map after(const Map& later) const {
        if (slope < 0.f) return *this;
        return {(*this)(later.offset), later.slope < 0.f ? later.slope : slope * later.slope};
    }
};

struct Moments {
    float count = 0.f, mean = 0.f, m2 = 0.f;

    // Chan, Golub & LeVeque 1979, eq. 2.1; either may be empty.
    __device__ void add(const Moments& other) {
        if (count == 0.f) {
            *this = other;
        } else if (other.count != 0.f) {
            const float all = count + other.count, part = other.count / all, away = other.mean - mean;
            mean += away * part;
            m2 += other.m2 + away * away * (count * part);
            count = all;
        }
    }
};

// The moments of every thread's together, for every thread. Distances are from one of the values, so
// equal values have a mean without rounding. `shared` holds two floats a warp.
__device__ inline Moments merged(const Moments& mine, float one, float* shared) {
    float sums[2] = {mine.count, mine.count > 0.f ? mine.count * (mine.mean - one) : 0.f};
    block_sum(sums, shared);
    const float mean = one + sums[1] / sums[0], away = mine.mean - mean;
    const float m2 = mine.count > 0.f ? mine.m2 + mine.count * away * away : 0.f;
    return {sums[0], mean, block_sum(m2, shared)};
}

// The element so many rows of `row_nbytes` before: one multiply-add an address.
template <class T>
__device__ inline const T* rows_before(const T* at, int rows, int row_nbytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(at) - (long long)rows * row_nbytes);
}
template <class T>
__device__ inline T* rows_before(T* at, int rows, int row_nbytes) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(at) - (long long)rows * row_nbytes);
}

// A few steps of one environment, the latest first; `held` of them are there. What lies past those
// says nothing: the groups that would read it lie before the first step.
struct Group {
    float advantage[GROUP];  // until it is filled in, the step's own error
    float value[GROUP];
    bool ended[GROUP];

    // `next` is the value behind the latest step, which the pointers point at. They are not
    // __restrict__: another grid may still write there when this one begins.
    __device__ void read(const float* reward, const float* values, const unsigned char* terminated,
                         const unsigned char* truncated, const float* final_value, int envs, int held,
                         float next, float gamma) {
        unsigned char limit[GROUP];
        const int nbytes = envs * int(sizeof(float));
        // No load here waits for another: past `held` the earliest step is read again, since a branch
        // would split them up.
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const int back = min(k, held - 1);
            advantage[k] = *rows_before(reward, back, nbytes);
            value[k] = *rows_before(values, back, nbytes);
            ended[k] = *rows_before(terminated, back, envs);
            limit[k] = LIMITS ? *rows_before(truncated, back, envs) : 0;
        }
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const float following =
                limit[k] ? *rows_before(final_value, min(k, held - 1), nbytes) : next;
            advantage[k] = advantage[k] + (ended[k] ? 0.f : gamma * following) - value[k];
            ended[k] = ended[k] || limit[k];
            next = value[k];
        }
    }

    __device__ Map map(float decay) const {
        float offset = 0.f, slope = 1.f;
        bool cut = false;
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            offset = advantage[k] + (ended[k] ? 0.f : decay * offset);
            slope *= decay;  // the same for all, and no more than a constant
            cut = cut || ended[k];
        }
        return {offset, cut ? -1.f : slope};
    }

    __device__ void fill(float* advantages, float* returns, int envs, int held, float ahead,
                         float decay) {
        const int nbytes = envs * int(sizeof(float));
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            ahead = advantage[k] = advantage[k] + (ended[k] ? 0.f : decay * ahead);
            if (k < held) {
                *rows_before(advantages, k, nbytes) = ahead;
                *rows_before(returns, k, nbytes) = ahead + value[k];
            }
        }
    }

    __device__ Moments moments(int held) const {
        float away = 0.f, squares = 0.f;
#pragma unroll
        for (int k = 1; k < GROUP; ++k) away += k < held ? advantage[k] - advantage[0] : 0.f;
        const float mean = advantage[0] + away / float(held);
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const float distance = k < held ? advantage[k] - mean : 0.f;
            squares += distance * distance;
        }
        return {float(held), mean, squares};
    }
};

__device__ inline Map from_lane(const Map& mine, int lane) {
    return {__shfl_sync(ALL_LANES, mine.offset, lane), __shfl_sync(ALL_LANES, mine.slope, lane)};
}

extern "C" __global__ void __launch_bounds__(THREADS, LG_RESIDENT)
    gae_scan_kernel(const float* reward, const float* value, const float* last_value,
                    const unsigned char* terminated, const unsigned char* truncated,
                    const float* final_value, float gamma, float lam, int steps, int envs,
                    int lane_bits, float* advantage, float* returns, float* partials) {
    // Two tiles' maps: who is a tile ahead writes where nobody reads any more.
    __shared__ Map maps[2][WARPS][WARP_LANES];
    __shared__ float sums[2 * WARPS], one;
    wait_for_grid_in_front();
    let_next_grid_begin();
    const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
    const int chunk = threadIdx.x >> lane_bits, tile = (blockDim.x >> lane_bits) * GROUP;
    const int warp = warp_index(), warps = blockDim.x / WARP_LANES, of_warp = threadIdx.x % WARP_LANES;
    const long long env = (long long)blockIdx.x * lanes + lane;
    const float decay = gamma * lam;
    Group group;
    Moments moments;
    float carried = 0.f;
    for (int left = steps, half = 0; left > 0; left -= tile, half ^= 1) {
        // Steps up to the end of this thread's group; the first tile in time may leave it none.
        const int mine = left - chunk * GROUP, held = env < envs ? max(min(mine, GROUP), 0) : 0;
        const size_t at = size_t(max(mine, 1) - 1) * envs + env;
        Map through = {0.f, 1.f};
        if (held > 0) {
            const float next = mine < steps ? value[at + envs] : last_value[env];
            group.read(reward + at, value + at, terminated + at, truncated + at, final_value + at, envs,
                       held, next, gamma);
            through = group.map(decay);
        }
        // The last step's advantage is its own error: known before any other.
        if (left == steps && threadIdx.x == 0) one = group.advantage[0];
        for (int gap = lanes; gap < WARP_LANES; gap *= 2) {
            const Map other = from_lane(through, max(of_warp - gap, 0));
            if (of_warp >= gap) through = through.after(other);
        }
        if (of_warp >= WARP_LANES - lanes) maps[half][warp][lane] = through;
        const Map behind = from_lane(through, max(of_warp - lanes, 0));
        __syncthreads();
        float ahead = carried;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float through_that = maps[half][w][lane](ahead);
            ahead = w < warp ? through_that : ahead;
        }
        carried = ahead;
        if (left > tile)
            for (int w = warp; w < warps; ++w) carried = maps[half][w][lane](carried);
        if (of_warp >= lanes) ahead = behind(ahead);
        if (held > 0) {
            group.fill(advantage + at, returns + at, envs, held, ahead, decay);
            moments.add(group.moments(held));
        }
    }
    moments = merged(moments, one, sums);
    if (threadIdx.x == 0) {
        partials[3 * blockIdx.x] = moments.count;
        partials[3 * blockIdx.x + 1] = moments.mean;
        partials[3 * blockIdx.x + 2] = moments.m2;
    }
}

// One block; a thread takes every MERGE_THREADS-th partial result.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    gae_merge_kernel(const float* partials, int count, float* moments) {
    __shared__ float sums[2 * MERGE_THREADS / WARP_LANES];
    wait_for_grid_in_front();
    let_next_grid_begin();
    Moments mine;
    for (int i = threadIdx.x; i < count; i += MERGE_THREADS)
        mine.add({partials[3 * i], partials[3 * i + 1], partials[3 * i + 2]});
    const Moments all = merged(mine, count > 0 ? partials[1] : 0.f, sums);
    if (threadIdx.x == 0) {
        moments[0] = count > 0 ? all.mean : 0.f;
        moments[1] = count > 0 ? sqrtf(all.m2 / all.count) : 0.f;
    }
}
