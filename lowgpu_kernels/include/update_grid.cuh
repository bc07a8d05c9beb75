// What kernels share that make all updates of a call in one launch, with barriers of the whole grid
// between their parts (grid_barrier.cuh).
//
// A block takes tiles of 64 rows of a minibatch, one after another: two warpgroups run the network up
// and down over a tile (warpgroup_gradient.cuh). A block leaves a vector of gradients, to which it adds
// tile after tile; where there are few tiles SHARE blocks have the same one, and leave a vector together.
// Then a block adds up its share of the gradient over all vectors, a warp 32 neighbouring 16-byte
// pieces and every SLICES-th vector; a thread owns some elements of the share for the whole launch, with the parameters
// and Adam's means in shared memory, and leaves the rounded weights in an image that every block
// copies for the next update.
//
// A kernel's Tile is a GridTile with its own arrays behind it: `copies`, a barrier a layer at least; `sums`
// [SLICES][ELEMENTS]; `squares` [WARPS]; `loss_sums` [ROWS][COUNT], over the block's tiles; and what it
// owns, `owned` [ELEMENTS], each with a Place.
#pragma once
#include "adam_terms.cuh"
#include "bulk_copy.cuh"
#include "env.cuh"
#include "grid_barrier.cuh"
#include "warpgroup_gradient.cuh"

constexpr int PIECES = LG_PARTIAL / PIECE;                     // of a tile's gradient
constexpr int A_BLOCK = (PIECES + LG_GRID - 1) / LG_GRID;      // pieces that a block adds up
constexpr int WIDE = round_up(A_BLOCK, WARP_LANES);            // threads across them
constexpr int SLICES = THREADS / WIDE, AHEAD = LG_AHEAD;
constexpr int ELEMENTS = A_BLOCK * PIECE;                      // of the gradient that a block owns
static_assert(LG_PARTIAL % PIECE == 0 && SLICES >= 1, "whole pieces, and a thread for each");
static_assert(TEAMS == 1 && THREADS == 256, "a block has one tile, and two warpgroups");
static_assert(LG_INPUTS == WIDTH, "the network is the env's");

constexpr int INPUT = column_blocks(LG_INPUTS) * ROWS * BLOCK_COLUMNS;  // elements

__host__ __device__ constexpr int output_offset(int layer) {
    int blocks = 0;
    for (int l = 0; l < layer; ++l) blocks += column_blocks(LAYERS[l].fan_out);
    return blocks * ROWS * BLOCK_COLUMNS;
}

// What every such tile has: the weights of a pass, every layer's output, and INPUTS inputs.
template <int INPUTS>
struct GridTile {
    static constexpr int ROWS_END = output_offset(LAYER_COUNT) + INPUTS * INPUT;
    static constexpr int ONES = 8 * BLOCK_COLUMNS;
    static constexpr int NBYTES = (IMAGE_WEIGHTS + ROWS_END + ONES) * int(sizeof(Bf16)) +
                                  (LG_GRADIENTS + ROWS * LG_OUTPUTS) * int(sizeof(float));

    const Team team;
    Bf16* const weights;  // the image of warpgroup_layers.cuh, without the biases
    Bf16* const outputs;  // of every layer
    Bf16* const inputs;   // [INPUTS]
    Bf16* const ones;
    float* const biases;
    float* const y;       // [ROWS][LG_OUTPUTS]

    __device__ explicit GridTile(uint4* memory)
        : weights(reinterpret_cast<Bf16*>(memory)),
          outputs(weights + IMAGE_WEIGHTS),
          inputs(outputs + output_offset(LAYER_COUNT)),
          ones(inputs + INPUTS * INPUT),
          biases(reinterpret_cast<float*>(ones + ONES)),
          y(biases + LG_GRADIENTS) {}

    template <int L>
    __device__ Bf16* output() const { return outputs + output_offset(L); }
};

// A block's tiles, one update after another; SHARE blocks have the same.
struct Turn {
    static constexpr int AT_ONCE = LG_GRID / SHARE;
    int update, at;
    static __device__ int home() { return blockIdx.x / SHARE; }
    // Whether the block speaks for those that share its tiles.
    static __device__ bool leads() { return blockIdx.x % SHARE == 0; }
    __device__ Turn next(int tiles) const {
        const bool last = at + AT_ONCE >= tiles;
        return last ? Turn{update + 1, home()} : Turn{update, at + AT_ONCE};
    }
};

// Vectors of gradients, and of statistics, that the blocks leave.
__device__ inline int vectors_of(int tiles) { return tiles < Turn::AT_ONCE ? tiles : Turn::AT_ONCE; }

