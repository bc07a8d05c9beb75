// The way down through a tile that keeps every layer's output: from the gradient at the heads to those of
// all parameters, which leave as one vector (gradient_vector.cuh), or for some, where a block has several tiles,
// stay in registers until its last one is done.
//
//     Kept kept;
//     ... the gradient by y lies in the heads' outputs, zeros in columns up to 64 and in rows that do
//     not count ...
//     show_to_products();
//     tile.team.sync();
//     backward_from<LAYER_COUNT - 1>(tile, Partial{vector, whether an earlier tile is in it}, kept);
//     ... after the last tile ...
//     kept.store(vector, sharing_group(tile));
//
// Going down, the gradient by what a layer sums replaces what the layer gave, in the same place.
#pragma once
#include "gradient_products.cuh"

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
// sums, in the place of what that layer gave. `held` is of the layer above: it leaves while the tensor
// cores work here, and not in front of a fence, which would wait for it.
template <int L, class Tile, class Keeps, class Held>
__device__ inline void backward_from(const Tile& tile, const Partial& partial, Keeps& kept, Held& held) {
    const int group = tile.team.warp / 4, sharing = sharing_group(tile);
    Products<L> others;
    auto& made = products_of<L>(kept, others);
    constexpr int STARTED_FIRST = Keeps::LAYER == L ? 1 : Products<L>::STARTED_FIRST;
    if constexpr (LAYERS[L].depth > 0) {
        using Input = InputGradient<L>;
        // Zeros, because registers that only some groups write would be taken from one tile to the next.
        unsigned words[Input::PASSES][Input::N / 4] = {};
#pragma unroll
        for (int pass = 0; pass < Input::PASSES; ++pass) {
            Input of_input;
            of_input.start(tile, group + pass * GROUPS);
            if (pass == 0) {
                made.start_first(tile, partial, sharing);
                held.leave_later(partial, sharing);
                wait_for_products_but<STARTED_FIRST>();
            } else {
                wait_for_products_but<0>();
            }
            of_input.finish(tile, group + pass * GROUPS, words[pass]);
        }
        made.start_others(tile, partial, sharing);
        wait_for_products_but<0>();
        made.leave(partial, sharing);
        tile.team.sync();  // every warp has read what is replaced now
#pragma unroll
        for (int pass = 0; pass < Input::PASSES; ++pass)
            Input::store(tile, group + pass * GROUPS, words[pass]);
        show_to_products();
        tile.team.sync();
    } else {
        made.start_first(tile, partial, sharing);
        held.leave_later(partial, sharing);
        made.start_others(tile, partial, sharing);
        wait_for_products_but<0>();
        made.leave(partial, sharing);
    }
    if constexpr (L > 0)
        backward_from<L - 1>(tile, partial, kept, made);
    else
        made.leave_later(partial, sharing);
}

// All the way down. What a block keeps over its tiles leaves after the last one: kept.store(...).
template <int L, class Tile, class Keeps>
__device__ inline void backward_from(const Tile& tile, const Partial& partial, Keeps& kept) {
    NoProducts above;
    backward_from<L>(tile, partial, kept, above);
}
template <int L, class Tile>
__device__ inline void backward_from(const Tile& tile, const Partial& partial) {
    NoProducts kept;
    backward_from<L>(tile, partial, kept);
}
