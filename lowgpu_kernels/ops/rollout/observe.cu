// Observation rows of states: a row of the table, then what the env works out.
#include "env.cuh"
#include "grid_order.cuh"
#include "real.cuh"

constexpr int VECTORS = WIDTH / PIECE, WHOLE = TABLE_COLUMNS / PIECE, LANES = LG_LANES;
static_assert(WIDTH % PIECE == 0, "a row is whole vectors");
static_assert(32 % LANES == 0 && LG_THREADS % 32 == 0, "a row's lanes lie in one warp");

struct alignas(16) Vector {
    Real of[PIECE];
};

// LANES neighbouring lanes own a row. Each copies vectors that are wholly the table's, so a row is
// read and written as adjacent 16-byte pieces; the last lane makes the vectors the env has a part in.
extern "C" __global__ void __launch_bounds__(LG_THREADS)
observe_kernel(const float* floats, const int* ints, const Real* table, const float* series,
               const int* index, int count, int rows, Real* x) {
    wait_for_grid_in_front();
    let_next_grid_begin();
    const long long b = (long long)blockIdx.x * (LG_THREADS / LANES) + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    if (b >= count) return;  // no barrier and no shuffle follows
    const State state = load_state(floats, ints, index ? index[b] : b);
    auto* to = reinterpret_cast<Vector*>(x + b * WIDTH);
    const Vector* from = nullptr;
#if LG_TABLE_COLUMNS > 0
    from = reinterpret_cast<const Vector*>(table + (long long)table_row(state) * WIDTH);
    for (int v = lane; v < WHOLE; v += LANES) to[v] = from[v];
#endif
    if (lane != LANES - 1) return;
    float tail[WIDTH - WHOLE * PIECE + 1] = {};  // never empty, also where the table fills the row
    observe_env(state, series, rows, tail + TABLE_COLUMNS - WHOLE * PIECE);
#pragma unroll
    for (int v = WHOLE; v < VECTORS; ++v) {
        Vector made = {};
        if (v * PIECE < TABLE_COLUMNS) made = from[v];
#pragma unroll
        for (int i = 0; i < PIECE; ++i)
            if (v * PIECE + i >= TABLE_COLUMNS) made.of[i] = to_real(tail[(v - WHOLE) * PIECE + i]);
        to[v] = made;
    }
}
