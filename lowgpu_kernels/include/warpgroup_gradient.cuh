// The way down through a tile that keeps every layer's output: from the gradient at the heads to those of
// all parameters, which leave as one vector of LG_PARTIAL elements in the order in which threads have
// them, so that a warp writes 512 bytes at a time. place_of says what lies where.
//
//     ... the gradient by y lies in the heads' outputs, zeros in columns up to 64 and in rows that do
//     not count ...
//     show_to_products();
//     tile.team.sync();
//     backward_from<LAYER_COUNT - 1>(tile, Partial{vector, whether an earlier tile is in it});
//
// Where SHARE blocks have the same tile each makes its part of the weights' gradients, in the vector
// that they share, and all the rest of the way down.
// Going down, the gradient by what a layer sums replaces what the layer gave, in the same place.
#pragma once
#include "bf16_add.cuh"
#include "warpgroup_layers.cuh"

constexpr int SHARE = LG_SHARE, SHARING_GROUPS = SHARE * GROUPS;

// Inputs that a product has of a layer's weights at once, beside 64 of the outputs.
__host__ __device__ constexpr int inputs_at_once(int layer) {
    const int tall = column_blocks(LAYERS[layer].fan_out);
    return LAYERS[layer].fan_in > 64 && tall * ((LAYERS[layer].fan_in + 127) / 128) >= SHARING_GROUPS
               ? 128
               : 64;
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

// Where a tile's gradient goes. An element is always the same thread's.
struct Partial {
    Bf16* const vector;
    const bool adds;

    __device__ void put(int at, uint4 eight) const {
        if (adds)
            add_eight_bf16(vector + at, eight);
        else
            *reinterpret_cast<uint4*>(vector + at) = eight;
    }
    __device__ void put(int at, float one) const {
        if (adds)
            add_bf16(vector + at, to_real(one));
        else
            vector[at] = to_real(one);
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

// One product of layer L's weight gradient, the layer's gradient transposed times its input: 64 outputs
// by N inputs, and beside them the gradient of the biases, a product with ones.
template <int L>
struct WeightGradient {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int N = inputs_at_once(L), ACROSS = products_across(L);
    static constexpr int COUNT = column_blocks(layer.fan_out) * ACROSS;
    float sums[N / 2], bias[4];

    // Past the last product that one again, which is not stored: no branch for the registers to meet at.
    template <class Tile>
    __device__ void start(const Tile& tile, int i) {
        constexpr int BLOCK = ROWS * ROW_NBYTES;
        i = min(i, COUNT - 1);
        const int input = i % ACROSS * N;
        const Factor down =
            factor(shared_address(tile.template output<L>()) + i / ACROSS * BLOCK, BLOCK);
        const Factor across =
            factor(shared_address(tile.template input<L>()) + input / BLOCK_COLUMNS * BLOCK, BLOCK);
        const Factor ones = ones_factor(shared_address(tile.ones));
        start_products();
#pragma unroll
        for (int k = 0; k < ROWS / 16; ++k) {
            const Factor a = further(down, k * 2 * EIGHT_ROWS_NBYTES);
            const Factor b = further(across, k * 2 * EIGHT_ROWS_NBYTES);
            Product<N, true, true>::start(sums, a, b, k > 0);
            Product<8, true, true>::start(bias, a, ones, k > 0);
        }
        end_product_group();
    }

    __device__ void store(const Partial& partial, int i) {
        take_sums(sums);
        take_sums(bias);
        // A head's products have rows that belong to no output: whole warps have nothing to write.
        const int output = i / ACROSS * 64 + warp_index() % 4 * 16;
        if (i >= COUNT || output >= layer.fan_out) return;
        const int thread = warp_index() % 4 * WARP_LANES + lane_index();
        const int to = partial_offset(L) + i * product_elements(L) + thread * 8;
#pragma unroll
        for (int j = 0; j < N / 2; j += 8)
            partial.put(to + j * GROUP_THREADS,
                        make_uint4(pack_bf16(sums[j], sums[j + 1]), pack_bf16(sums[j + 2], sums[j + 3]),
                                   pack_bf16(sums[j + 4], sums[j + 5]),
                                   pack_bf16(sums[j + 6], sums[j + 7])));
        if (i % ACROSS == 0 && thread % 4 == 0) {
            const int of_bias = partial_offset(L) + products_elements(L) + output + thread % 32 / 4;
            partial.put(of_bias, bias[0]);
            partial.put(of_bias + 8, bias[2]);
        }
    }
};

// The group's number among all that share a tile.
template <class Tile>
__device__ inline int sharing_group(const Tile& tile) {
    return blockIdx.x % SHARE * GROUPS + tile.team.warp / 4;
}

// The products of a weight gradient from `from` on that are this group's, two at a time.
template <int L, class Tile>
__device__ inline void weight_gradient_from(const Tile& tile, const Partial& partial, int from) {
#pragma unroll 1
    for (int i = from; i < WeightGradient<L>::COUNT; i += 2 * SHARING_GROUPS) {
        WeightGradient<L> first, second;
        first.start(tile, i);
        second.start(tile, i + SHARING_GROUPS);
        wait_for_products_but<1>();
        first.store(partial, i);
        wait_for_products_but<0>();
        second.store(partial, i + SHARING_GROUPS);
    }
}

// Two gradients side by side, each times the derivative of what the activation gave.
__device__ inline unsigned through_activation_pair(float low, float high, unsigned stored) {
#if LG_TANH
    return pack_bf16(through_activation(low, low_bf16(stored)),
                     through_activation(high, high_bf16(stored)));
#else
    return pack_bf16(low, high) & where_positive(stored);
#endif
}

// The gradient by what layer L's input sums, for a group's columns of it: the product with the weights,
// and what replaces the input once everybody has read that.
template <int L>
struct InputGradient {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int N = columns_at_once(layer.fan_in);
    static constexpr int CHUNKS = (layer.fan_in + N - 1) / N, PASSES = (CHUNKS + GROUPS - 1) / GROUPS;
    float sums[N / 2];

    template <class Tile>
    __device__ void start(const Tile& tile, int chunk) {
        constexpr int A_BLOCK = ROWS * ROW_NBYTES, B_BLOCK = weight_rows(L) * ROW_NBYTES;
        constexpr int STEPS = round_up(layer.fan_out, 16) / 16;
        const int first = min(chunk, CHUNKS - 1) * N;
        const Factor rows = factor(shared_address(tile.template output<L>()), 0);
        const Factor weights =
            factor(shared_address(tile.weights + weight_offset(L)) + first / BLOCK_COLUMNS * B_BLOCK +
                       first % BLOCK_COLUMNS * int(sizeof(Bf16)),
                   B_BLOCK);
        start_products();
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            Product<N, false, true>::start(sums, further(rows, k / 4 * A_BLOCK + k % 4 * 32),
                                           further(weights, k * 2 * EIGHT_ROWS_NBYTES), k > 0);
        end_product_group();
    }

    // Calls back with the address of each 16 rows by 16 columns of the input, and their number.
    template <class Tile, class Do>
    static __device__ void for_pieces(const Tile& tile, int chunk, Do visit) {
        if (chunk >= CHUNKS) return;
        const unsigned piece = Lane().piece(shared_address(tile.template input<L>()), chunk * N);
#pragma unroll
        for (int g = 0; g < N / 8; g += 2)
            if (layer.fan_in % N == 0 || chunk * N + g * 8 < layer.fan_in)
                visit(Lane::further(piece, g), g);
    }

    template <class Tile>
    __device__ void finish(const Tile& tile, int chunk, unsigned (&words)[N / 4]) {
        take_sums(sums);
        for_pieces(tile, chunk, [&](unsigned piece, int g) {
            unsigned stored[4];
            load_matrices(stored, piece);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[g * 2 + i] = through_activation_pair(sums[g * 4 + i * 2],
                                                           sums[g * 4 + i * 2 + 1], stored[i]);
            // Behind the last column the sums are of what lies there, and zeros stay zero.
            if (layer.fan_in % 16 != 0 && chunk * N + g * 8 + 8 >= layer.fan_in)
                words[g * 2 + 2] = words[g * 2 + 3] = 0u;
        });
    }

    template <class Tile>
    static __device__ void store(const Tile& tile, int chunk, const unsigned (&words)[N / 4]) {
        for_pieces(tile, chunk, [&](unsigned piece, int g) {
            const unsigned four[4] = {words[g * 2], words[g * 2 + 1], words[g * 2 + 2],
                                      words[g * 2 + 3]};
            store_matrices(piece, four);
        });
    }
};

// The gradients of layer L's parameters and, on the way down, the gradient by what the layer before it
// sums, in the place of what that layer gave. While the tensor cores work on one product a group
// stores or masks what the one before gave.
template <int L, class Tile>
__device__ inline void backward_from(const Tile& tile, const Partial& partial) {
    const int group = tile.team.warp / 4, product = sharing_group(tile);
    if constexpr (LAYERS[L].depth > 0) {
        WeightGradient<L> first;
        using Input = InputGradient<L>;
        unsigned words[Input::PASSES][Input::N / 4];
        {
            Input of_input;
            of_input.start(tile, group);
            first.start(tile, product);
            wait_for_products_but<1>();
            of_input.finish(tile, group, words[0]);
        }
        if constexpr (WeightGradient<L>::COUNT > SHARING_GROUPS) {
            WeightGradient<L> second;
            second.start(tile, product + SHARING_GROUPS);
            wait_for_products_but<1>();
            first.store(partial, product);
            wait_for_products_but<0>();
            second.store(partial, product + SHARING_GROUPS);
        } else {
            wait_for_products_but<0>();
            first.store(partial, product);
        }
        weight_gradient_from<L>(tile, partial, product + 2 * SHARING_GROUPS);
#pragma unroll
        for (int pass = 1; pass < Input::PASSES; ++pass) {
            Input of_input;
            of_input.start(tile, group + pass * GROUPS);
            wait_for_products_but<0>();
            of_input.finish(tile, group + pass * GROUPS, words[pass]);
        }
        tile.team.sync();  // every warp has read what is replaced now
#pragma unroll
        for (int pass = 0; pass < Input::PASSES; ++pass)
            Input::store(tile, group + pass * GROUPS, words[pass]);
        show_to_products();
        tile.team.sync();
    } else {
        weight_gradient_from<L>(tile, partial, product);
    }
    if constexpr (L > 0) backward_from<L - 1>(tile, partial);
}
