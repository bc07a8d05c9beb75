// A weight gradient as products of a tile's rows, and when their sums leave a warpgroup's registers for the
// vector of gradient_vector.cuh. All of a layer's products have the same calls, for backward_from of
// warpgroup_gradient.cuh: start_first, start_others, and, once those are waited for, leave or leave_later,
// of which one does nothing.
#pragma once
#include "gradient_vector.cuh"

// One product of layer L's weight gradient, the layer's gradient transposed times its input: 64 outputs
// by N inputs, and beside them the gradient of the biases, a product with ones.
template <int L>
struct WeightGradient {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int N = inputs_at_once(L), ACROSS = products_across(L);
    static constexpr int COUNT = column_blocks(layer.fan_out) * ACROSS;
    float sums[N / 2], bias[4];
    Before<N> before;

    // Past the last product that one again, which is not stored: no branch for the registers to meet at.
    // Of a layer that is kept, on top of what the sums hold where `adds`.
    template <class Tile>
    __device__ void start(const Tile& tile, int i, bool biases, bool adds = false) {
        constexpr int BLOCK = ROWS * ROW_NBYTES;
        i = min(i, COUNT - 1);
        const int input = i % ACROSS * N;
        const Factor down =
            factor(shared_address(tile.template output<L>()) + i / ACROSS * BLOCK, BLOCK);
        const Factor across =
            factor(shared_address(tile.template input<L>()) + input / BLOCK_COLUMNS * BLOCK +
                       input % BLOCK_COLUMNS * int(sizeof(Bf16)),
                   BLOCK);
        const Factor ones = ones_factor(shared_address(tile.ones));
        start_products();
#pragma unroll
        for (int k = 0; k < ROWS / 16; ++k) {
            const Factor a = further(down, k * 2 * EIGHT_ROWS_NBYTES);
            const Factor b = further(across, k * 2 * EIGHT_ROWS_NBYTES);
            Product<N, true, true>::start(sums, a, b, k > 0 || adds);
            if (biases) Product<8, true, true>::start(bias, a, ones, k > 0 || adds);
        }
        end_product_group();
    }

    // A head's products have rows that belong to no output: whole warps have nothing to write.
    static __device__ bool writes(int i) {
        return i < COUNT && i / ACROSS * 64 + warp_index() % 4 * 16 < layer.fan_out;
    }
    // The thread's place in the vector, and among a layer's biases.
    static __device__ int place(int i) {
        const int thread = thread_index() % GROUP_THREADS;
        return partial_offset(L) + i * product_elements(L) + thread * 8;
    }
    static __device__ int place_of_biases(int i) {
        const int thread = thread_index() % GROUP_THREADS;
        return partial_offset(L) + products_elements(L) + i / ACROSS * 64 + thread / 32 * 16 +
               thread % 32 / 4;
    }
    static __device__ bool writes_biases(int i) { return i % ACROSS == 0 && lane_index() % 4 == 0; }

    // Starts to read what the sums are added to, some time before they are stored.
    __device__ void ask(const Partial& partial, int i, bool biases) {
        if constexpr (SEVERAL) {
            const bool adds = partial.adds && writes(i);
            partial.ask(before, place(i), place_of_biases(i), adds,
                        biases && adds && writes_biases(i));
        }
    }

    __device__ void store(const Partial& partial, int i, bool biases) {
        take_sums(sums);
        if (biases) take_sums(bias);
        if (!writes(i)) return;
        partial.put(sums, before, place(i));
        if (biases && writes_biases(i)) partial.put_biases(bias, before, place_of_biases(i));
    }
};

// The group's number among all that share a tile.
template <class Tile>
__device__ inline int sharing_group(const Tile& tile) {
    return blockIdx.x % SHARE * GROUPS + tile.team.warp / 4;
}

// A group's products of a layer where those are one or two: their sums stay in registers until the tensor
// cores have the next layer's products, and leave then; where they are added to what lies in memory,
// registers are too few for that, and they leave once they are done.
template <int L>
struct FewProducts {
    static constexpr int COUNT = (WeightGradient<L>::COUNT + SHARING_GROUPS - 1) / SHARING_GROUPS;
    static constexpr int STARTED_FIRST = 1;  // groups of products
    // What is asked for ahead of the sums: all where registers hold it.
    static constexpr int ASKED = WeightGradient<L>::N <= 32 ? COUNT : 1;
    WeightGradient<L> of[COUNT];

