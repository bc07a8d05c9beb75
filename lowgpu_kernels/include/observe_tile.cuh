// Observations of up to ROWS states, written into rows of shared memory by one block.
#pragma once
#include "async_copy.cuh"
#include "env.cuh"
#include "real.cuh"

constexpr int WHOLE = TABLE_COLUMNS / PIECE;  // pieces of a row that are the table's alone
constexpr int PADDED = (WIDTH + 15) / 16 * 16;

// Writes ROWS rows of PADDED columns, `stride` apart. Thread r < ROWS owns row r, which is zero where
// the thread `owns` no state, and so are columns past the observation. All THREADS threads of the
// block call it; together they copy the table's rows as 16-byte pieces of adjacent lanes. The copies
// are under way on return: wait for them and put a barrier before reading, and one between two calls.
// `table_rows` is shared memory for ROWS rows.
template <int ROWS, int THREADS>
__device__ inline void observe_tile(Real* tile, int stride, const State& state, bool owns,
                                    const Real* table, const float* series, int rows,
                                    long long* table_rows) {
    static_assert(ROWS <= THREADS, "a thread a row");
    Real* const row = tile + threadIdx.x * stride;
    if (threadIdx.x < ROWS) {
        // Never empty, also where the table fills the row; zero where the env writes nothing.
        float tail[PADDED - WHOLE * PIECE + 1] = {};
        long long at = 0;
        if (owns) {
            observe_env(state, series, rows, tail + TABLE_COLUMNS - WHOLE * PIECE);
#if LG_TABLE_COLUMNS > 0
            at = table_row(state);
#endif
        }
        table_rows[threadIdx.x] = owns ? at : -1;
#pragma unroll
        for (int c = WHOLE * PIECE; c < PADDED; ++c) row[c] = to_real(tail[c - WHOLE * PIECE]);
        if (owns)
            for (int c = WHOLE * PIECE; c < TABLE_COLUMNS; ++c) row[c] = table[at * WIDTH + c];
    }
    if constexpr (WHOLE > 0) {
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * WHOLE; i += THREADS) {
            const int r = i / WHOLE, c = i % WHOLE * PIECE;
            const long long from = table_rows[r];
            start_copy_16(tile + r * stride + c, table + max(from, 0ll) * WIDTH + c, from >= 0);
        }
    }
    end_copy_group();
}
