// Kernel of act_int8.py where a GPU's warpgroups multiply. A block copies the image of the network
// (int8_image.cuh) once; alone, a team starts on each layer as it comes. Teams, a warpgroup each, take
// tiles of 64 or 128 rows by turns, so that some multiply while others turn sums into levels. A warp's
// rows of a tile stay in its registers from layer to layer. A copy engine brings its next rows, which lie
// one after another, while it works; a lane reads eight neighbouring columns at once, four lanes a row.
#include "bulk_copy.cuh"
#include "grid_order.cuh"
#include "int8_actions.cuh"
#include "team.cuh"

static_assert(THREADS == 128, "a team is a warpgroup");

constexpr bool COPIES_ROWS = LG_COPIES_ROWS;
constexpr int ROWS_NBYTES = COPIES_ROWS ? WARP_ROWS * LG_INPUTS * int(sizeof(Real)) : 0;  // of a warp
constexpr int IMAGE_COPIES = LAYER_COUNT + 1;  // of each layer's weights, and of what follows them
constexpr int COPIES = IMAGE_COPIES + COPIES_ROWS * TEAMS * WARPS;
constexpr int ROWS_AT = IMAGE_NBYTES;
constexpr int BARRIERS_AT = ROWS_AT + TEAMS * WARPS * ROWS_NBYTES;
constexpr int HELD_AT = round_up(BARRIERS_AT + COPIES * int(sizeof(CopyBarrier)), 16);
static_assert(HELD_AT + TEAMS * WARPS * Y_NBYTES == LG_BLOCK_NBYTES, "act_int8_tile.py counts the same");

template <bool VALUE>
struct Known {
    __device__ constexpr operator bool() const { return VALUE; }
};

struct Warpgroup {
    const Factor weights;             // where they start
    const CopyBarrier* const copies;  // of each layer

    template <int L, int FIRST, int N, int WORDS>
    __device__ void columns(const unsigned (&in)[GROUPS][WORDS], int (&sums)[GROUPS][N / 8][4]) const {
        constexpr int ROWS_OF_PART = image_rows(L), PART = FIRST / ROWS_OF_PART;
        constexpr int FROM = image_offset(L) + FIRST % ROWS_OF_PART * ROW_NBYTES + PART * image_terms(L);
        if (TEAMS == 1 && FIRST == 0) wait_for_bytes(copies + L, 0);
        start_products();
#pragma unroll
        for (int k = 0; k < image_terms(L) / STEP_TERMS; ++k) {
            const int term = k * STEP_TERMS, block = term / ROW_NBYTES;
            const Factor step = further(weights, FROM + block * ROWS_OF_PART * ROW_NBYTES + term % ROW_NBYTES);
#pragma unroll
            for (int r = 0; r < GROUPS; ++r) LevelsProduct<N>::start(sums[r], in[r] + k * 4, step, k > 0);
        }
        end_product_group();
        wait_for_products_but<0>();
#pragma unroll
        for (int r = 0; r < GROUPS; ++r) hold(sums[r]);
    }
};

// Rows that a copy engine brings to the warp's part of shared memory.
struct FromCopies {
    const Real* const observation;
    const int batch;
    Real* const to;
    CopyBarrier* const barrier;
    mutable int parity;

    // A warp that has read what is there, every lane: read_inputs ends by shuffles of what they found.
    __device__ void go_on(long long next) const {
        const int rows = int(min(batch - next, (long long)WARP_ROWS));
        if (rows > 0 && lane_index() == WARP_LANES - 1) {
            const int nbytes = rows * LG_INPUTS * int(sizeof(Real));
            expect_bytes(barrier, nbytes);
            start_bulk_copy(to, observation + next * LG_INPUTS, nbytes, barrier);
        }
    }

    // What lies past the batch is of an earlier tile, or nothing: its levels are not written.
    __device__ Rows rows(long long first) const {
        if (first < batch) {
            wait_for_bytes(barrier, parity);
            parity ^= 1;
        }
        return {to, WARP_ROWS - 1};
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
    // The image is the one array read before: overlap.py.
    wait_for_grid_in_front();
    let_next_grid_begin();
    __syncthreads();  // the barriers are made
    const int warp = team.index * WARPS + team.warp;
    const Tiles<4 * WARP_ROWS> mine{int(team.index * gridDim.x + blockIdx.x), int(gridDim.x) * TEAMS,
                                    team.warp * WARP_ROWS};
    Real* const to = reinterpret_cast<Real*>(shared + ROWS_AT + warp * ROWS_NBYTES);
    const FromCopies reader{observation, batch, to, copies + IMAGE_COPIES + warp, 0};
    if constexpr (COPIES_ROWS) reader.go_on(mine.row(mine.first));
    for (int i = TEAMS == 1 ? LAYER_COUNT : 0; i < IMAGE_COPIES; ++i) wait_for_bytes(copies + i, 0);
    const Call call{observation, clock, seed, batch, action, log_probability, value, y};
    float* const held = reinterpret_cast<float*>(shared + HELD_AT + warp * Y_NBYTES);
    const Warpgroup multiply{factor(shared_address(shared), 0), copies};
    const auto take = [&](auto plain) {
        if constexpr (COPIES_ROWS)
            take_tiles(multiply, reader, call, shared, plain, held, mine);
        else
            take_tiles(multiply, FromMemory{observation, batch}, call, shared, plain, held, mine);
    };
    // Two loops: without branches between a tile's columns the compiler starts the products of the next while
    // sums become levels, which takes registers for both.
    const bool plain = is_plain(shared);
    if constexpr (!LG_STRAIGHT)
        take(plain);
    else if (!LG_TANH && plain)
        take(Known<true>{});
    else
        take(Known<false>{});
}
