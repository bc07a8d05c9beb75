// Kernel of act.py for few rows, where a GPU's warpgroups multiply. A block is a warpgroup and takes
// ROWS rows through all layers once. Weights are the left factor, 64 of a layer's outputs at a time, and
// the rows the right one: a product then takes as long as its weights take to leave shared memory, and
// the fewer columns of sums are soon finished. The image (act_image.cuh) is copied a block of 64 columns
// at a time, and multiplied as it comes. A thread fetches pieces of 16 bytes of input rows, neighbours
// of a row by adjacent lanes. A thread of the first ROWS owns a row of the outputs.
#include "act_block.cuh"
#include "act_product.cuh"
#include "fragment.cuh"
#include "grid_order.cuh"
#include "team.cuh"

constexpr int ROWS = LG_ROWS, OUTPUTS_AT_ONCE = 64;
static_assert(THREADS == 128 && TEAMS == 1 && !LG_FLOAT32, "a block is a warpgroup, in bfloat16");
static_assert(ROWS % 8 == 0 && ROWS <= THREADS, "rows of a product, and a thread a row");

// Steps of sixteen that a layer sums over.
__host__ __device__ constexpr int layer_steps(int layer) {
    return LAYERS[layer].depth == 0 ? round_up(LG_INPUTS, 32) / 16 : round_up(LAYERS[layer].fan_in, 16) / 16;
}
__host__ __device__ constexpr int hidden_blocks() {
    int most = 0;
    for (int l = 0; l < LAYER_COUNT; ++l)
        if (LAYERS[l].depth > 0 && image_blocks(l) > most) most = image_blocks(l);
    return most;
}

struct Tile {
    static constexpr int BLOCK_NBYTES = ROWS * ROW_NBYTES;
    static constexpr int INPUT_AT = round_up(IMAGE_NBYTES, EIGHT_ROWS_NBYTES);
    static constexpr int HIDDEN_AT = INPUT_AT + column_blocks(LG_INPUTS) * BLOCK_NBYTES;
    static constexpr int HIDDEN_NBYTES = hidden_blocks() * BLOCK_NBYTES;
    static constexpr int Y_AT = HIDDEN_AT + 2 * HIDDEN_NBYTES;
    static constexpr int COPIES_AT = Y_AT + round_up(ROWS * Y_STRIDE * int(sizeof(float)), 16);
    static constexpr int END = COPIES_AT + round_up(COPIES * int(sizeof(CopyBarrier)), 16);
    // A product reads 64 rows of weights where a layer may have sixteen. What it makes of the others is
    // dropped, but they must lie in the block's memory.
    static constexpr int READ =
        IMAGE_WEIGHTS * int(sizeof(Bf16)) + (OUTPUTS_AT_ONCE - 16) * ROW_NBYTES;
    static constexpr int NBYTES = END > READ ? END : READ;

    unsigned char* const memory;
    // Matrices of ROWS rows as swizzled.cuh has them: the input, in the image's order of columns, and
    // the outputs of a layer of even or odd number.
    __device__ Bf16* input() const { return reinterpret_cast<Bf16*>(memory + INPUT_AT); }
    __device__ Bf16* output(int layer) const {
        return reinterpret_cast<Bf16*>(memory + HIDDEN_AT + layer % 2 * HIDDEN_NBYTES);
    }
    __device__ float* y() const { return reinterpret_cast<float*>(memory + Y_AT); }
    __device__ CopyBarrier* copies() const { return reinterpret_cast<CopyBarrier*>(memory + COPIES_AT); }
    __device__ const float* biases(int layer) const {
        return reinterpret_cast<const float*>(memory + IMAGE_WEIGHTS * int(sizeof(Bf16))) +
               LAYERS[layer].gradient;
    }
};
static_assert(Tile::NBYTES == LG_BLOCK_NBYTES, "act_tile.py counts the same shared memory");

// The block's input rows, zeros past the batch and past the columns.
__device__ inline void read_inputs(const Tile& tile, const Bf16* __restrict__ observation,
                                   long long first, int batch) {
    constexpr int PIECES = round_up(LG_INPUTS, 32) / 8;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * 8;
        uint4 four = make_uint4(0u, 0u, 0u, 0u);
        if (first + row < batch && column < LG_INPUTS)
            four = *reinterpret_cast<const uint4*>(observation + (first + row) * LG_INPUTS + column);
        const auto store = [&](int of_eight, unsigned pair) {
            const int at = swizzled(ROWS, row, input_slot(column + of_eight));
            *reinterpret_cast<unsigned*>(tile.input() + at) = pair;
        };
        store(0, four.x);
        store(2, four.y);
        store(4, four.z);
        store(6, four.w);
    }
}

