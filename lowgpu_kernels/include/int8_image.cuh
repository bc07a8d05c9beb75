// The image of a quantized network that pack_int8.py makes and the int8 policy kernels read: weights,
// layer after layer, then what turns sums into levels. Weights lie as warpgroup.cuh multiplies them: in
// blocks of 128 terms a row is 128 bytes, its eight pieces of 16 bytes in an order that depends on the
// row, so that eight rows of one piece lie in different banks. Of a layer with 64 terms or fewer, 2 or 4
// parts of the output columns share a row.
#pragma once
#include "mlp_layers.cuh"

constexpr int ROW_NBYTES = 128, STEP_TERMS = 32;  // of a row of weights; of one product
constexpr int POSITIVE = 0x4B000000;        // the bits of 2^23

__host__ __device__ constexpr int image_terms(int layer) { return round_up(LAYERS[layer].fan_in, STEP_TERMS); }
__host__ __device__ constexpr int image_parts(int layer) {
    return image_terms(layer) <= 64 ? ROW_NBYTES / image_terms(layer) : 1;
}
// A hidden layer's are whole words of levels.
__host__ __device__ constexpr int image_multiple(int layer) { return LAYERS[layer].head ? 8 : 16; }
__host__ __device__ constexpr int image_columns(int layer) {
    return round_up(LAYERS[layer].fan_out, image_multiple(layer));
}
__host__ __device__ constexpr int image_rows(int layer) {
    const int parts = image_parts(layer), columns = image_columns(layer);
    return round_up((columns + parts - 1) / parts, image_multiple(layer));
}
__host__ __device__ constexpr int image_blocks(int layer) {
    return image_parts(layer) > 1 ? 1 : (image_terms(layer) + ROW_NBYTES - 1) / ROW_NBYTES;
}
__host__ __device__ constexpr int image_nbytes(int layer) {
    return image_blocks(layer) * image_rows(layer) * ROW_NBYTES;
}
// Bytes in front of a layer's weights; of all at LAYER_COUNT.
__host__ __device__ constexpr int image_offset(int layer) {
    int offset = 0;
    for (int l = 0; l < layer; ++l) offset += image_nbytes(l);
    return offset;
}
// Columns in front of a layer's; of all at LAYER_COUNT.
__host__ __device__ constexpr int image_channel(int layer) {
    int channel = 0;
    for (int l = 0; l < layer; ++l) channel += image_columns(l);
    return channel;
}
// Hidden layers in front of a layer.
__host__ __device__ constexpr int hidden_index(int layer) {
    int index = 0;
    for (int l = 0; l < layer; ++l) index += !LAYERS[l].head;
    return index;
}

constexpr int CHANNELS = image_channel(LAYER_COUNT), INPUT_TERMS = round_up(LG_INPUTS, STEP_TERMS);
constexpr int HIDDEN_LAYERS = hidden_index(LAYER_COUNT) > 0 ? hidden_index(LAYER_COUNT) : 1;
constexpr int SUMS_AT = image_offset(LAYER_COUNT);       // SumTerms of every two columns
constexpr int INPUTS_AT = SUMS_AT + CHANNELS * 8;        // LevelTerms of every input
constexpr int HIDDEN_AT = INPUTS_AT + INPUT_TERMS * 8;   // LevelTerms of every hidden layer
constexpr int PLAIN_AT = HIDDEN_AT + HIDDEN_LAYERS * 8;  // int: 1 where plain_level is exact
constexpr int IMAGE_NBYTES = round_up(PLAIN_AT + 4, 16);
static_assert(IMAGE_NBYTES == LG_IMAGE_NBYTES, "pack_int8.py counts the same bytes");

// Of two neighbouring columns. A bias is for levels from 0 on; of a hidden layer it has POSITIVE added. A
// factor is what a unit of the sum is worth: of relu in levels, else in the unit of z.
struct alignas(16) SumTerms {
    int bias[2];
    float factor[2];
};

// level(x) = clamp(rint(x * inverse) + zero, 0, 255), zero 128 more than in int8; offset is zero less
// 1.5 * 2^23, by which a sum is rounded. Where relu is in front, inverse is 1.
struct alignas(8) LevelTerms {
    float inverse, offset;
};

// A lane holds of a product's left factor four neighbouring terms, and the four that are sixteen
// further. Of the input it reads eight neighbouring columns of each 32, from lane % 4 * 8 on; of a hidden
// layer it has two neighbouring sums of each 8, of which four groups make 32. So this is the column that
// stands in a term.
__host__ __device__ constexpr int column_of(bool input, int term) {
    const int step = term / STEP_TERMS * STEP_TERMS, half = term % STEP_TERMS / 16;
    const int lane = term % 16 / 4, of_four = term % 4;
    return input ? step + lane * 8 + half * 4 + of_four
                 : step + (half * 2 + of_four / 2) * 8 + lane * 2 + of_four % 2;
}

// Bytes in front of the piece of 16 terms from `term` on in a row.
__host__ __device__ constexpr int piece_at(int rows, int row, int term) {
    const int piece = term % ROW_NBYTES / 16 ^ row % 8;
    return (term / ROW_NBYTES * rows + row) * ROW_NBYTES + piece * 16;
}
