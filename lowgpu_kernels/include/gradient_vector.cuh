// The vector of gradients that a block leaves: of each layer its products, in the order in which threads
// hold their sums, so that a warp moves 512 bytes at a time, then its biases. place_of says what lies where.
// Where SHARE blocks have the same tile each makes its part of the weights' gradients, in the vector
// that they share.
#pragma once
#include "warpgroup_layers.cuh"

constexpr int SHARE = LG_SHARE, SHARING_GROUPS = SHARE * GROUPS;
constexpr bool SEVERAL = LG_SEVERAL;  // whether a block may have several tiles

// Inputs that a product has of a layer's weights at once, beside 64 of the outputs: as many as leave every
// group a product, from 16 to 128.
__host__ __device__ constexpr int inputs_at_once(int layer) {
    const int tall = column_blocks(LAYERS[layer].fan_out), inputs = LAYERS[layer].fan_in;
    int n = 128;
    while (n > 16 && (n / 2 >= inputs || tall * ((inputs + n - 1) / n) < SHARING_GROUPS)) n /= 2;
    return n;
}
__host__ __device__ constexpr int products_across(int layer) {
    return (LAYERS[layer].fan_in + inputs_at_once(layer) - 1) / inputs_at_once(layer);
}
// Elements of one product, and in front of a layer's: its products, then its biases.
__host__ __device__ constexpr int product_elements(int layer) { return 64 * inputs_at_once(layer); }
__host__ __device__ constexpr int products_elements(int layer) {
    return column_blocks(LAYERS[layer].fan_out) * products_across(layer) * product_elements(layer);
}
__host__ __device__ constexpr int partial_offset(int layer) {
    int offset = 0;
    for (int l = 0; l < layer; ++l)
        offset += products_elements(l) + column_blocks(LAYERS[l].fan_out) * 64;
    return offset;
}
static_assert(partial_offset(LAYER_COUNT) == LG_PARTIAL, "grid_update.py counts the same elements");

// What a thread's part of a product is added to.
template <int N>
struct Before {
    uint4 eights[SEVERAL ? N / 16 : 1];
    float low, high;  // of two biases
};

// Where a tile's gradient goes: a vector that may hold the sums of a block's tiles so far, rounded. An
// element is always the same thread's.
struct Partial {
    Bf16* const vector;
    const bool adds;

    template <int N>
    __device__ void ask(Before<N>& before, int at, int biases, bool adds_sums, bool adds_biases) const {
#pragma unroll
        for (int j = 0; j < N / 16; ++j) {
            before.eights[j] = make_uint4(0u, 0u, 0u, 0u);
            if (adds_sums)
                before.eights[j] =
                    __ldcg(reinterpret_cast<const uint4*>(vector + at + j * 8 * GROUP_THREADS));
        }
        before.low = adds_biases ? low_bf16(vector[biases].bits) : 0.f;
        before.high = adds_biases ? low_bf16(vector[biases + 8].bits) : 0.f;
    }

    template <int N>
    __device__ void put(const float (&sums)[N], const Before<N * 2>& before, int at) const {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float* const s = sums + j * 8;
            const uint4 b = SEVERAL ? before.eights[SEVERAL ? j : 0] : make_uint4(0u, 0u, 0u, 0u);
            *reinterpret_cast<uint4*>(vector + at + j * 8 * GROUP_THREADS) =
                make_uint4(sums_of_pair(s, b.x), sums_of_pair(s + 2, b.y), sums_of_pair(s + 4, b.z),
                           sums_of_pair(s + 6, b.w));
        }
    }
    template <int N>
    __device__ void put_biases(const float (&sums)[4], const Before<N>& before, int at) const {
        vector[at] = to_real(SEVERAL ? sums[0] + before.low : sums[0]);
        vector[at + 8] = to_real(SEVERAL ? sums[2] + before.high : sums[2]);
    }

    static __device__ unsigned sums_of_pair(const float* pair, unsigned before) {
        return SEVERAL ? pack_bf16(pair[0] + low_bf16(before), pair[1] + high_bf16(before))
                       : pack_bf16(pair[0], pair[1]);
    }
};

// What an element of the vector belongs to.
struct Place {
    int parameter;  // -1 for none
    int image;      // byte in the image of warpgroup_layers.cuh
    __device__ bool is_bias() const { return image >= IMAGE_WEIGHTS * int(sizeof(Bf16)); }
};

template <int L = 0>
__device__ inline Place place_of(int element) {
    if constexpr (L == LAYER_COUNT)
        return {-1, 0};
    else {
        if (element >= partial_offset(L + 1)) return place_of<L + 1>(element);
        constexpr Layer layer = LAYERS[L];
        const int at = element - partial_offset(L);
        if (at >= products_elements(L)) {
            const int output = at - products_elements(L);
            // The gap after a head's biases, too: its gradient is zero.
            if (output >= round_up(layer.fan_out, 8)) return {-1, 0};
            return {layer.bias + output,
                    IMAGE_WEIGHTS * int(sizeof(Bf16)) + (layer.gradient + output) * int(sizeof(float))};
        }
        constexpr int N = inputs_at_once(L);
        const int product = at / product_elements(L), piece = at % product_elements(L) / 8;
        const int thread = piece % GROUP_THREADS, sum = piece / GROUP_THREADS * 8 + at % 8;
        const int output = product / products_across(L) * 64 + thread / 32 * 16 + thread % 32 / 4 +
                           sum / 2 % 2 * 8;
        const int input = product % products_across(L) * N + sum / 4 * 8 + thread % 4 * 2 + sum % 2;
        if (output >= layer.fan_out || input >= layer.fan_in) return {-1, 0};
        return {layer.weight + output * layer.fan_in + input,
                (weight_offset(L) + swizzled(weight_rows(L), output, input)) * int(sizeof(Bf16))};
    }
}
