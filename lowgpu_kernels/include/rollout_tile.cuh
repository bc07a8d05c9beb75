// A tile for tile_layers.cuh that only goes up: the weights of all layers, rounded, shared by the
// teams of a block, and for each team the rows of mlp_rows.cuh.
#pragma once
#include "mlp_rows.cuh"
#include "tile_layers.cuh"

static_assert(RESIDENT && !LG_BACKWARD, "weights are read upwards, from shared memory");

struct Tile {
    static constexpr bool KEEPS = false;
    static constexpr int WEIGHTS = weight_offset(LAYER_COUNT);
    static constexpr int SHARED = WEIGHTS * int(sizeof(Real)) + LG_GRADIENTS * int(sizeof(float));
    static constexpr int NBYTES = SHARED + TEAMS * MlpTile<ROWS>::NBYTES;
    static_assert(SHARED % 16 == 0 && MlpTile<ROWS>::NBYTES % 16 == 0, "rows of whole pieces");

    const Team team;
    Real* const weights;   // of every layer [weight_rows][weight_stride], zeros around
    float* const biases;   // a layer's from column LAYERS[l].gradient
    const MlpTile<ROWS> rows;
    float* const y;        // [ROWS][LG_OUTPUTS]; columns past the heads are not written

    __device__ explicit Tile(uint4* memory)
        : weights(reinterpret_cast<Real*>(memory)),
          biases(reinterpret_cast<float*>(weights + WEIGHTS)),
          rows(memory + (SHARED + team.index * MlpTile<ROWS>::NBYTES) / int(sizeof(uint4))),
          y(rows.y) {}

    __device__ int warp() const { return team.warp; }

    template <int L>
    __device__ Real* output() const { return rows.at(LAYERS[L].depth); }
    static __host__ __device__ constexpr int output_stride(int layer) {
        return LAYERS[layer].depth % 2 ? MlpTile<ROWS>::ODD : MlpTile<ROWS>::EVEN;
    }

    template <int L>
    __device__ const Real* input() const { return rows.at(LAYERS[L].depth - 1); }
    template <int L>
    static constexpr int input_stride() { return MlpTile<ROWS>::stride(LAYERS[L].depth - 1); }
};
