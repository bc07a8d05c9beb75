// A tile of ROWS rows in shared memory with the outputs of every layer of a network, so that forward,
// backward and the weights' gradients run over it without going through device memory. One block:
//
//     extern __shared__ uint4 memory[];
//     Tile tile(memory);                        // Tile::NBYTES of shared memory
//     stage<0, LAYER_COUNT>(tile, parameters);  // once
//     ... write tile.inputs as observe_tile does; every number finite ...
//     __syncthreads();
//     forward_from<0>(tile, parameters);        // ends with a barrier
//     ... read tile.y[row * LG_OUTPUTS + column]; write the gradient by y into the heads' outputs
//         with store_head_gradient, zeros in rows that do not count ...
//     __syncthreads();
//     backward_from<LAYER_COUNT - 1>(tile, parameters, gradient);  // update_gradient.cuh
//
// and `gradient`, LG_PARAMETERS elements in device memory, holds the tile's. Going down, the gradient
// by what a layer sums replaces what the layer gave, in the same place, element by element.
#pragma once
#include "tile_layers.cuh"

static_assert(TEAMS == 1 && LG_BACKWARD, "a block has one tile, and goes down as well as up");

constexpr int INPUT_STRIDE = round_up(LG_INPUTS, 16) + PIECE;

__host__ __device__ constexpr int output_stride(int layer) {
    return round_up(LAYERS[layer].fan_out, 16) + PIECE;
}

// Elements of everything in front of a layer's output.
__host__ __device__ constexpr int output_offset(int layer) {
    int offset = ROWS * INPUT_STRIDE;
    for (int l = 0; l < layer; ++l) offset += ROWS * output_stride(l);
    return offset;
}

struct Tile {
    static constexpr bool KEEPS = true;
    static constexpr int WEIGHTS = weight_offset(LAYER_COUNT), ROWS_END = output_offset(LAYER_COUNT);
    static constexpr int NBYTES = (WEIGHTS + ROWS_END) * int(sizeof(Real)) +
                                  (ROWS * LG_OUTPUTS + LG_GRADIENTS) * int(sizeof(float));

    const Team team;
    Real* const weights;  // of every layer [weight_rows][weight_stride], zeros around
    Real* const inputs;   // [ROWS][INPUT_STRIDE], then every layer's output [ROWS][output_stride]
    float* const y;       // [ROWS][LG_OUTPUTS]
    float* const biases;  // a layer's from column LAYERS[l].gradient

    __device__ explicit Tile(uint4* memory)
        : weights(reinterpret_cast<Real*>(memory)),
          inputs(weights + WEIGHTS),
          y(reinterpret_cast<float*>(inputs + ROWS_END)),
          biases(y + ROWS * LG_OUTPUTS) {}

    // Asked anew each time, because the way down has no register to keep it in.
    static __device__ int warp() { return warp_index(); }

    template <int L>
    __device__ Real* output() const { return inputs + output_offset(L); }

    // What layer L reads, and how far apart its rows are.
    template <int L>
    __device__ const Real* input() const {
        return LAYERS[L].depth == 0 ? inputs : inputs + output_offset(L - (L > 0));
    }
    template <int L>
    static constexpr int input_stride() {
        return LAYERS[L].depth == 0 ? INPUT_STRIDE : output_stride(L - (L > 0));
    }
    static __host__ __device__ constexpr int output_stride(int layer) { return ::output_stride(layer); }
};
