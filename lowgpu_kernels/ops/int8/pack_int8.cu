// Kernel of pack_int8.py: one block. A thread makes 16 bytes of the image at a time: a piece of weights,
// or the terms of two columns, neighbouring threads neighbouring ones. What a column's levels add to its
// sum, and how large its sum may become, a thread adds up term by term.
#include "int8_image.cuh"
#include "maths.cuh"

constexpr int THREADS = LG_THREADS;
constexpr float LARGEST = 0x1p100f;  // so that 2^23 scales are finite

struct Network {
    const signed char* weight;
    const int* bias;
    const float *scale, *hidden_scale;
};

__host__ __device__ constexpr int weight_offset(int layer) {
    int offset = 0;
    for (int l = 0; l < layer; ++l) offset += round_up(LAYERS[l].fan_out * LAYERS[l].fan_in, 16);
    return offset;
}
__host__ __device__ constexpr int output_offset(int layer) {
    int offset = 0;
    for (int l = 0; l < layer; ++l) offset += LAYERS[l].fan_out;
    return offset;
}

// All pieces of layer L's weights and of later layers'.
template <int L = 0>
__device__ inline void pack_weights(const Network& network, unsigned char* image) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        constexpr int ROWS = image_rows(L), PARTS = image_parts(L), TERMS = image_terms(L);
        for (int i = threadIdx.x; i < image_nbytes(L) / 16; i += THREADS) {
            const int row = i / 8 % ROWS, at = (i / 8 / ROWS * 8 + (i % 8 ^ row % 8)) * 16;
            const int column = PARTS > 1 ? at / TERMS * ROWS + row : row, term = PARTS > 1 ? at % TERMS : at;
            unsigned words[4] = {};
            for (int b = 0; b < 16; ++b) {
                const int from = column_of(layer.depth == 0, term + b);
                if (column < layer.fan_out && from < layer.fan_in) {
                    const signed char weight = network.weight[weight_offset(L) + column * layer.fan_in + from];
                    words[b / 4] |= unsigned((unsigned char)weight) << b % 4 * 8;
                }
            }
            reinterpret_cast<uint4*>(image + image_offset(L))[i] =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        pack_weights<L + 1>(network, image);
    }
}

// The terms of layer L's columns and of later layers'; whether plain_level is exact for the thread's.
template <int L = 0>
__device__ inline bool pack_sums(const Network& network, unsigned char* image) {
    bool plain = true;
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        constexpr int FIRST = image_channel(L), POSITIVE_ADDED = layer.head ? 0 : POSITIVE;
        for (int i = threadIdx.x; i < image_columns(L); i += THREADS) {
            int bias = 0;
            float factor = 1.f;
            if (i < layer.fan_out) {
                const signed char* const weights = network.weight + weight_offset(L) + i * layer.fan_in;
                int total = 0, least = 0, most = 0;
                for (int k = 0; k < layer.fan_in; ++k) {
                    const int weight = weights[k];
                    total += weight;
                    least += weight < 0 ? 255 * weight : 0;
                    most += weight > 0 ? 255 * weight : 0;
                }
                bias = int(unsigned(network.bias[output_offset(L) + i]) - 128u * unsigned(total));
                factor = network.scale[output_offset(L) + i];
                if (!LG_TANH && !layer.head) factor *= 1.f / network.hidden_scale[hidden_index(L)];
                const long long wide = (long long)network.bias[output_offset(L) + i] - 128 * total;
                plain = plain && wide + least >= -(1ll << 30) && wide + most < 1ll << 23 && factor <= LARGEST;
            }
            SumTerms* const to = reinterpret_cast<SumTerms*>(image + SUMS_AT) + (FIRST + i) / 2;
            to->bias[i % 2] = int(unsigned(bias) + unsigned(POSITIVE_ADDED));
            to->factor[i % 2] = factor;
        }
        plain = plain || layer.head;
        plain = pack_sums<L + 1>(network, image) && plain;
    }
    return plain;
}

__device__ inline LevelTerms level_terms(float scale, int zero) {
    return {1.f / scale, float(zero + 128) - ROUNDER};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_int8_kernel(const signed char* __restrict__ weight, const int* __restrict__ bias,
                     const float* __restrict__ scale, const float* __restrict__ input_scale,
                     const int* __restrict__ input_zero, const float* __restrict__ hidden_scale,
                     const int* __restrict__ hidden_zero, unsigned char* image) {
    const Network network{weight, bias, scale, hidden_scale};
    pack_weights(network, image);
    bool plain = pack_sums(network, image);
    for (int i = threadIdx.x; i < INPUT_TERMS; i += THREADS)
        reinterpret_cast<LevelTerms*>(image + INPUTS_AT)[i] =
            i < LG_INPUTS ? level_terms(input_scale[i], input_zero[i]) : level_terms(1.f, 0);
    for (int i = threadIdx.x; i < HIDDEN_LAYERS; i += THREADS) {
        // Of relu the factors have the scale.
        const float left = LG_TANH ? hidden_scale[i] : 1.f;
        reinterpret_cast<LevelTerms*>(image + HIDDEN_AT)[i] = level_terms(left, hidden_zero[i]);
        plain = plain && hidden_zero[i] == -128;
    }
    plain = !__syncthreads_or(!plain) && !LG_TANH;
    for (int i = PLAIN_AT / 4 + threadIdx.x; i < IMAGE_NBYTES / 4; i += THREADS)
        reinterpret_cast<int*>(image)[i] = i == PLAIN_AT / 4 ? int(plain) : 0;
}
