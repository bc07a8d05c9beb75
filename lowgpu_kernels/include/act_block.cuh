// What the blocks of act.cu and of act_few.cu share: how the image of the weights comes to shared memory,
// and how a thread acts on a row of outputs.
#pragma once
#include "act_image.cuh"
#include "bulk_copy.cuh"
#include "draws.cuh"

constexpr int ACTIONS = LG_ACTIONS;
constexpr int Y_STRIDE = LG_HEADS | 1;  // of a row of outputs: odd, so that rows start in different banks
static_assert(LG_HEADS == ACTIONS || LG_HEADS == ACTIONS + 1, "logits, and perhaps a value");

// Copies of the weights up to a layer's; of all, and the biases' number, at LAYER_COUNT.
__host__ __device__ constexpr int copy_index(int layer) {
    int index = 0;
    for (int l = 0; l < layer; ++l) index += image_blocks(l);
    return index;
}
constexpr int COPIES = copy_index(LAYER_COUNT) + 1;

// One thread: copies of all weights, a block of 64 columns at a time, in the order of their use.
template <int L = 0>
__device__ inline void copy_weights(void* to, const unsigned char* image, CopyBarrier* copies) {
    const auto copy = [&](int index, int offset, int nbytes) {
        expect_bytes(copies + index, nbytes);
        start_bulk_copy(static_cast<unsigned char*>(to) + offset, image + offset, nbytes, copies + index);
    };
    if constexpr (L == 0)
        copy(COPIES - 1, IMAGE_WEIGHTS * int(sizeof(Bf16)), LG_GRADIENTS * int(sizeof(float)));
    if constexpr (L < LAYER_COUNT) {
        constexpr int NBYTES = image_rows(L) * ROW_NBYTES;
#pragma unroll
        for (int block = 0; block < image_blocks(L); ++block)
            copy(copy_index(L) + block, image_offset(L) * int(sizeof(Bf16)) + block * NBYTES, NBYTES);
        copy_weights<L + 1>(to, image, copies);
    }
}
__device__ inline void start_weights(void* to, const unsigned char* image, CopyBarrier* copies) {
    for (int i = 0; i < COPIES; ++i) make_copy_barrier(copies + i);
    show_copy_barriers();
    copy_weights(to, image, copies);
}

// The action of row `row`, whose outputs are `y`.
__device__ inline void act_on(const float* y, long long row, unsigned long long seed,
                              unsigned long long now, int* action, float* log_probability,
                              float* value) {
#if LG_GREEDY
    const Action chosen = greedy(y, ACTIONS);
#else
    const Action chosen = categorical(y, ACTIONS, unit(draw(seed, ACTION, unsigned(row), now).x));
#endif
    action[row] = chosen.action;
    log_probability[row] = chosen.log_probability;
    // Without a column of its own the value is that of the action.
    const int column = LG_HEADS > ACTIONS ? ACTIONS : chosen.action;
    value[row] = column < 0 ? nan_f32() : y[column];
}
