// A block is LG_TEAMS teams of LG_THREADS threads. A team has a tile of its own and waits for its own
// threads only, so that one team multiplies while another waits for memory.
#pragma once
#include "named_barrier.cuh"
#include "warp.cuh"

constexpr int THREADS = LG_THREADS, WARPS = THREADS / WARP_LANES;
constexpr int TEAMS = LG_TEAMS, BLOCK_THREADS = TEAMS * THREADS;
static_assert(THREADS % WARP_LANES == 0 && TEAMS <= 15, "whole warps, and a barrier a team");

// A thread's team. Make it once, at the start of a kernel: that takes a shuffle, after which the
// compiler sees that the lanes of a warp agree on both numbers.
struct Team {
    static constexpr int SIZE = THREADS;
    const int index, warp;  // of the team in its block, of the warp in its team

    __device__ Team()
        : index(TEAMS == 1 ? 0 : warp_index() / WARPS),
          warp(TEAMS == 1 ? warp_index() : warp_index() % WARPS) {}

    static __device__ int thread() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }

    __device__ void sync() const {
        if constexpr (TEAMS == 1)
            __syncthreads();
        else
            named_barrier<THREADS>(1 + index);
    }

    // The same, and whether any thread of the team gave true.
    __device__ bool sync_or(bool given) const {
        if constexpr (TEAMS == 1)
            return __syncthreads_or(given);
        else
            return named_barrier_or<THREADS>(1 + index, given);
    }
};
