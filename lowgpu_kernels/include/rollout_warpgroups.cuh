// A tile for warpgroup_layers.cuh that only goes up: the image of all weights, shared by the teams of a
// block, and for each team two buffers that the layers write in turn. With one tower the input is dead
// once the first layer has run: the second layer's output takes its place.
#pragma once
#include "warpgroup_layers.cuh"

// Columns of the buffer that layers of even or of odd depth write, in blocks.
__host__ __device__ constexpr int widest(bool odd) {
    int blocks = odd && LG_TOWERS == 1 ? column_blocks(LG_INPUTS) : 0;
    for (int l = 0; l < LAYER_COUNT; ++l) {
        const int of_layer = column_blocks(LAYERS[l].fan_out);
        if (!LAYERS[l].head && LAYERS[l].depth % 2 == odd && of_layer > blocks) blocks = of_layer;
    }
    return blocks;
}

struct Tile {
    static constexpr bool OWN_INPUT = LG_TOWERS > 1;
    static constexpr int BLOCK = ROWS * BLOCK_COLUMNS, EVEN = widest(false) * BLOCK;
    static constexpr int ODD = widest(true) * BLOCK;
    static constexpr int REALS = EVEN + ODD + (OWN_INPUT ? column_blocks(LG_INPUTS) * BLOCK : 0);
    static constexpr int NBYTES =
        IMAGE_NBYTES + TEAMS * (REALS * int(sizeof(Bf16)) + ROWS * LG_OUTPUTS * int(sizeof(float)));

    const Team team;
    Bf16* const weights;
    Bf16* const even;
    Bf16* const odd;
    Bf16* const inputs;
    float* const biases;
    float* const y;  // [ROWS][LG_OUTPUTS]; columns past the heads are not written

    __device__ explicit Tile(uint4* memory)
        : weights(reinterpret_cast<Bf16*>(memory)),
          even(weights + IMAGE_WEIGHTS + team.index * REALS),
          odd(even + EVEN),
          inputs(OWN_INPUT ? odd + ODD : odd),
          biases(reinterpret_cast<float*>(weights + IMAGE_WEIGHTS + TEAMS * REALS)),
          y(biases + LG_GRADIENTS + team.index * ROWS * LG_OUTPUTS) {}

    template <int L>
    __device__ Bf16* output() const { return LAYERS[L].depth % 2 ? odd : even; }
    template <int L>
    __device__ Bf16* input() const {
        return LAYERS[L].depth == 0 ? inputs : LAYERS[L].depth % 2 ? even : odd;
    }
    // They are staged once, before the first layer.
    template <int L>
    __device__ void await_weights() const {}
};
