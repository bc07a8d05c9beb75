// Kernel of act_int8.py where a GPU's warpgroups multiply. A block copies the image of the network
// (int8_image.cuh) once; alone, a team starts on each layer as it comes. Teams, a warpgroup each, take
// tiles of 64 rows by turns, so that some multiply while others turn sums into levels. A warp's
// sixteen rows of a tile stay in its registers from layer to layer; a lane reads eight neighbouring
// columns of an observation at once, four lanes a row.
#include "bulk_copy.cuh"
#include "int8_actions.cuh"
#include "team.cuh"

constexpr int ROWS = 64;
static_assert(THREADS == 128 && GROUPS == 1, "a team is a warpgroup");

constexpr int COPIES = LAYER_COUNT + 1;  // of each layer's weights, and of what follows them
constexpr int BARRIERS_AT = IMAGE_NBYTES;
constexpr int HELD_AT = round_up(BARRIERS_AT + COPIES * int(sizeof(CopyBarrier)), 16);
static_assert(HELD_AT + TEAMS * WARPS * Y_NBYTES == LG_BLOCK_NBYTES, "act_int8_tile.py counts the same");

struct Warpgroup {
    const unsigned weights;           // their address in shared memory
    const CopyBarrier* const copies;  // of each layer

    template <int L, int FIRST, int N, int WORDS>
    __device__ void columns(const unsigned (&in)[1][WORDS], int (&sums)[1][N / 8][4]) const {
        constexpr int ROWS_OF_PART = image_rows(L), PART = FIRST / ROWS_OF_PART;
        const Factor from = factor(
            weights + image_offset(L) + FIRST % ROWS_OF_PART * ROW_NBYTES + PART * image_terms(L), 0);
        if (TEAMS == 1 && FIRST == 0) wait_for_bytes(copies + L, 0);
        start_products();
#pragma unroll
        for (int k = 0; k < image_terms(L) / STEP_TERMS; ++k) {
            const int term = k * STEP_TERMS, block = term / ROW_NBYTES;
            const Factor step = further(from, block * ROWS_OF_PART * ROW_NBYTES + term % ROW_NBYTES);
            LevelsProduct<N>::start(sums[0], in[0] + k * 4, step, k > 0);
        }
        end_product_group();
        wait_for_products_but<0>();
        hold(sums[0]);
    }
};

// One thread: copies of all of the image, in the order of their use.
template <int L = -1>
__device__ inline void copy_image(unsigned char* to, const unsigned char* image, CopyBarrier* copies) {
    if constexpr (L < LAYER_COUNT) {
        constexpr int FROM = L < 0 ? SUMS_AT : image_offset(L < 0 ? 0 : L);
        constexpr int NBYTES = L < 0 ? IMAGE_NBYTES - SUMS_AT : image_nbytes(L < 0 ? 0 : L);
        CopyBarrier* const barrier = copies + (L < 0 ? LAYER_COUNT : L);
        expect_bytes(barrier, NBYTES);
        start_bulk_copy(to + FROM, image + FROM, NBYTES, barrier);
        copy_image<L + 1>(to, image, copies);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    act_int8_kernel(const Real* __restrict__ observation, const unsigned char* __restrict__ image,
                    const unsigned long long* clock, unsigned long long seed, int batch, int* action,
                    float* log_probability, float* value, float* y) {
    extern __shared__ __align__(1024) uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    CopyBarrier* const copies = reinterpret_cast<CopyBarrier*>(shared + BARRIERS_AT);
    const Team team;
    if (threadIdx.x == 0) {
        for (int i = 0; i < COPIES; ++i) make_copy_barrier(copies + i);
        show_copy_barriers();
        copy_image(shared, image, copies);
    }
    __syncthreads();  // the barriers are made
    for (int i = TEAMS == 1 ? LAYER_COUNT : 0; i < COPIES; ++i) wait_for_bytes(copies + i, 0);
    const Call call{observation, clock, seed, batch, action, log_probability, value, y};
    const int warp = team.index * WARPS + team.warp;
    float* const held = reinterpret_cast<float*>(shared + HELD_AT + warp * Y_NBYTES);
    take_tiles(Warpgroup{shared_address(shared), copies}, call, shared, held,
               ((long long)team.index * gridDim.x + blockIdx.x) * ROWS, team.warp * 16,
               (long long)gridDim.x * TEAMS * ROWS);
}
