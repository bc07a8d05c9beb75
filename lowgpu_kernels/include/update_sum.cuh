// The gradients that tiles left of themselves, added up. A warp has 32 neighbouring 16-byte pieces of the
// gradient and every SLICES-th tile; the block's warps add up in order. Where working memory holds a part
// of the tiles at a time, warps go on from the sums they left: the order, and so every bit, is the same.
#pragma once
#include "async_copy.cuh"
#include "block.cuh"
#include "real.cuh"

constexpr int SUM_THREADS = LG_SUM_THREADS, SLICES = SUM_THREADS / 32;
constexpr int AHEAD = LG_AHEAD;

union Piece {
    uint4 bits;
    Real of[PIECE];
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

// Called by whole blocks of SUM_THREADS with SUM_THREADS * AHEAD pieces of shared `memory`. `from` has the
// sums of the tiles before, [SLICES, LG_PARAMETERS], or is null. Where `to` is null, block i writes its part
// of `gradient` and the sum of its squares to squares[i]; elsewhere it leaves the sums so far in `to`, which
// may be `from`: a thread reads what it wrote. Tiles before these are a multiple of SLICES.
__device__ inline void sum_tiles(const Real* __restrict__ partials, int tiles, const float* from, float* to,
                                 uint4* memory, float* __restrict__ gradient,
                                 float* __restrict__ squares) {
    __shared__ float sums[SLICES][32 * PIECE];
    __shared__ float scratch[SLICES];
    static_assert(32 * PIECE <= SUM_THREADS, "a thread an element");
    static_assert(LG_PARAMETERS % PIECE == 0, "whole pieces");
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    const int base = blockIdx.x * 32 * PIECE;
    const int piece = base + lane * PIECE;
    const long long carried = (long long)slice * LG_PARAMETERS + piece;
    float of[PIECE] = {};
    if (from != nullptr && piece < LG_PARAMETERS)
#pragma unroll
        for (int i = 0; i < PIECE; ++i) of[i] = from[carried + i];
    // Through shared memory, because a compiler short of registers waits for one load after another.
    uint4* const mine = memory + threadIdx.x;
    for (int first = slice; first < tiles; first += SLICES * AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int at = first + i * SLICES;
            const bool valid = at < tiles && piece < LG_PARAMETERS;  // zeros otherwise: they add nothing
            start_copy_16(mine + i * SUM_THREADS,
                          valid ? partials + (long long)at * LG_PARAMETERS + piece : partials, valid);
        }
        end_copy_group();
        wait_for_copies_but<0>();  // a thread reads what it copied itself
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            Piece got;
            got.bits = mine[i * SUM_THREADS];
#pragma unroll
            for (int j = 0; j < PIECE; ++j) of[j] += to_float(got.of[j]);
        }
    }
    if (to != nullptr) {
        if (piece < LG_PARAMETERS)
#pragma unroll
            for (int i = 0; i < PIECE; ++i) to[carried + i] = of[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i += 4)
        *reinterpret_cast<float4*>(&sums[slice][lane * PIECE + i]) =
            make_float4(of[i], of[i + 1], of[i + 2], of[i + 3]);
    __syncthreads();
    const int element = base + threadIdx.x;
    float total = 0.f;
    if (threadIdx.x < 32 * PIECE && element < LG_PARAMETERS) {
#pragma unroll
        for (int s = 0; s < SLICES; ++s) total += sums[s][threadIdx.x];
        gradient[element] = total;
    }
    const float square = block_sum(total * total, scratch);
    if (threadIdx.x == 0) squares[blockIdx.x] = square;
}
