// The layers of a network upwards over tiles of 64 rows in shared memory, a tile a team (team.cuh) of
// one or more warpgroups, which share the columns of a layer's output:
//
//     stage<0>(tile, parameters);   // once, by the whole block, or another way to the same image
//     ... every team writes its input rows; every number finite ...
//     show_to_products();
//     tile.team.sync();
//     forward_from<0>(tile);        // ends with a team's barrier
//     ... read tile.y[row * LG_OUTPUTS + column] ...
//
// A Tile has its `team` and says where things lie: the block's `weights` and `biases`, the team's `y`,
// `input<L>()` and `output<L>()`, matrices of 64 rows as swizzled.cuh has them. Columns behind a
// matrix's last, up to a multiple of 16, are zero; past those nothing is ever stored or written.
#pragma once
#include "fragment.cuh"
#include "swizzled.cuh"
#include "team.cuh"
#include "warpgroup.cuh"

constexpr int ROWS = LG_ROWS, GROUP_THREADS = 128, GROUPS = THREADS / GROUP_THREADS;
static_assert(ROWS == 64, "a warpgroup multiplies 64 rows");
static_assert(THREADS % GROUP_THREADS == 0 && !LG_FLOAT32, "whole warpgroups, in bfloat16");

// The image of all weights: layer after layer [weight_rows, fan_in] as swizzled.cuh has it, zeros
// around, then the biases in float32, a layer's from column LAYERS[l].gradient.
__host__ __device__ constexpr int weight_rows(int layer) { return round_up(LAYERS[layer].fan_out, 16); }
__host__ __device__ constexpr int weight_elements(int layer) {
    return column_blocks(LAYERS[layer].fan_in) * weight_rows(layer) * BLOCK_COLUMNS;
}
__host__ __device__ constexpr int weight_offset(int layer) {
    int offset = 0;
    for (int l = 0; l < layer; ++l) offset += weight_elements(l);
    return offset;
}
constexpr int IMAGE_WEIGHTS = weight_offset(LAYER_COUNT);
constexpr int IMAGE_NBYTES = IMAGE_WEIGHTS * int(sizeof(Bf16)) + LG_GRADIENTS * int(sizeof(float));

// Columns of a product that a warpgroup has at once: as few as give every group some, from 16 to 128.
__host__ __device__ constexpr int columns_at_once(int columns) {
    int n = 16;
    while (n < 128 && n * GROUPS < columns) n *= 2;
    return n;
}

// Weights and biases of layer L and those after it, rounded into an image. Neighbouring threads read
// neighbouring 32 bytes.
template <int L, class Tile>
__device__ inline void stage(const Tile& tile, const float* __restrict__ parameters) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        constexpr int EIGHTS = column_blocks(layer.fan_in) * BLOCK_COLUMNS / 8;
        for (int i = threadIdx.x; i < layer.fan_out; i += BLOCK_THREADS)
            tile.biases[layer.gradient + i] = parameters[layer.bias + i];
#pragma unroll 4
        for (int i = threadIdx.x; i < weight_rows(L) * EIGHTS; i += BLOCK_THREADS) {
            const int row = i / EIGHTS, column = i % EIGHTS * 8;
            float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
            if (row < layer.fan_out && column < layer.fan_in) {
                const float4* const from = reinterpret_cast<const float4*>(
                    parameters + layer.weight + row * layer.fan_in + column);
                low = from[0];
                high = from[1];
            }
            *reinterpret_cast<uint4*>(tile.weights + weight_offset(L) +
                                      swizzled(weight_rows(L), row, column)) =
                make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w),
                           pack_bf16(high.x, high.y), pack_bf16(high.z, high.w));
        }
        stage<L + 1>(tile, parameters);
    }
}

// The thread's place among the sums of 64 rows: its warp's first row, and its lane.
struct Lane {
    const int row, lane;
    __device__ Lane() : row(warp_index() % 4 * 16), lane(lane_index()) {}

