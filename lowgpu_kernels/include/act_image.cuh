// The image of a network's weights that act.cu multiplies: layer after layer [image_rows, fan_in] as
// swizzled.cuh has it, zeros around, in bfloat16, then the biases in float32, a layer's from column
// LAYERS[l].gradient. What a tower's first layer sums over stands in the order of input_slot.
#pragma once
#include "mlp_layers.cuh"
#include "swizzled.cuh"

__host__ __device__ constexpr int image_rows(int layer) { return round_up(LAYERS[layer].fan_out, 16); }
__host__ __device__ constexpr int image_blocks(int layer) { return column_blocks(LAYERS[layer].fan_in); }
__host__ __device__ constexpr int image_elements(int layer) {
    return image_blocks(layer) * image_rows(layer) * BLOCK_COLUMNS;
}
// Elements in front of a layer's; of all at LAYER_COUNT.
__host__ __device__ constexpr int image_offset(int layer) {
    int offset = 0;
    for (int l = 0; l < layer; ++l) offset += image_elements(l);
    return offset;
}
constexpr int IMAGE_WEIGHTS = image_offset(LAYER_COUNT);
constexpr int IMAGE_NBYTES = IMAGE_WEIGHTS * int(sizeof(Bf16)) + LG_GRADIENTS * int(sizeof(float));
static_assert(IMAGE_NBYTES == LG_IMAGE_NBYTES, "pack_network.py counts the same bytes");

// A lane reads eight neighbouring columns of an input row at once, of each 32 those from lane % 4 * 8.
// As a product's factor it holds two columns, and the two that are eight further, of each of two
// steps of sixteen: where the column is summed.
__host__ __device__ constexpr int input_slot(int column) {
    const int lane = column % 32 / 8, of_eight = column % 8;
    return column / 32 * 32 + of_eight / 4 * 16 + of_eight / 2 % 2 * 8 + lane * 2 + of_eight % 2;
}
// And the column that is summed there.
__host__ __device__ constexpr int input_column(int slot) {
    const int in_step = slot % 16;
    return slot / 32 * 32 + in_step % 8 / 2 * 8 + slot / 16 % 2 * 4 + in_step / 8 * 2 + slot % 2;
}
__host__ __device__ constexpr bool columns_are_found_again() {
    for (int column = 0; column < 64; ++column)
        if (input_column(input_slot(column)) != column) return false;
    return true;
}
static_assert(columns_are_found_again(), "one is the other's inverse");
