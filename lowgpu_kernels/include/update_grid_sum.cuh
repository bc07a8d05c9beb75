// What a block does once its tiles' gradients are written, in kernels that make all updates of a call
// in one launch (update_grid.cuh). The whole block calls these, except where warps are named.
#pragma once
#include "update_grid.cuh"

union Piece {
    uint4 bits;
    Bf16 of[PIECE];
};

// do(owned, element) for each element that the thread owns and that belongs to a parameter.
template <class Tile, class Do>
__device__ inline void for_owned(const Tile& tile, Do visit) {
#pragma unroll 2
    for (int e = thread_index(); e < ELEMENTS; e += THREADS)
        if (tile.owned[e].place.parameter >= 0) visit(tile.owned[e], e);
}

// The places of what the block owns.
template <class Tile>
__device__ inline void find_places(const Tile& tile) {
    for (int e = thread_index(); e < ELEMENTS; e += THREADS) {
        const int element = blockIdx.x * ELEMENTS + e;
        tile.owned[e].place = element < LG_PARTIAL ? place_of(element) : Place{-1, 0};
    }
}

// The sum of one of the block's statistics, by the warp of that number.
template <int COUNT, class Tile>
__device__ inline void leave_tally(const Tile& tile, int warp, float* tallies) {
    static_assert(WARPS > COUNT, "a warp adds up a statistic, and one more has another task");
    const float* const of = tile.loss_sums + threadIdx.x % WARP_LANES * COUNT + warp;
    const float total = warp_sum(of[0] + of[WARP_LANES * COUNT]);
    if (threadIdx.x % WARP_LANES == 0 && Turn::leads())
        tallies[Turn::home() * round_up(COUNT, 4) + warp] = total;
}

// One warp: the sums of what blocks left of their statistics, in every lane.
template <int COUNT>
__device__ inline void add_tallies(const float* tallies, int vectors, float (&totals)[COUNT]) {
    constexpr int FOURS = (COUNT + 3) / 4;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) totals[k] = 0.f;
    for (int at = threadIdx.x % WARP_LANES; at < vectors; at += WARP_LANES) {
        const float4* const of = reinterpret_cast<const float4*>(tallies) + (long long)at * FOURS;
        float4 four[FOURS];
#pragma unroll
        for (int i = 0; i < FOURS; ++i) four[i] = __ldcg(of + i);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const float4 from = four[k / 4];
            totals[k] += k % 4 == 0 ? from.x : k % 4 == 1 ? from.y : k % 4 == 2 ? from.z : from.w;
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) totals[k] = warp_sum(totals[k]);
}

// The block's share of the gradient added up over the vectors, in order: elements in tile.sums[0], and
// the sum of their squares in squares[blockIdx.x].
template <class Tile>
__device__ inline void add_up(const Tile& tile, const Bf16* partials, int vectors, float* squares) {
    const int thread = thread_index(), lane = thread % WIDE, slice = thread / WIDE;
    const int piece = blockIdx.x * A_BLOCK + lane;
    if (lane < A_BLOCK && slice < SLICES) {
        float of[PIECE] = {};
        const Bf16* const from = partials + (long long)piece * PIECE;
        // Of a piece that belongs to no parameter nothing was written.
        bool wanted = false;
#pragma unroll
        for (int j = 0; j < PIECE; ++j)
            wanted |= tile.owned[lane * PIECE + j].place.parameter >= 0;
        if (wanted)
#pragma unroll 1
            for (int first = slice; first < vectors; first += SLICES * AHEAD) {
                Piece got[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const int at = first + i * SLICES;
                    got[i].bits = make_uint4(0u, 0u, 0u, 0u);
                    if (at < vectors)
                        got[i].bits = __ldcg(reinterpret_cast<const uint4*>(
                            from + (long long)at * LG_PARTIAL));
                }
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                    for (int j = 0; j < PIECE; ++j)
                        of[j] += __uint_as_float(unsigned(got[i].of[j].bits) << 16);
            }
        float4* const to = reinterpret_cast<float4*>(tile.sums + slice * ELEMENTS + lane * PIECE);
        to[0] = make_float4(of[0], of[1], of[2], of[3]);
        to[1] = make_float4(of[4], of[5], of[6], of[7]);
    }
    __syncthreads();
    float square = 0.f;
    for (int e = thread_index(); e < ELEMENTS; e += THREADS) {
        float total = 0.f;
        if (tile.owned[e].place.parameter >= 0)
#pragma unroll
            for (int s = 0; s < SLICES; ++s) total += tile.sums[s * ELEMENTS + e];
        tile.sums[e] = total;
        square = fmaf(total, total, square);
    }
    square = warp_sum(square);
    if (threadIdx.x % WARP_LANES == 0) tile.squares[tile.team.warp] = square;
    __syncthreads();
    if (threadIdx.x == 0) {
        float of_block = 0.f;
        for (int w = 0; w < WARPS; ++w) of_block += tile.squares[w];
        squares[blockIdx.x] = of_block;
    }
}

// The root of the sum of all blocks' squares. One warp of a block asks: all of them together would wait
// for the same few lines.
template <class Tile>
__device__ inline float norm_of(const Tile& tile, const float* squares) {
    if (tile.team.warp == 0) {
        constexpr int A_LANE = (LG_GRID + WARP_LANES - 1) / WARP_LANES;
        float held[A_LANE], total = 0.f;
#pragma unroll
        for (int i = 0; i < A_LANE; ++i) {
            const int at = threadIdx.x % WARP_LANES + i * WARP_LANES;
            held[i] = at < LG_GRID ? __ldcg(squares + at) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < A_LANE; ++i) total += held[i];
        total = warp_sum(total);
        if (threadIdx.x == 0) tile.squares[0] = total;
    }
    __syncthreads();
    return sqrtf(tile.squares[0]);
}