// Where the gradient of the tile `at` goes.
__device__ inline Partial vector_of(Bf16* partials, int at) {
    return {partials + (long long)Turn::home() * LG_PARTIAL, at != Turn::home()};
}

// COUNT threads of the last warpgroup that bring in the next tile's rows.
template <int COUNT>
struct Gathering {
    static constexpr int SIZE = COUNT, FIRST = THREADS - GROUP_THREADS;
    static __device__ bool are(int warp) {
        return warp >= FIRST / WARP_LANES && warp < (FIRST + SIZE) / WARP_LANES;
    }
    static __device__ int thread() { return thread_index() - FIRST; }
    static __device__ void sync() { named_barrier<SIZE>(1); }
};

// Once, before a block's barrier.
template <class Tile>
__device__ inline void prepare(const Tile& tile, int copy_barriers) {
    for (int i = threadIdx.x; i < Tile::ONES; i += THREADS) tile.ones[i] = {0x3F80};
    if (threadIdx.x == 0)
        for (int l = 0; l < copy_barriers; ++l) make_copy_barrier(tile.copies + l);
    show_copy_barriers();
}

// Whether a piece of an image belongs to no parameter. Biases' do, up to the next layer's.
template <int L = 0>
__device__ inline bool is_around(int piece) {
    if constexpr (L == LAYER_COUNT)
        return false;
    else {
        if (piece >= weight_offset(L + 1) / PIECE) return is_around<L + 1>(piece);
        constexpr int A_ROW = BLOCK_COLUMNS / PIECE;
        const int at = piece - weight_offset(L) / PIECE, row = at / A_ROW % weight_rows(L);
        const int column =
            at / A_ROW / weight_rows(L) * BLOCK_COLUMNS + (at % A_ROW ^ row % 8) * PIECE;
        return row >= LAYERS[L].fan_out || column >= LAYERS[L].fan_in;
    }
}

// Zeros around the weights of images, which stay: nobody publishes anything there.
__device__ inline void clear_around(unsigned char* images, int count) {
    constexpr int PIECES = IMAGE_NBYTES / 16;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count * PIECES; i += LG_GRID * THREADS)
        if (is_around(i % PIECES))
            reinterpret_cast<uint4*>(images)[i] = make_uint4(0u, 0u, 0u, 0u);
}

// A parameter in an image, rounded where it is a weight.
__device__ inline void publish(unsigned char* image, const Place& place, float parameter) {
    unsigned char* const to = image + place.image;
    if (place.is_bias())
        *reinterpret_cast<float*>(to) = parameter;
    else
        *reinterpret_cast<Bf16*>(to) = to_real(parameter);
}

// One thread: copies of a layer's weights and, where wanted, of its biases, for the layer to await.
template <int L, bool BIASES, class Tile>
__device__ inline void copy_layer(const Tile& tile, const unsigned char* image) {
    constexpr int WEIGHTS = weight_elements(L) * int(sizeof(Bf16)), FIRST = LAYERS[L].gradient;
    constexpr int FLOATS = BIASES ? round_up(LAYERS[L].fan_out, 8) * int(sizeof(float)) : 0;
    CopyBarrier* const copies = tile.copies + L;
    expect_bytes(copies, WEIGHTS + FLOATS);
    start_bulk_copy(tile.weights + weight_offset(L), image + weight_offset(L) * sizeof(Bf16), WEIGHTS,
                    copies);
    if constexpr (BIASES)
        start_bulk_copy(tile.biases + FIRST,
                        image + IMAGE_WEIGHTS * sizeof(Bf16) + FIRST * sizeof(float), FLOATS, copies);
}

// The gradient of one row at the heads, rounded, and zeros behind it, by LANES threads: every so many-th
// piece is the thread's.
template <int LANES = 1, int L = 0, class Tile>
__device__ inline void store_head_gradient(const Tile& tile, int row, const float* by_y, int lane = 0) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        if constexpr (layer.head)
#pragma unroll
            for (int piece = 0; piece < round_up(layer.fan_out, 16) / PIECE; ++piece) {
                if (piece % LANES != lane) continue;
                float eight[PIECE];
#pragma unroll
                for (int j = 0; j < PIECE; ++j) {
                    const int c = piece * PIECE + j;
                    eight[j] = c < layer.fan_out ? by_y[layer.column + c] : 0.f;
                }
                *reinterpret_cast<uint4*>(tile.template output<L>() + swizzled(ROWS, row, piece * PIECE)) =
                    make_uint4(pack_bf16(eight[0], eight[1]), pack_bf16(eight[2], eight[3]),
                               pack_bf16(eight[4], eight[5]), pack_bf16(eight[6], eight[7]));
            }
        store_head_gradient<LANES, L + 1>(tile, row, by_y, lane);
    }
}