    // Where the lane's 16 bytes of 16 rows by 16 columns lie, from column `first` of a matrix, a
    // multiple of 16: four 8 x 8 matrices, rows first, for ldmatrix and stmatrix.
    __device__ unsigned piece(unsigned matrix, int first) const {
        return matrix + first / BLOCK_COLUMNS * (ROWS * ROW_NBYTES) + (row + lane % 16) * ROW_NBYTES +
               (first % BLOCK_COLUMNS / 8 ^ lane / 16 ^ lane % 8) * 16;
    }
    // The same `eights` times eight columns further on, an even number; columns do not leave a block
    // but from its first.
    static __device__ unsigned further(unsigned piece, int eights) {
        return (piece ^ eights % 8 * 16) + eights / 8 * (ROWS * ROW_NBYTES);
    }
};

// Two sums side by side as the next layer reads them.
__device__ inline unsigned activated(float low, float high) {
#if LG_TANH
    return pack_bf16(activation(low), activation(high));
#else
    return relu_pair(pack_bf16(low, high));
#endif
}

// start(sums, first) for every product of 64 rows by N columns from `first` that falls to this
// warpgroup, one after another.
template <int COLUMNS, int N, class Tile, class Do>
__device__ inline void for_columns(const Tile& tile, Do start) {
    constexpr int CHUNKS = (COLUMNS + N - 1) / N;
#pragma unroll 1
    for (int chunk = tile.team.warp / 4; chunk < CHUNKS; chunk += GROUPS) start(chunk * N);
}

template <int L, class Tile>
__device__ inline void forward_from(const Tile& tile) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        constexpr bool HEAD = layer.head;
        constexpr int N = columns_at_once(layer.fan_out), STEPS = round_up(layer.fan_in, 16) / 16;
        constexpr int A_BLOCK = ROWS * ROW_NBYTES, B_BLOCK = weight_rows(L) * ROW_NBYTES;
        const Factor rows = factor(shared_address(tile.template input<L>()), 0);
        const Factor weights = factor(shared_address(tile.weights + weight_offset(L)), 0);
        const unsigned output = shared_address(tile.template output<L>());
        const Lane at;
        tile.template await_weights<L>();
        for_columns<layer.fan_out, N>(tile, [&](int first) {
            float sums[N / 2];
            const Factor columns = further(weights, first * ROW_NBYTES);
            start_products();
#pragma unroll
            for (int k = 0; k < STEPS; ++k)
                Product<N, false, false>::start(sums, further(rows, k / 4 * A_BLOCK + k % 4 * 32),
                                                further(columns, k / 4 * B_BLOCK + k % 4 * 32), k > 0);
            end_product_group();
            // Past the layer's last column what is read belongs to others, and is not stored.
            const float* const biases = tile.biases + layer.gradient + first + at.lane % 4 * 2;
            wait_for_products_but<0>();
            take_sums(sums);
            if constexpr (HEAD) {
                float* const y = tile.y + (at.row + at.lane / 4) * LG_OUTPUTS + layer.column;
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    const int column = first + i / 4 * 8 + at.lane % 4 * 2 + i % 2;
                    if (column < layer.fan_out)
                        y[i / 2 % 2 * 8 * LG_OUTPUTS + column] = sums[i] + biases[i / 4 * 8 + i % 2];
                }
            } else {
                const unsigned piece = at.piece(output, first);
#pragma unroll
                for (int g = 0; g < N / 8; g += 2) {
                    if (layer.fan_out % N != 0 && first + g * 8 >= layer.fan_out) break;
                    unsigned words[4];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float2 bias = *reinterpret_cast<const float2*>(biases + (g + j) * 8);
                        const float* const s = sums + (g + j) * 4;
                        words[j * 2] = activated(s[0] + bias.x, s[1] + bias.y);
                        words[j * 2 + 1] = activated(s[2] + bias.x, s[3] + bias.y);
                    }
                    if (layer.fan_out % 16 != 0 && first + g * 8 + 8 >= layer.fan_out)
                        words[2] = words[3] = 0u;
                    store_matrices(Lane::further(piece, g), words);
                }
            }
        });
        if constexpr (!HEAD) show_to_products();
        tile.team.sync();
        forward_from<L + 1>(tile);
    }
}
