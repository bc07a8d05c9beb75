// The rows of a batch through a quantized network, and what is kept of its outputs: actions, or all of
// them (LG_ACTIONS = 0). A warp chooses for HELD rows at once, a lane a row; where it has only sixteen at
// a time it keeps the outputs of the first until it has the second.
#pragma once
#include "draws.cuh"
#include "int8_inputs.cuh"

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

#if LG_ACTIONS
// What is chosen of a row's logits: `categorical`'s bits, or those of `greedy`.
struct Choice {
    int action;
    float log_probability, value;
};

// With few actions their weights are kept, which `categorical` works out again.
__device__ inline Choice chosen_of(const Call& call, const float* y, long long row, unsigned long long now) {
    constexpr int KEPT = 8;
    if constexpr (LG_GREEDY || ACTIONS > KEPT) {
#if LG_GREEDY
        const Action chosen = greedy(y, ACTIONS);
#else
        const Action chosen = categorical(y, ACTIONS, unit(draw(call.seed, ACTION, unsigned(row), now).x));
#endif
        // Without a column of its own the value is that of the action.
        const int column = LG_HEADS > ACTIONS ? ACTIONS : chosen.action;
        return {chosen.action, chosen.log_probability, column < 0 ? nan_f32() : y[column]};
    } else {
        float logits[ACTIONS], weights[ACTIONS], total = 0.f, largest = -infinity_f32();
        bool valid = true;
#pragma unroll
        for (int a = 0; a < ACTIONS; ++a) {
            logits[a] = y[a];
            valid = valid && logits[a] < infinity_f32();
            if (logits[a] > largest) largest = logits[a];
        }
        valid = valid && largest != -infinity_f32();
#pragma unroll
        for (int a = 0; a < ACTIONS; ++a) {
            weights[a] = exp_f32(logits[a] - largest);
            total += weights[a];
        }
        const float target = unit(draw(call.seed, ACTION, unsigned(row), now).x) * total;
        float reached = 0.f, logit = 0.f;
        int action = 0;
#pragma unroll
        for (int a = 0; a < ACTIONS; ++a)
            if (reached <= target && weights[a] > 0.f) {
                reached += weights[a];
                logit = logits[a];
                action = a;
            }
        const float value = LG_HEADS > ACTIONS ? y[LG_HEADS - 1] : logit;
        if (!valid) return {-1, nan_f32(), LG_HEADS > ACTIONS ? value : nan_f32()};
        return {action, (logit - largest) - log_f32(total), value};
    }
}

// The warp's rows from `lower` on, and the second sixteen from `upper` on; `count` in all.
__device__ inline void choose(const Call& call, const float* held, long long lower, long long upper,
                              int count, unsigned long long now) {
    const int lane = lane_index();
    const long long row = lane < 16 ? lower + lane : upper + lane - 16;
    __syncwarp();
    if (lane < count && row < call.batch) {
        const Choice chosen = chosen_of(call, held + lane * Y_STRIDE, row, now);
        call.action[row] = chosen.action;
        call.log_probability[row] = chosen.log_probability;
        call.value[row] = chosen.value;
    }
    __syncwarp();
}
#endif

// Which of the batch's rows a warp takes: of tiles of ROWS rows those that start `offset` further on.
template <int ROWS>
struct Tiles {
    int first, step;
    int offset;

    __device__ long long row(int tile) const { return (long long)tile * ROWS + offset; }
    __device__ bool has(int tile, int batch) const { return (long long)tile * ROWS < batch; }
};

__device__ inline bool is_plain(const unsigned char* image) {
    return *reinterpret_cast<const int*>(image + PLAIN_AT) != 0;
}

// A warp: its rows of all its tiles. All warps that multiply together must be here, with the same tiles.
template <class Multiply, class Reader, class Plain, class Mine>
__device__ inline void take_tiles(const Multiply& multiply, const Reader& reader, const Call& call,
                                  const unsigned char* image, Plain plain, float* held, const Mine& mine) {
#if LG_ACTIONS
    // A warp of two groups reads it anew each time: what follows from it would take registers from the sums.
    const unsigned long long once = GROUPS == 1 ? *call.clock : 0ull;
    int count = 0;
#endif
    for (int tile = mine.first; mine.has(tile, call.batch); tile += mine.step) {
        unsigned inputs[GROUPS][INPUT_WORDS];
#if LG_ACTIONS
        const Place place{image, held + count * Y_STRIDE, Y_STRIDE, WARP_ROWS};
#else
        const int rows = int(min(call.batch - mine.row(tile), (long long)WARP_ROWS));
        float* const y = call.y + mine.row(tile) * LG_OUTPUTS;
        const Place place{image, y, LG_OUTPUTS, rows};
#endif
        const unsigned absent = read_inputs(place, reader.rows(mine.row(tile)), inputs);
        reader.go_on(mine.row(tile + mine.step));
        forward_from<0>(multiply, place, plain, absent, inputs, inputs);
#if LG_ACTIONS
        // Without another tile for its other half a warp chooses for the first.
        count += WARP_ROWS;
        if (count == HELD || !mine.has(tile + mine.step, call.batch)) {
            const int before = count > WARP_ROWS ? tile - mine.step : tile;
            const long long upper = WARP_ROWS > 16 ? mine.row(tile) + 16 : mine.row(tile);
            choose(call, held, mine.row(before), upper, count, GROUPS == 1 ? once : *call.clock);
            count = 0;
        }
#else
        constexpr int PADDING = LG_OUTPUTS - LG_HEADS;
        for (int i = lane_index(); i < rows * PADDING; i += WARP_LANES)
            y[i / PADDING * LG_OUTPUTS + LG_HEADS + i % PADDING] = 0.f;
#endif
    }
}
