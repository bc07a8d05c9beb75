// Where the rows of a tile lie while a network goes up and nothing is kept: two buffers that layers
// write in turn, and the heads' outputs.
#pragma once
#include "fragment.cuh"

template <int ROWS>
struct MlpTile {
    static_assert(ROWS % Fragment::ROWS == 0, "whole fragments of rows");
    static constexpr int EVEN = LG_TILE_EVEN, ODD = LG_TILE_ODD;
    // With one tower the input is dead once the first layer has run: the second layer's output takes
    // its place.
    static constexpr bool OWN_INPUT = LG_TOWERS > 1;
    static constexpr int INPUT = OWN_INPUT ? LG_TILE_INPUT : ODD;
    static constexpr int REALS = ROWS * (EVEN + ODD + (OWN_INPUT ? INPUT : 0));
    static constexpr int NBYTES = REALS * sizeof(Real) + ROWS * LG_OUTPUTS * sizeof(float);

    Real* const even;   // output of layers 0, 2, 4, .. of a tower
    Real* const odd;    // output of layers 1, 3, 5, ..
    Real* const input;  // [ROWS][INPUT]
    float* const y;     // [ROWS][LG_OUTPUTS]

    __device__ explicit MlpTile(uint4* memory)
        : even(reinterpret_cast<Real*>(memory)),
          odd(even + ROWS * EVEN),
          input(OWN_INPUT ? odd + ROWS * ODD : odd),
          y(reinterpret_cast<float*>(even + REALS)) {}

    // Where the output of the layer at `depth` of a tower lies; the input at depth -1.
    __device__ Real* at(int depth) const { return depth < 0 ? input : depth % 2 ? odd : even; }
    static __device__ constexpr int stride(int depth) { return depth < 0 ? INPUT : depth % 2 ? ODD : EVEN; }
};
