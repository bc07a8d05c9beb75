// The network that a team runs at every step of a rollout, in each of the ways a RolloutTile of
// rollout_tile.py says.
#pragma once
#include "mlp_rows.cuh"
#include "observe_tile.cuh"
#if LG_WARPGROUPS
#include "rollout_ahead.cuh"
#include "rollout_warpgroups.cuh"
#elif LG_RESIDENT
#include "rollout_tile.cuh"
#else
#include "mlp_tile.cuh"
#endif

static_assert(LG_INPUTS == WIDTH, "the network reads the env's rows");

// A Policy has its `team`, the `place` of an element of the input and `y`. `prepare` it once; then, over
// and over: write rows, `show` them, wait for the team, call it, read y. `afresh` gives itself or a seed
// again.
#if LG_WARPGROUPS
struct Policy : Tile {
    using Tile::Tile;

    __device__ void prepare(const float* __restrict__ parameters) const {
        stage<0>(*this, parameters);
        show_to_products();
        __syncthreads();
    }
    __device__ Bf16* place(int r, int c) const { return inputs + swizzled(ROWS, r, c); }
    __device__ void show() const { show_to_products(); }
    __device__ void operator()(const float*) const { forward_from<0>(*this); }

    // By a shuffle, which is not moved out of a loop. Else the compiler works out before the first step
    // where every factor of a product lies, and the keys of all rounds of a draw, and keeps them in
    // registers that the sums need.
    __device__ Policy afresh(uint4* memory) const { return Policy(memory); }
    __device__ unsigned long long afresh(unsigned long long seed) const {
        const unsigned low = __shfl_sync(ALL_LANES, unsigned(seed), 0);
        return (unsigned long long)__shfl_sync(ALL_LANES, unsigned(seed >> 32), 0) << 32 | low;
    }
};
#elif LG_RESIDENT
struct Policy : Tile {
    using Tile::Tile;

    __device__ void prepare(const float* __restrict__ parameters) const {
        stage<0, LAYER_COUNT>(*this, parameters);
        __syncthreads();
    }
    __device__ Real* place(int r, int c) const { return rows.input + r * rows.INPUT + c; }
    __device__ void show() const {}
    __device__ void operator()(const float* __restrict__ parameters) const {
        forward_from<0>(*this, parameters);
    }
    __device__ const Policy& afresh(uint4*) const { return *this; }
    __device__ unsigned long long afresh(unsigned long long seed) const { return seed; }
};
#else
constexpr int ROWS = LG_ROWS;
static_assert(THREADS == MLP_THREADS && TEAMS == 1, "mlp_tile.cuh is for a block");

struct Policy {
    static constexpr int NBYTES = MlpTile<ROWS>::NBYTES;
    const Team team;
    const MlpTile<ROWS> rows;
    float* const y;

    __device__ explicit Policy(uint4* memory) : rows(memory), y(rows.y) {}
    __device__ void prepare(const float*) const {}
    __device__ Real* place(int r, int c) const { return rows.input + r * rows.INPUT + c; }
    __device__ void show() const {}
    __device__ void operator()(const float* __restrict__ parameters) const {
        mlp_tile_forward(rows, parameters, nullptr, ROWS);
    }
    __device__ const Policy& afresh(uint4*) const { return *this; }
    __device__ unsigned long long afresh(unsigned long long seed) const { return seed; }
};
#endif
constexpr int TABLE_ROWS_NBYTES = TEAMS * ROWS * int(sizeof(int));
static_assert(Policy::NBYTES + TABLE_ROWS_NBYTES == LG_BLOCK_NBYTES,
              "rollout_tile.py counts the same shared memory");