    // Whether the p-th of a group's products may be the first of its outputs, which has the biases.
    static __host__ __device__ constexpr bool biases(int p) {
        return p == 0 || WeightGradient<L>::ACROSS % COUNT != 0;
    }

    template <class Tile>
    __device__ void start_first(const Tile& tile, const Partial& partial, int group) {
        start(tile, group, 0);
#pragma unroll
        for (int p = 0; p < ASKED; ++p) ask(partial, group, p);
    }
    template <class Tile>
    __device__ void start_others(const Tile& tile, const Partial&, int group) {
#pragma unroll
        for (int p = 1; p < COUNT; ++p) start(tile, group, p);
    }
    __device__ void leave(const Partial& partial, int group) {
        if constexpr (SEVERAL) store(partial, group);
    }
    __device__ void leave_later(const Partial& partial, int group) {
        if constexpr (!SEVERAL) store(partial, group);
    }
    __device__ void store(const Partial& partial, int group) {
#pragma unroll
        for (int p = 0; p < COUNT; ++p) {
            if (p >= ASKED) ask(partial, group, p);
            of[p].store(partial, group * COUNT + p, biases(p));
        }
    }
    template <class Tile>
    __device__ void start(const Tile& tile, int group, int p, bool adds = false) {
        of[p].start(tile, group * COUNT + p, biases(p), adds);
    }
    __device__ void ask(const Partial& partial, int group, int p) {
        of[p].ask(partial, group * COUNT + p, biases(p));
    }
};

// Where there are more, each leaves before the next one.
template <int L>
struct ManyProducts {
    static constexpr int STARTED_FIRST = 0;

    template <class Tile>
    __device__ void start_first(const Tile&, const Partial&, int) {}
    template <class Tile>
    __device__ void start_others(const Tile& tile, const Partial& partial, int group) {
#pragma unroll 1
        for (int i = group; i < WeightGradient<L>::COUNT; i += SHARING_GROUPS) {
            WeightGradient<L> next;
            next.start(tile, i, true);
            next.ask(partial, i, true);
            wait_for_products_but<0>();
            next.store(partial, i, true);
        }
    }
    __device__ void leave(const Partial&, int) {}
    __device__ void leave_later(const Partial&, int) {}
};

// Those of a layer whose sums stay in registers over all tiles of a block.
template <int L>
struct KeptProducts {
    static constexpr int LAYER = L;
    FewProducts<L> over_tiles;

    template <class Tile>
    __device__ void start_first(const Tile& tile, const Partial& partial, int group) {
        over_tiles.start(tile, group, 0, partial.adds);
    }
    template <class Tile>
    __device__ void start_others(const Tile& tile, const Partial& partial, int group) {
#pragma unroll
        for (int p = 1; p < FewProducts<L>::COUNT; ++p) over_tiles.start(tile, group, p, partial.adds);
    }
    __device__ void leave(const Partial&, int) {}
    __device__ void leave_later(const Partial&, int) {}

    // After the last tile.
    __device__ void store(Bf16* vector, int group) {
        const Partial alone = {vector, false};
#pragma unroll
        for (int p = 0; p < FewProducts<L>::ASKED; ++p) over_tiles.ask(alone, group, p);
        over_tiles.store(alone, group);
    }
};
struct NoProducts {
    static constexpr int LAYER = -1;
    __device__ void leave_later(const Partial&, int) {}
    __device__ void store(Bf16*, int) {}
};

// The layer that is kept, at most 128 sums of a thread; -1 for none.
__host__ __device__ constexpr int kept_layer() {
    int kept = -1;
    for (int l = 0; SEVERAL && l < LAYER_COUNT; ++l)
        if (products_elements(l) <= 128 * THREADS &&
            (kept < 0 || products_elements(l) > products_elements(kept)))
            kept = l;
    return kept;
}

template <bool FEW, int L>
struct ProductsOf { using Type = FewProducts<L>; };
template <int L>
struct ProductsOf<false, L> { using Type = ManyProducts<L>; };
template <int L>
using Products = typename ProductsOf<(WeightGradient<L>::COUNT <= 2 * SHARING_GROUPS), L>::Type;

template <int L>
struct KeptOf { using Type = KeptProducts<L>; };
template <>
struct KeptOf<-1> { using Type = NoProducts; };
using Kept = typename KeptOf<kept_layer()>::Type;

template <int L, class Keeps>
__device__ inline auto& products_of(Keeps& kept, Products<L>& others) {
    if constexpr (Keeps::LAYER == L)
        return kept;
    else
        return others;
}
