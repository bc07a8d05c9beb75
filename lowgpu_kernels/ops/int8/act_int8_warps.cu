// Kernel of act_int8.py where warps multiply: on GPUs without warpgroup products, and for networks whose
// products are too short for those. A block copies the network's image to shared memory, pieces of 16
// bytes by neighbouring threads. A warp takes WARP_ROWS rows by turns and keeps them in its registers
// from layer to layer; a lane reads eight neighbouring columns of an observation at once, four lanes a
// row.
#include "async_copy.cuh"
#include "int8_actions.cuh"

constexpr int WARPS = LG_WARPS, THREADS = WARPS * WARP_LANES;
static_assert(IMAGE_NBYTES + WARPS * Y_NBYTES == LG_BLOCK_NBYTES, "act_int8_tile.py counts the same bytes");

struct Warp {
    const unsigned char* const weights;

    // Of two fragments of eight columns from a layer's row on, or of one twice: the lower and upper half of
    // a step's terms.
    template <int L, bool TWO>
    __device__ void read(unsigned (&right)[4], int row, int term) const {
        const unsigned char* const of_layer = weights + image_offset(L);
        const int lane = threadIdx.x % WARP_LANES, mine = row + TWO * (lane / 16 * 8) + lane % 8;
        load_matrices(right, of_layer + piece_at(image_rows(L), mine, term + lane / 8 % 2 * 16));
    }

    template <int L, int FIRST, int N, int WORDS>
    __device__ void columns(const unsigned (&in)[GROUPS][WORDS], int (&sums)[GROUPS][N / 8][4]) const {
        constexpr int ROW = FIRST % image_rows(L), PART = FIRST / image_rows(L) * image_terms(L);
#pragma unroll
        for (int i = 0; i < GROUPS * N / 2; ++i) sums[i / (N / 2)][i / 4 % (N / 8)][i % 4] = 0;
#pragma unroll
        for (int k = 0; k < image_terms(L) / STEP_TERMS; ++k)
#pragma unroll
            for (int f = 0; f < N / 8; f += 2) {
                unsigned right[4];
                read<L, (N > 8)>(right, ROW + f * 8, PART + k * STEP_TERMS);
#pragma unroll
                for (int r = 0; r < GROUPS; ++r) {
                    multiply_add_levels(sums[r][f], in[r] + k * 4, right[0], right[1]);
                    if constexpr (N > 8) multiply_add_levels(sums[r][f + 1], in[r] + k * 4, right[2], right[3]);
                }
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LG_BLOCKS_A_SM)
    act_int8_warps(const Real* __restrict__ observation, const unsigned char* __restrict__ image,
                   const unsigned long long* clock, unsigned long long seed, int batch, int* action,
                   float* log_probability, float* value, float* y) {
    extern __shared__ __align__(1024) uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    const int warp = warp_index();
    for (int i = threadIdx.x * 16; i < IMAGE_NBYTES; i += THREADS * 16)
        start_copy_16(shared + i, image + i, true);
    end_copy_group();
    wait_for_copies_but<0>();
    __syncthreads();
    const Call call{observation, clock, seed, batch, action, log_probability, value, y};
    float* const held = reinterpret_cast<float*>(shared + IMAGE_NBYTES + warp * Y_NBYTES);
    const FromMemory reader{observation, batch};
    const Tiles<WARP_ROWS> mine{int(warp * gridDim.x + blockIdx.x), int(gridDim.x) * WARPS, 0};
    // Known here only, so that there is a branch at each run of columns: the compiler would otherwise read
    // the weights of several at once, and has no registers for them.
    take_tiles(Warp{shared}, reader, call, shared, is_plain(shared), held, mine);
}