// Sums of outputs `first` and on of layer L, thread t's as warpgroup.cuh has them: rounded, or y.
template <int L>
__device__ inline void finish(const Tile& tile, int first, const float (&sums)[ROWS / 2]) {
    constexpr Layer layer = LAYERS[L];
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int output = first + warp * 16 + h * 8 + lane / 4;
        const bool within = output < layer.fan_out;
        const float bias = within ? tile.biases(L)[output] : 0.f;
#pragma unroll
        for (int g = 0; g < ROWS / 8; ++g) {
            const float x = sums[g * 4 + h * 2] + bias, z = sums[g * 4 + h * 2 + 1] + bias;
            const int row = g * 8 + lane % 4 * 2;
            if constexpr (layer.head) {
                float* const y = tile.y() + row * Y_STRIDE + layer.column + output;
                if (within) {
                    y[0] = x;
                    y[Y_STRIDE] = z;
                }
            } else if (output < image_rows(L)) {
                // Zero past the layer's outputs, as the image and the bias are.
#if LG_TANH
                const unsigned word = pack_bf16(activation(x), activation(z));
#else
                const unsigned word = pack_positive_bf16(x, z);
#endif
                tile.output(L)[swizzled(ROWS, row, output)].bits = (unsigned short)word;
                tile.output(L)[swizzled(ROWS, row + 1, output)].bits = (unsigned short)(word >> 16);
            }
        }
    }
}

template <int L = 0>
__device__ inline void forward_from(const Tile& tile) {
    if constexpr (L < LAYER_COUNT) {
        constexpr int TILES = round_up(image_rows(L), OUTPUTS_AT_ONCE) / OUTPUTS_AT_ONCE;
        constexpr int BLOCK = image_rows(L) * ROW_NBYTES;
        const Factor weights =
            factor(shared_address(tile.memory + image_offset(L) * int(sizeof(Bf16))), 0);
        const Factor rows =
            factor(shared_address(LAYERS[L].depth == 0 ? tile.input() : tile.output(L + 1)), 0);
        float sums[TILES][ROWS / 2];
        start_products();
#pragma unroll
        for (int k = 0; k < layer_steps(L); ++k) {
            if (k % 4 == 0) wait_for_bytes(tile.copies() + copy_index(L) + k / 4, 0);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                Product<ROWS, false, false>::start(
                    sums[t],
                    further(weights, k / 4 * BLOCK + t * OUTPUTS_AT_ONCE * ROW_NBYTES + k % 4 * 32),
                    further(rows, k / 4 * Tile::BLOCK_NBYTES + k % 4 * 32), k > 0);
        }
        end_product_group();
        wait_for_products_but<0>();
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            take_sums(sums[t]);
            finish<L>(tile, t * OUTPUTS_AT_ONCE, sums[t]);
        }
        if (!LAYERS[L].head) show_to_products();
        __syncthreads();
        forward_from<L + 1>(tile);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    act_few_kernel(const Bf16* __restrict__ observation, const unsigned char* __restrict__ image,
                   const unsigned long long* clock, unsigned long long seed, int batch, int* action,
                   float* log_probability, float* value) {
    extern __shared__ __align__(1024) uint4 memory[];
    const Tile tile{reinterpret_cast<unsigned char*>(memory)};
    if (threadIdx.x == 0) start_weights(memory, image, tile.copies());
    // The image is the one array read before: overlap.py.
    wait_for_grid_in_front();
    let_next_grid_begin();
    const long long first = (long long)blockIdx.x * ROWS, row = first + threadIdx.x;
    const unsigned long long now = *clock;
    read_inputs(tile, observation, first, batch);
    show_to_products();
    __syncthreads();  // the inputs are there and the barriers are made
    wait_for_bytes(tile.copies() + COPIES - 1, 0);
    forward_from(tile);
    if (threadIdx.x < ROWS && row < batch)
        act_on(tile.y() + threadIdx.x * Y_STRIDE, row, seed, now, action, log_probability, value);
}
