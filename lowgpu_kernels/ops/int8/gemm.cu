// Kernel of gemm.py where warps multiply, for any rows: a block makes LG_ROWS by LG_COLUMNS of the
// result, of the share of the terms that blockIdx.y says. All threads fetch 64 terms of the block's rows
// of both factors at once, LG_WIDTH bytes a copy, LG_STAGES - 1 steps ahead; in shared memory the four
// pieces of 16 bytes of a row are in an order that depends on the row, so that eight rows of one piece
// lie in different banks. A warp multiplies WARP_ROWS by WARP_COLUMNS. Blocks are dealt in bands of BAND
// neighbouring rows of tiles, so that blocks at work share what the L2 cache holds.
#include "int8_result.cuh"
#include "narrow_copy.cuh"

constexpr int ROWS = LG_ROWS, COLUMNS = LG_COLUMNS, TERMS = 64, STAGES = LG_STAGES, WIDTH = LG_WIDTH;
constexpr int DOWN = LG_WARPS_DOWN, ACROSS = LG_WARPS_ACROSS, THREADS = DOWN * ACROSS * WARP_LANES;
constexpr int WARP_ROWS = ROWS / DOWN, WARP_COLUMNS = COLUMNS / ACROSS;
constexpr int BLOCKS_DOWN = WARP_ROWS / 16, FRAGMENTS = WARP_COLUMNS / 8;
constexpr int A_NBYTES = ROWS * TERMS, STAGE_NBYTES = (ROWS + COLUMNS) * TERMS, BAND = 8;
constexpr int NBYTES = STAGES * STAGE_NBYTES + COLUMNS * int(sizeof(float2));
static_assert(WARP_ROWS % 16 == 0 && WARP_COLUMNS % 16 == 0, "whole fragments");
static_assert(NBYTES == LG_NBYTES, "gemm_tile.py counts the same shared memory");

// Bytes in front of a row's piece of 16 bytes in a factor in shared memory.
__device__ inline int piece_at(int row, int piece) { return row * TERMS + (piece ^ row / 2 % 4) * 16; }

// A part of `rows` rows of a factor from `from` on, `terms` of each left; rows and terms past the end are
// zeros.
template <int TILE_ROWS>
__device__ inline void fetch(unsigned char* to, const Int8* from, int rows, int terms, int stride) {
    constexpr int MOST = WIDTH == 1 ? 16 : WIDTH, OF_ROW = TERMS / MOST, COPIES = TILE_ROWS * OF_ROW;
#pragma unroll(WIDTH == 16 ? 4 : 1)
    for (int pass = 0; pass < (COPIES + THREADS - 1) / THREADS; ++pass) {
        const int i = pass * THREADS + threadIdx.x, row = i / OF_ROW, term = i % OF_ROW * MOST;
        if (COPIES % THREADS != 0 && i >= COPIES) break;
        unsigned char* const at = to + piece_at(row, term / 16) + term % 16;
        const Int8* const of = from + (long long)row * stride + term;
        if constexpr (WIDTH == 1) {
            unsigned words[4] = {};
#pragma unroll
            for (int b = 0; b < 16; ++b)
                if (row < rows && term + b < terms) words[b / 4] |= unsigned((unsigned char)of[b]) << b % 4 * 8;
            *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
            const bool valid = row < rows && term < terms;
            const void* const source = valid ? of : from;
            if constexpr (WIDTH == 16)
                start_copy_16(at, source, valid);
            else
                start_narrow_copy<WIDTH>(at, source, valid);
        }
    }
}

// Where a lane's rows of the warp's parts of a stage start, as load_matrices takes them.
struct Lane {
    int a, b;

