// Kernel of pack_network.py. A thread owns 16 bytes of the image (act_image.cuh): eight weights of one
// row, or four biases. Neighbouring threads write neighbouring pieces.
#include "real.cuh"
#include "act_image.cuh"

constexpr int WEIGHT_PIECES = IMAGE_WEIGHTS / 8;

// Eight weights of layer L or a later one, `piece` counted from L's first.
template <int L = 0>
__device__ inline uint4 weights_of(const float* __restrict__ parameters, int piece) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        constexpr int ROWS = image_rows(L), PIECES = image_elements(L) / 8;
        if (piece >= PIECES) return weights_of<L + 1>(parameters, piece - PIECES);
        const int row = piece / 8 % ROWS;
        const int first = piece / 8 / ROWS * BLOCK_COLUMNS + (piece % 8 ^ row % 8) * 8;
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = layer.depth == 0 ? input_column(first + i) : first + i;
            eight[i] = row < layer.fan_out && column < layer.fan_in
                           ? parameters[layer.weight + row * layer.fan_in + column]
                           : 0.f;
        }
        return make_uint4(pack_bf16(eight[0], eight[1]), pack_bf16(eight[2], eight[3]),
                          pack_bf16(eight[4], eight[5]), pack_bf16(eight[6], eight[7]));
    }
    return make_uint4(0u, 0u, 0u, 0u);
}

// The bias in a column of a row of gradients; zero between two layers'.
template <int L = 0>
__device__ inline float bias_of(const float* __restrict__ parameters, int column) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        const int at = column - layer.gradient;
        if (at >= 0 && at < layer.fan_out) return parameters[layer.bias + at];
        return bias_of<L + 1>(parameters, column);
    }
    return 0.f;
}

extern "C" __global__ void __launch_bounds__(LG_THREADS)
    pack_network_kernel(const float* __restrict__ parameters, uint4* image) {
    const int piece = blockIdx.x * LG_THREADS + threadIdx.x;
    if (piece < WEIGHT_PIECES) {
        image[piece] = weights_of(parameters, piece);
    } else if (piece < LG_IMAGE_NBYTES / 16) {
        const int column = (piece - WEIGHT_PIECES) * 4;
        reinterpret_cast<float4*>(image)[piece] =
            make_float4(bias_of(parameters, column), bias_of(parameters, column + 1),
                        bias_of(parameters, column + 2), bias_of(parameters, column + 3));
    }
}
