// The layers of a network upwards over 64 rows by one warpgroup: what a layer gives stays in the registers
// in which the next layer's products want it, so that no layer waits for another warp. A block's
// warpgroups have rows of their own and share the weights (warpgroup_layers.cuh).
//
//     ... the rows, every number finite, shown to products, and a barrier of the warpgroup ...
//     run_chain<0>(tile, chain);
//     ... a barrier of the warpgroup; read chain.y[row * LG_OUTPUTS + column] ...
//
// A Chain says where `rows` and `y` lie, whether it `keeps` what the layers give, in tile.output<L>(), to
// be shown to products, and has await_weights<L>() and done_with<L>(), behind the layer's last use.
#pragma once
#include "warpgroup_layers.cuh"

__host__ __device__ constexpr int steps_of(int columns) { return round_up(columns, 16) / 16; }

// Words of a thread that hold so many columns.
__host__ __device__ constexpr int words_of(int columns) { return steps_of(columns) * 4; }

// Columns of a product, from 16 to 128: as many as the layer has, but where two products are under way
// beside what the layer reads and gives no more than registers hold.
__host__ __device__ constexpr int chain_columns(int layer) {
    const int columns = LAYERS[layer].fan_out;
    const int reads = LAYERS[layer].depth > 0 ? words_of(LAYERS[layer].fan_in) : 0;
    int n = 16;
    while (n < 128 && n < columns) n *= 2;
    while (n > 16 && n < columns && reads + words_of(columns) + n > 200) n /= 2;
    return n;
}

template <int L>
struct ChainProduct {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int N = chain_columns(L), STEPS = steps_of(layer.fan_in);
    static constexpr int COUNT = (layer.fan_out + N - 1) / N;
    float sums[N / 2];

    template <class Tile, class Chain, int WORDS>
    __device__ void start(const Tile& tile, const Chain& chain, unsigned (&in)[WORDS], int i) {
        constexpr int A_BLOCK = ROWS * ROW_NBYTES, B_BLOCK = weight_rows(L) * ROW_NBYTES;
        const Factor columns = factor(
            shared_address(tile.weights + weight_offset(L)) + i * N * ROW_NBYTES, 0);
        start_products();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            const Factor b = further(columns, k / 4 * B_BLOCK + k % 4 * 32);
            if constexpr (layer.depth == 0) {
                const Factor a = further(factor(shared_address(chain.rows), 0),
                                         k / 4 * A_BLOCK + k % 4 * 32);
                if (k == 0)
                    ProductOf<N>::first(sums, a, b);
                else
                    Product<N, false, false>::start(sums, a, b, true);
            } else if (k == 0) {
                ProductOf<N>::first(sums, in, b);
            } else {
                ProductOf<N>::add(sums, in + k * 4, b);
            }
        }
        end_product_group();
    }

    // Of a layer that is not a head: what it gives, as the next layer reads it.
    template <class Tile, class Chain>
    __device__ void finish(const Tile& tile, const Chain& chain, unsigned* out, int i) {
        take_sums(sums);
        const Lane at;
        const float* const biases = tile.biases + layer.gradient + i * N + at.lane % 4 * 2;
        const unsigned piece = at.piece(shared_address(tile.template output<L>()), i * N);
#pragma unroll
        for (int g = 0; g < N / 8; g += 2) {
            if (i * N + g * 8 >= layer.fan_out) break;
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 bias = *reinterpret_cast<const float2*>(biases + (g + j) * 8);
                const float* const s = sums + (g + j) * 4;
                words[j * 2] = activated(s[0] + bias.x, s[1] + bias.y);
                words[j * 2 + 1] = activated(s[2] + bias.x, s[3] + bias.y);
            }
            if (layer.fan_out % 16 != 0 && i * N + g * 8 + 8 >= layer.fan_out)
                words[2] = words[3] = 0u;
            if (chain.keeps) store_matrices(Lane::further(piece, g), words);
#pragma unroll
            for (int j = 0; j < 4; ++j) out[(i * N / 16 + g / 2) * 4 + j] = words[j];
        }
    }

    template <class Tile, class Chain>
    __device__ void finish_head(const Tile& tile, const Chain& chain, int i) {
        take_sums(sums);
        const Lane at;
        float* const y = chain.y + (at.row + at.lane / 4) * LG_OUTPUTS + layer.column;
#pragma unroll
        for (int s = 0; s < N / 2; ++s) {
            const int column = i * N + s / 4 * 8 + at.lane % 4 * 2 + s % 2;
            if (column < layer.fan_out)
                y[s / 2 % 2 * 8 * LG_OUTPUTS + column] = sums[s] + tile.biases[layer.gradient + column];
        }
    }
};

template <int L, class Tile, class Chain>
__device__ inline void run_chain(const Tile& tile, const Chain& chain);

// Layer L and those after it, of which the first reads `in` unless it reads the rows. While the tensor
// cores work on one product what the one before gave is rounded.
template <int L, class Tile, class Chain, int WORDS>
__device__ inline void chain_from(const Tile& tile, const Chain& chain, unsigned (&in)[WORDS]) {
    if constexpr (L < LAYER_COUNT) {
        using Of = ChainProduct<L>;
        constexpr bool HEAD = LAYERS[L].head;
        unsigned out[HEAD ? 1 : words_of(LAYERS[L].fan_out)];
        Of products[Of::COUNT > 1 ? 2 : 1];
        chain.template await_weights<L>();
        products[0].start(tile, chain, in, 0);
#pragma unroll
        for (int i = 0; i < Of::COUNT; ++i) {
            if (i + 1 < Of::COUNT) {
                products[(i + 1) % 2].start(tile, chain, in, i + 1);
                wait_for_products_but<1>();
            } else {
                wait_for_products_but<0>();
                keep_words(in);
            }
            if constexpr (HEAD)
                products[i % 2].finish_head(tile, chain, i);
            else
                products[i % 2].finish(tile, chain, out, i);
        }
        chain.template done_with<L>();
        if constexpr (HEAD)
            run_chain<L + 1>(tile, chain);
        else
            chain_from<L + 1>(tile, chain, out);
    }
}

template <int L, class Tile, class Chain>
__device__ inline void run_chain(const Tile& tile, const Chain& chain) {
    unsigned none[1] = {};
    chain_from<L>(tile, chain, none);
}
