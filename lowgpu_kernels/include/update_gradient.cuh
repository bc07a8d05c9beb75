// The way down through a tile of update_tile.cuh: from the gradient at the heads to those of all
// parameters.
#pragma once
#include "update_tile.cuh"

// The gradient of one row at the heads, `by_y` as long as LG_HEADS, rounded; zeros behind it.
template <int L = 0>
__device__ inline void store_head_gradient(const Tile& tile, int row, const float* by_y) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        if constexpr (layer.head)
            for (int c = 0; c < round_up(layer.fan_out, 16); ++c)
                tile.output<L>()[row * output_stride(L) + c] =
                    to_real(c < layer.fan_out ? by_y[layer.column + c] : 0.f);
        store_head_gradient<L + 1>(tile, row, by_y);
    }
}

#if LG_FLOAT32

// Gradients of layer L's weights and biases, summed over the tile's rows in order. A thread has 4
// outputs by 4 inputs; neighbours have neighbouring inputs, and write neighbouring 16 bytes.
template <int L>
__device__ inline void weight_gradient(const Tile& tile, float* gradient) {
    constexpr Layer layer = LAYERS[L];
    constexpr int ACROSS = layer.fan_in / 4, DOWN = (layer.fan_out + 3) / 4;
    const float* const g = tile.output<L>();
    const float* const x = tile.input<L>();
    for (int i = threadIdx.x; i < ACROSS * DOWN; i += THREADS) {
        const int output = i / ACROSS * 4, input = i % ACROSS * 4;
        float sums[4][4] = {};
#pragma unroll 4
        for (int row = 0; row < ROWS; ++row) {
            const float4 down = *reinterpret_cast<const float4*>(g + row * output_stride(L) + output);
            const float4 across =
                *reinterpret_cast<const float4*>(x + row * Tile::input_stride<L>() + input);
            const float of[4] = {down.x, down.y, down.z, down.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                sums[n][0] = fmaf(of[n], across.x, sums[n][0]);
                sums[n][1] = fmaf(of[n], across.y, sums[n][1]);
                sums[n][2] = fmaf(of[n], across.z, sums[n][2]);
                sums[n][3] = fmaf(of[n], across.w, sums[n][3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (output + n < layer.fan_out)
                *reinterpret_cast<float4*>(gradient + layer.weight +
                                           (output + n) * layer.fan_in + input) =
                    make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    }
    // Past a head's width the gradients are zero, so the gap after its bias gets zero too.
    for (int n = threadIdx.x; n < round_up(layer.fan_out, 8); n += THREADS) {
        float sum = 0.f;
        for (int row = 0; row < ROWS; ++row) sum += g[row * output_stride(L) + n];
        gradient[layer.bias + n] = sum;
    }
}

#else

// Four words of each of four neighbouring lanes, transposed: lane t gets word t of all four.
__device__ inline void transpose_quad(unsigned (&words)[4]) {
#pragma unroll
    for (int gap = 1; gap <= 2; gap *= 2) {
        const bool upper = threadIdx.x & gap;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & gap)) {
                const unsigned given = upper ? words[i] : words[i + gap];
                const unsigned taken = __shfl_xor_sync(ALL_LANES, given, gap);
                (upper ? words[i] : words[i + gap]) = taken;
            }
    }
}

// Gradients of layer L's weights and biases. A warp has 32 outputs by 32 inputs at a time; lanes hold
// sums as mma.cuh says, outputs as rows. The tile's rows are what is summed over and lie along the
// rows of both factors, so both are transposed on the way from shared memory. The gradient of the
// biases is a product with a matrix of ones. What is stored is rounded to bfloat16; words change
// lanes first, so that a lane writes 16 bytes and four lanes 64.
template <int L>
__device__ inline void weight_gradient(const Tile& tile, Bf16* gradient) {
    constexpr Layer layer = LAYERS[L];
    constexpr unsigned ONES = 0x3F803F80u;
    constexpr int ACROSS = (layer.fan_in + 31) / 32, DOWN = (layer.fan_out + 31) / 32;
    constexpr int GS = output_stride(L), XS = Tile::input_stride<L>();
    // Sixteens of outputs and of inputs in a full 32; fewer in a layer that has no more.
    constexpr int TALL = layer.fan_out > 16 ? 2 : 1, WIDE = layer.fan_in > 16 ? 2 : 1;
    // Past the last column that column's eight are read again; nobody stores what comes of it.
    constexpr int LAST_OUTPUT = round_up(layer.fan_out, 16) - 8, LAST_INPUT = layer.fan_in - 8;
    const int lane = threadIdx.x % 32;
    const Bf16* const g = tile.output<L>();
    const Bf16* const x = tile.input<L>();
#pragma unroll 1
    for (int at = warp_index(); at < ACROSS * DOWN; at += WARPS) {
        const int output = at / ACROSS * 32, input = at % ACROSS * 32;
        float sums[TALL][2 * WIDE][4] = {}, bias[TALL][4] = {};
#pragma unroll
        for (int row = 0; row < ROWS; row += 16) {
            unsigned of_g[TALL][4], of_x[WIDE][4];
#pragma unroll
            for (int i = 0; i < TALL; ++i)
                load_matrices_transposed(
                    of_g[i], g + (row + lane / 16 * 8 + lane % 8) * GS +
                                 min(output + i * 16 + lane / 8 % 2 * 8, LAST_OUTPUT));
#pragma unroll
            for (int i = 0; i < WIDE; ++i)
                load_matrices_transposed(of_x[i], x + (row + lane % 16) * XS +
                                                      min(input + i * 16 + lane / 16 * 8, LAST_INPUT));
#pragma unroll
            for (int i = 0; i < TALL; ++i) {
#pragma unroll
                for (int j = 0; j < 2 * WIDE; ++j)
                    multiply_add_bf16(sums[i][j], of_g[i], of_x[j / 2][j % 2 * 2],
                                      of_x[j / 2][j % 2 * 2 + 1]);
                if (input == 0) multiply_add_bf16(bias[i], of_g[i], ONES, ONES);
            }
        }
#pragma unroll
        for (int i = 0; i < TALL; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned words[4] = {};
#pragma unroll
                for (int j = 0; j < 2 * WIDE; ++j)
                    words[j] = pack_bf16(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
                transpose_quad(words);
                const int n = output + i * 16 + half * 8 + lane / 4, k = input + lane % 4 * 8;
                if (n < layer.fan_out && k < layer.fan_in)
                    *reinterpret_cast<uint4*>(gradient + layer.weight + n * layer.fan_in + k) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                // Past a head's width the gradients are zero, so the gap after its bias gets zero too.
                if (input == 0 && lane % 4 == 0 && n < round_up(layer.fan_out, 8))
                    gradient[layer.bias + n] = to_real(bias[i][half * 2]);
            }
    }
}

#endif

// The gradients of layer L's parameters, then, on the way down, the gradient by what the layer before
// it sums, in the place of what that layer gave: each thread replaces its own.
template <int L>
__device__ inline void backward_from(const Tile& tile, const float* __restrict__ parameters,
                                     Real* gradient) {
    constexpr Layer layer = LAYERS[L];
    // Lanes that the compiler sees apart here would shuffle by a call.
    __syncwarp();
    weight_gradient<L>(tile, gradient);
    if constexpr (layer.depth > 0) {
        constexpr int BEFORE = output_stride(L - 1);
        __syncthreads();  // every warp has read what is replaced now
        product<L, true>(
            tile, parameters, tile.output<L>(), output_stride(L),
            [&](float (&sums)[Fragment::SUMS], int) {
#pragma unroll
                for (int i = 0; i < Fragment::SUMS; ++i) sums[i] = 0.f;
            },
            [&](float (&sums)[Fragment::SUMS], int row, int column) {
                Real* const at = tile.output<L - 1>() + row * BEFORE + column;
                float stored[Fragment::SUMS];
                Fragment::load(stored, at, BEFORE);
#pragma unroll
                for (int i = 0; i < Fragment::SUMS; ++i)
                    sums[i] = through_activation(sums[i], stored[i]);
                Fragment::store(at, BEFORE, sums);
            });
        __syncthreads();
    }
    if constexpr (L > 0) backward_from<L - 1>(tile, parameters, gradient);
}
