// The rows of a batch through a quantized network, and what is kept of its outputs: actions, or all of
// them (LG_ACTIONS = 0). A warp chooses for HELD rows at once, a lane a row; where it has only sixteen at
// a time it keeps the outputs of the first until it has the second.
#pragma once
#include "draws.cuh"
#include "int8_policy.cuh"

constexpr int ACTIONS = LG_ACTIONS, HELD = LG_HELD;
constexpr int Y_STRIDE = LG_HEADS | 1;  // odd, so that rows start in different banks
constexpr int Y_NBYTES = ACTIONS == 0 ? 0 : HELD * Y_STRIDE * int(sizeof(float));  // of a warp
static_assert(ACTIONS == 0 || LG_HEADS == ACTIONS || LG_HEADS == ACTIONS + 1,
              "logits, and perhaps a value");
static_assert(HELD <= WARP_LANES && HELD % WARP_ROWS == 0 && HELD / WARP_ROWS <= 2, "a lane a row");

struct Call {
    const Real* __restrict__ observation;
    const unsigned long long* clock;
    unsigned long long seed;
    int batch;
    int* action;
    float *log_probability, *value, *y;
};

// The warp's rows from `lower` on, and the second sixteen from `upper` on; `count` in all.
__device__ inline void choose(const Call& call, const float* held, long long lower, long long upper,
                              int count, unsigned long long now) {
    const int lane = threadIdx.x % WARP_LANES;
    const long long row = lane < 16 ? lower + lane : upper + lane - 16;
    __syncwarp();
    if (lane < count && row < call.batch) {
        const float* const y = held + lane * Y_STRIDE;
#if LG_GREEDY
        const Action chosen = greedy(y, ACTIONS);
#else
        const Action chosen = categorical(y, ACTIONS, unit(draw(call.seed, ACTION, unsigned(row), now).x));
#endif
        call.action[row] = chosen.action;
        call.log_probability[row] = chosen.log_probability;
        // Without a column of its own the value is that of the action.
        const int column = LG_HEADS > ACTIONS ? ACTIONS : chosen.action;
        call.value[row] = column < 0 ? nan_f32() : y[column];
    }
    __syncwarp();
}

// A warp: its rows of tiles that start at `first`, `first + step` and so on, `offset` from their start.
// All warps that multiply together must be here, with the same tiles.
template <class Multiply>
__device__ inline void take_tiles(const Multiply& multiply, const Call& call, const unsigned char* image,
                                  float* held, long long first, int offset, long long step) {
    const bool plain = *reinterpret_cast<const int*>(image + PLAIN_AT) != 0;
#if LG_ACTIONS
    const unsigned long long now = *call.clock;
    int count = 0;
    long long before = 0;
    for (; first < call.batch; first += step) {
        const long long mine = first + offset;
        fetch_ahead(call.observation, mine + step, call.batch);
        const Place place{image, held + count * Y_STRIDE, Y_STRIDE, WARP_ROWS};
        forward(multiply, place, plain, call.observation, mine, call.batch);
        count += WARP_ROWS;
        if (count == HELD) {
            constexpr bool ONE_TILE = HELD == WARP_ROWS;
            choose(call, held, ONE_TILE ? mine : before, ONE_TILE ? mine + 16 : mine, HELD, now);
            count = 0;
        }
        before = mine;
    }
    if (count > 0) choose(call, held, before, before, count, now);
#else
    constexpr int PADDING = LG_OUTPUTS - LG_HEADS;
    for (; first < call.batch; first += step) {
        const long long mine = first + offset;
        const int rows = int(min(call.batch - mine, (long long)WARP_ROWS));
        float* const y = call.y + mine * LG_OUTPUTS;
        fetch_ahead(call.observation, mine + step, call.batch);
        const Place place{image, y, LG_OUTPUTS, rows};
        forward(multiply, place, plain, call.observation, mine, call.batch);
        for (int i = threadIdx.x % WARP_LANES; i < rows * PADDING; i += WARP_LANES)
            y[i / PADDING * LG_OUTPUTS + LG_HEADS + i % PADDING] = 0.f;
    }
#endif
}
