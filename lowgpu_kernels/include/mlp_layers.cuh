// The layers of a network, from the macros that ops/mlp/tile.py makes of a Network.
#pragma once

struct Layer {
    int depth;     // 0 for the first layer of its tower
    int fan_in;    // a multiple of 8
    int fan_out;   // a multiple of 8, except in a head
    int weight;    // offset of [fan_out, fan_in] in the parameters, a multiple of 8
    int bias;      // offset of [fan_out] in the parameters, a multiple of 8
    int column;    // first column of its output in the hidden row, or in y for a head
    int source;    // first column of its input in the hidden row; -1 for the network's input
    int gradient;  // first column of its output's gradient in a row of gradients, a multiple of 8
    bool head;
};

__constant__ constexpr Layer LAYERS[] = {LG_LAYERS};
constexpr int LAYER_COUNT = sizeof(LAYERS) / sizeof(Layer);

__host__ __device__ constexpr int round_up(int count, int multiple) {
    return (count + multiple - 1) / multiple * multiple;
}
