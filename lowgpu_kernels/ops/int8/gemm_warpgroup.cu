// Kernel of gemm.py where warpgroups multiply (sm_90a), for rows that start at multiples of 16 bytes.
//
// A block stays and takes tiles of 128 rows by LG_COLUMNS columns of the result, one after another. Its
// last warp fetches: one lane starts the copies of 128 terms of the tile's rows of both factors into
// one of LG_STAGES stages, and is ahead by as many, across tiles. Two warpgroups multiply, each half of
// the tile's rows, and store while the next tile's factors come. LG_CLUSTER blocks have neighbouring rows
// and the same columns: each fetches its rows of `a` for itself and its part of the rows of `b` for all.
// Tiles are taken in bands of BAND neighbouring rows of tiles, so that blocks at work share what the L2
// cache holds.
#include "int8_result.cuh"
#include "named_barrier.cuh"
#include "tensor_copy.cuh"

constexpr int ROWS = 128, COLUMNS = LG_COLUMNS, TERMS = 128, STAGES = LG_STAGES, CLUSTER = LG_CLUSTER;
constexpr int GROUPS = 2, GROUP_ROWS = ROWS / GROUPS, FRAGMENTS = COLUMNS / 8, INSTRUCTION_TERMS = 32;
constexpr int MULTIPLYING = GROUPS * 128, MULTIPLYING_WARPS = MULTIPLYING / WARP_LANES;
constexpr int THREADS = MULTIPLYING + WARP_LANES;
constexpr int A_NBYTES = ROWS * TERMS, B_NBYTES = COLUMNS * TERMS, STAGE_NBYTES = A_NBYTES + B_NBYTES;
constexpr int PART_ROWS = COLUMNS / CLUSTER, BAND = LG_BAND;
static_assert(PART_ROWS <= 256 && GROUP_ROWS == 64, "what a box and a product can hold");
static_assert(COLUMNS <= MULTIPLYING, "a thread fetches the terms of a column");

struct Stages {
    static constexpr int TERMS_NBYTES = 2 * COLUMNS * int(sizeof(float2));
    static constexpr int NBYTES = STAGES * STAGE_NBYTES + TERMS_NBYTES + 2 * STAGES * int(sizeof(PhaseBarrier));

    unsigned char* const factors;  // [STAGES]: [ROWS][TERMS] of a, then [COLUMNS][TERMS] of b
    float2* const terms;           // [2][COLUMNS], of one tile and of the next
    PhaseBarrier* const full;      // [STAGES], by the copies
    PhaseBarrier* const empty;     // [STAGES], by the warps that have multiplied

    __device__ explicit Stages(uint4* memory)
        : factors(reinterpret_cast<unsigned char*>(memory)),
          terms(reinterpret_cast<float2*>(factors + STAGES * STAGE_NBYTES)),
          full(reinterpret_cast<PhaseBarrier*>(terms + 2 * COLUMNS)),
          empty(full + STAGES) {}
};
static_assert(Stages::NBYTES == LG_NBYTES, "gemm_tile.py counts the same shared memory");

// A stage, and the parity of its phase in this round through the stages.
struct Turn {
    int stage = 0, parity = 0;

    __device__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The tiles of a cluster, all blocks' rows together.
struct Tiles {
    const int down, across, count;

    __device__ Tiles(int rows, int columns)
        : down((rows - 1) / (CLUSTER * ROWS) + 1), across((columns - 1) / COLUMNS + 1), count(down * across) {}

