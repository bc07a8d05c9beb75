// A block is LG_TEAMS teams of LG_THREADS threads. A team has a tile of its own and waits for its own
// threads only, so that one team multiplies while another waits for memory.
#pragma once
#include "named_barrier.cuh"
#include "warp.cuh"

constexpr int THREADS = LG_THREADS, WARPS = THREADS / WARP_LANES;
constexpr int TEAMS = LG_TEAMS, BLOCK_THREADS = TEAMS * THREADS;
static_assert(THREADS % WARP_LANES == 0 && TEAMS <= 15, "whole warps, and a barrier a team");

__device__ inline int team_index() { return TEAMS == 1 ? 0 : warp_index() / WARPS; }
__device__ inline int team_thread() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
__device__ inline int team_warp() { return TEAMS == 1 ? warp_index() : warp_index() % WARPS; }

__device__ inline void sync_team() {
    if constexpr (TEAMS == 1)
        __syncthreads();
    else
        named_barrier<THREADS>(1 + team_index());
}

// The same, and whether any thread of the team gave true.
__device__ inline bool sync_team_or(bool given) {
    if constexpr (TEAMS == 1)
        return __syncthreads_or(given);
    else
        return named_barrier_or<THREADS>(1 + team_index(), given);
}
