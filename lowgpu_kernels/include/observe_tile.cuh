// Observations of up to ROWS states, written into rows of shared memory by one team: SIZE threads with a
// number each and a barrier of their own, as in team.cuh.
#pragma once
#include "async_copy.cuh"
#include "env.cuh"
#include "real.cuh"
#include "team.cuh"

constexpr int WHOLE = TABLE_COLUMNS / PIECE;  // pieces of a row that are the table's alone
constexpr int PADDED = (WIDTH + 15) / 16 * 16;

// Writes ROWS rows of PADDED columns, where `place(row, column)` says: the address of a column, behind
// which the rest of its 16-byte piece follows. Thread r < ROWS of the team owns row r, which is
// zero where the thread `owns` no state, and so are columns past the observation. All threads of the
// team call it; together they copy the table's rows as 16-byte pieces of adjacent lanes, and while
// those are under way the owners work out the rest. The copies still are on return: wait for them and
// put a barrier before reading, and one between two calls. `table_rows` is shared memory, a number a
// row.
template <int ROWS, class Team, class Place>
__device__ inline void observe_tile(const Team& team, Place place, const State& state, bool owns,
                                    const Real* table, const float* series, int rows,
                                    int* table_rows) {
    static_assert(ROWS <= Team::SIZE, "a thread a row");
    const int thread = team.thread();
    int at = -1;
#if LG_TABLE_COLUMNS > 0
    if (owns) at = table_row(state);
#endif
    if constexpr (WHOLE > 0) {
        if (thread < ROWS) table_rows[thread] = at;
        team.sync();
        for (int i = thread; i < ROWS * WHOLE; i += Team::SIZE) {
            const int r = i / WHOLE, c = i % WHOLE * PIECE;
            const int from = table_rows[r];
            start_copy_16(place(r, c), table + (long long)max(from, 0) * WIDTH + c,
                          from >= 0);
        }
    }
    end_copy_group();
    if (thread < ROWS) {
        // The table's columns in the piece that it shares, asked for before the env waits for its own.
        constexpr int SHARED = TABLE_COLUMNS - WHOLE * PIECE;
        Real shared[SHARED + 1] = {};
        if (owns)
#pragma unroll
            for (int c = 0; c < SHARED; ++c)
                shared[c] = table[(long long)at * WIDTH + WHOLE * PIECE + c];
        // Never empty, also where the table fills the row; zero where the env writes nothing.
        float tail[PADDED - WHOLE * PIECE + 1] = {};
        if (owns) observe_env(state, series, rows, tail + SHARED);
#pragma unroll
        for (int c = WHOLE * PIECE; c < PADDED; ++c)
            *place(thread, c) =
                c < TABLE_COLUMNS ? shared[c - WHOLE * PIECE] : to_real(tail[c - WHOLE * PIECE]);
    }
}
