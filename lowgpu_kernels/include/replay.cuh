// The replay ring's scalar steps. Twin of ops/replay/ring.py, which says how the ring lies.
#pragma once
#include "host.cuh"

constexpr int TERMINATED_BIT = 1, TRUNCATED_BIT = 2, END_BITS = 3, ACTION_SHIFT = 2;

// A transition's action and flags in a byte.
__host__ __device__ inline unsigned char mark_of(int action, bool terminated, bool truncated) {
    return (unsigned char)(action << ACTION_SHIFT | (truncated ? TRUNCATED_BIT : 0) |
                           (terminated ? TERMINATED_BIT : 0));
}

// Steps of an environment from `slot` to the newest one, both counted. `head` is the slot after it.
__host__ __device__ inline int steps_ahead(int slot, int head, int slots) {
    const int ahead = head - slot;
    return ahead > 0 ? ahead : ahead + slots;
}

// An integer in [0, count) of two random words.
__host__ __device__ inline unsigned uniform_of(unsigned high, unsigned low, unsigned count) {
    const unsigned long long low_part = (unsigned long long)low * count >> 32;
    return unsigned(((unsigned long long)high * count + low_part) >> 32);
}

// A transition over up to STEPS steps: the return, what the value of the state led to counts for, and
// the index of the transition that led there.
struct Window {
    float reward, discount;
    int last;
};

// The window that starts at `index`. It ends with the episode, or with the newest step.
template <int STEPS>
__host__ __device__ inline Window window_at(int index, int head, int slots, int envs, float gamma,
                                            const float* kept_reward, const unsigned char* kept_mark) {
    const int slot = int(unsigned(index) / unsigned(envs)), e = index - slot * envs;
    const int ahead = steps_ahead(slot, head, slots);
    const int held = ahead < STEPS ? ahead : STEPS;
    int at[STEPS];
    float rewards[STEPS];
    unsigned char marks[STEPS];
    // No load waits for another: past `held` the last step is read again, since a branch on what a
    // step says would make them follow each other.
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int k = 0; k < STEPS; ++k) {
        const int step = k < held ? k : held - 1;
        const int there = step < slots - slot ? slot + step : slot + step - slots;
        at[k] = there * envs + e;
        rewards[k] = kept_reward[at[k]];
        marks[k] = kept_mark[at[k]];
    }
    Window window = {0.f, 1.f, index};
    bool open = true;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int k = 0; k < STEPS; ++k) {
        if (!open || k >= held) continue;
        window.reward = window.reward + window.discount * rewards[k];
        // Select, not multiply: what nothing follows is exactly 0.
        window.discount = marks[k] & TERMINATED_BIT ? 0.f : window.discount * gamma;
        window.last = at[k];
        open = (marks[k] & END_BITS) == 0;
    }
    return window;
}

// A lane's part of row `at` of `kept`, or of zeros below 0, to row b; LANES neighbours share a row.
template <int COUNT, int LANES, typename T>
__host__ __device__ inline void gather_fields(const T* __restrict__ kept, long long at,
                                              T* __restrict__ out, long long b, int lane = 0) {
#ifdef __CUDACC__
    constexpr int TURNS = (COUNT + LANES - 1) / LANES;
#pragma unroll(TURNS < 8 ? TURNS : 8)
#endif
    for (int i = lane; i < COUNT; i += LANES) out[b * COUNT + i] = at < 0 ? T(0) : kept[at * COUNT + i];
}