    __device__ int2 place(int tile) const {
        const int band = tile / (BAND * across), within = tile % (BAND * across);
        const int height = min(BAND, down - band * BAND);
        return make_int2((band * BAND + within % height) * CLUSTER * ROWS, within / height * COLUMNS);
    }
};

// The last warp of a block; its first lane starts the copies.
__device__ inline void fetch(const Stages& stages, const TensorMap& a, const TensorMap& b,
                             const Tiles& tiles, int blocks) {
    const int rank = CLUSTER == 1 ? 0 : block_in_cluster();
    // Every stage is empty at first.
    Turn turn{0, 1};
    for (int tile = blockIdx.x / CLUSTER; tile < tiles.count; tile += gridDim.x / CLUSTER) {
        const int2 place = tiles.place(tile);
        for (int block = 0; block < blocks; ++block) {
            unsigned char* const to = stages.factors + turn.stage * STAGE_NBYTES;
            PhaseBarrier* const full = stages.full + turn.stage;
            wait_for_phase(stages.empty + turn.stage, turn.parity);
            if (threadIdx.x == MULTIPLYING) {
                arrive_expecting(full, STAGE_NBYTES);
                start_box_copy(to, a, place.x + rank * ROWS, block * TERMS, full);
                if constexpr (CLUSTER == 1)
                    start_box_copy(to + A_NBYTES, b, place.y, block * TERMS, full);
                else
                    start_box_copies(to + A_NBYTES + rank * PART_ROWS * TERMS, b,
                                     place.y + rank * PART_ROWS, block * TERMS, full, (1 << CLUSTER) - 1);
            }
            // A lane that fell behind by two phases would wait for one that is over.
            __syncwarp();
            turn.next();
        }
    }
}

// One warp of those that multiply: the stage may be filled again, in every block that fills it.
__device__ inline void release(const Stages& stages, int stage) {
    const int lane = threadIdx.x % WARP_LANES;
    if constexpr (CLUSTER == 1) {
        if (lane == 0) arrive(stages.empty + stage);
    } else {
        if (lane < CLUSTER) arrive_there(address_in(stages.empty + stage, lane));
    }
}

// A warpgroup: its rows of a tile.
__device__ inline void multiply(const Stages& stages, Turn& turn, int group, int blocks,
                                int (&sums)[FRAGMENTS][4]) {
    int before = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const unsigned a = shared_address(stages.factors) + turn.stage * STAGE_NBYTES + group * GROUP_ROWS * TERMS;
        const unsigned b = shared_address(stages.factors) + turn.stage * STAGE_NBYTES + A_NBYTES;
        wait_for_phase(stages.full + turn.stage, turn.parity);
        start_products();
#pragma unroll
        for (int k = 0; k < TERMS; k += INSTRUCTION_TERMS)
            Int8Product<COLUMNS>::start(sums, factor(a + k, 0), factor(b + k, 0), block > 0 || k > 0);
        end_product_group();
        // These products run while those before are known to be done.
        if (block > 0) {
            wait_for_products_but<1>();
            release(stages, before);
        }
        before = turn.stage;
        turn.next();
    }
    wait_for_products_but<0>();
    hold(sums);
    release(stages, before);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, LG_BLOCKS_A_SM)
    gemm_warpgroup(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                   const float* of_row, const float* of_column, const float* bias, float scale,
                   Result* result, int rows, int columns, int summed) {
    extern __shared__ __align__(1024) uint4 memory[];
    const Stages stages(memory);
    const Scales scales{of_row, of_column, bias, scale};
    const Tiles tiles(rows, columns);
    const int blocks = (summed - 1) / TERMS + 1, warp = warp_index();

    if (threadIdx.x == 0)
        for (int s = 0; s < STAGES; ++s) {
            make_phase_barrier(stages.full + s, 1);
            make_phase_barrier(stages.empty + s, CLUSTER * MULTIPLYING_WARPS);
        }
    show_phase_barriers();
    __syncthreads();
    if constexpr (CLUSTER > 1) {
        arrive_at_cluster();
        wait_for_cluster();
    }
    if (warp == MULTIPLYING_WARPS) {
        fetch(stages, a, b, tiles, blocks);
    } else {
        const int rank = CLUSTER == 1 ? 0 : block_in_cluster(), group = warp / 4;
        Turn turn;
        float2* terms = stages.terms;
        for (int tile = blockIdx.x / CLUSTER; tile < tiles.count; tile += gridDim.x / CLUSTER) {
            const int2 place = tiles.place(tile);
            const int first_row = place.x + rank * ROWS;
            // Read behind the barrier below; a thread that writes them again has passed the next one.
            if (SCALED && threadIdx.x < COLUMNS)
                terms[threadIdx.x] = scales.column_terms(place.y + threadIdx.x, columns);
            int sums[FRAGMENTS][4];
            multiply(stages, turn, group, blocks, sums);
            const int row = warp * 16 + threadIdx.x % WARP_LANES / 4;
            const float factors[2] = {scales.row_factor(first_row + row, rows),
                                      scales.row_factor(first_row + row + 8, rows)};
            if (SCALED) named_barrier<MULTIPLYING>(1);
            const ResultTile to{result + (long long)first_row * columns + place.y, rows - first_row,
                                columns - place.y, columns, terms};
            store_fragments<FRAGMENTS>(to, warp * 16, 0, sums, factors);
            terms = stages.terms + (terms == stages.terms ? COLUMNS : 0);
        }
    }
    // No block leaves while another may still arrive at its barriers or copy into its memory.
    if constexpr (CLUSTER > 1) {
        arrive_at_cluster();
        wait_for_cluster();
    }
}