    __device__ Lane(int warp_row, int warp_column) {
        const int lane = threadIdx.x % WARP_LANES;
        a = piece_at(warp_row + lane % 16, lane / 16);
        // Pieces of eight columns, then of the next eight.
        b = A_NBYTES + piece_at(warp_column + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
};

// Sixteen rows further on pieces are in the same order, and two pieces on is the other bit.
__device__ inline void multiply(const unsigned char* stage, const Lane& lane,
                                int (&sums)[BLOCKS_DOWN][FRAGMENTS][4]) {
#pragma unroll
    for (int piece = 0; piece < TERMS / 16; piece += 2) {
        const unsigned char *const a = stage + (lane.a ^ piece * 16), *const b = stage + (lane.b ^ piece * 16);
        unsigned left[BLOCKS_DOWN][4];
#pragma unroll
        for (int r = 0; r < BLOCKS_DOWN; ++r) load_matrices(left[r], a + r * 16 * TERMS);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f += 2) {
            unsigned right[4];
            load_matrices(right, b + f * 8 * TERMS);
#pragma unroll
            for (int r = 0; r < BLOCKS_DOWN; ++r) {
                multiply_add_int8(sums[r][f], left[r], right[0], right[1]);
                multiply_add_int8(sums[r][f + 1], left[r], right[2], right[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LG_BLOCKS_A_SM)
    gemm(const Int8* a, const Int8* b, const float* of_row, const float* of_column, const float* bias,
         float scale, Result* result, int rows, int columns, int summed) {
    extern __shared__ __align__(1024) uint4 memory[];
    unsigned char* const stages = reinterpret_cast<unsigned char*>(memory);
    float2* const terms = reinterpret_cast<float2*>(stages + STAGES * STAGE_NBYTES);
    const Scales scales{of_row, of_column, bias, scale};
    const int down = (rows - 1) / ROWS + 1, across = (columns - 1) / COLUMNS + 1, tile = blockIdx.x;
    const int band = tile / (BAND * across), within = tile % (BAND * across);
    const int height = min(BAND, down - band * BAND);
    const int first_row = (band * BAND + within % height) * ROWS, first_column = within / height * COLUMNS;
    const int steps = (summed + TERMS - 1) / TERMS, share = (steps + gridDim.y - 1) / gridDim.y;
    const int first = min(int(blockIdx.y) * share, steps), count = min(share, steps - first);
    a += (long long)first_row * summed + first * TERMS;
    b += (long long)first_column * summed + first * TERMS;

    const auto fetch_step = [&](int step) {
        if (step < count) {
            unsigned char* const to = stages + step % STAGES * STAGE_NBYTES;
            const int at = step * TERMS, left = summed - first * TERMS - at;
            fetch<ROWS>(to, a + at, rows - first_row, left, summed);
            fetch<COLUMNS>(to + A_NBYTES, b + at, columns - first_column, left, summed);
        }
        end_copy_group();
    };
    if constexpr (SCALED)
        for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
            terms[i] = scales.column_terms(first_column + i, columns);
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; ++step) fetch_step(step);

    const int warp = warp_index(), warp_row = warp / ACROSS * WARP_ROWS, warp_column = warp % ACROSS * WARP_COLUMNS;
    const Lane lane(warp_row, warp_column);
    int sums[BLOCKS_DOWN][FRAGMENTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        wait_for_copies_but<STAGES - 2>();
        __syncthreads();
        // Into the stage that the step before has read.
        fetch_step(step + STAGES - 1);
        multiply(stages + step % STAGES * STAGE_NBYTES, lane, sums);
    }
    __syncthreads();
    // Shares of the terms lie one after another; gemm_finish.cu adds them up.
    result += (long long)blockIdx.y * rows * columns + (long long)first_row * columns + first_column;
    const ResultTile to{result, rows - first_row, columns - first_column, columns, terms};
#pragma unroll
    for (int r = 0; r < BLOCKS_DOWN; ++r) {
        const int row = warp_row + r * 16, of_lane = first_row + row + threadIdx.x % WARP_LANES / 4;
        const float factors[2] = {scales.row_factor(of_lane, rows), scales.row_factor(of_lane + 8, rows)};
        store_fragments<FRAGMENTS>(to, row, warp_column, sums[r], factors);
    }
}
