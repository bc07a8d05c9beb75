// What an env is likely to read at its next step, asked for early: rows of a table and of series are a
// time axis, and most steps go one row on. A guess costs nothing but the asking, right or wrong.
#pragma once
#include "env.cuh"
#include "prefetch.cuh"
#include "real.cuh"

// Of an env with a table of `table_count` rows: the row after the state's, and of each of the series,
// which have as many, the sector after the state's.
__device__ inline void fetch_ahead(const State& state, const Real* table, int table_count,
                                   const float* series) {
#if LG_TABLE_COLUMNS > 0
    const int next = table_row(state) + 1;
    if (next < table_count) {
        const char* const row = reinterpret_cast<const char*>(table + (long long)next * WIDTH);
        constexpr int NBYTES = TABLE_COLUMNS * int(sizeof(Real));
#pragma unroll
        for (int i = 0; i < NBYTES; i += SECTOR_NBYTES) fetch_to_l2(row + i);
        fetch_to_l2(row + NBYTES - 1);
    }
    const int later = next - 1 + SECTOR_NBYTES / int(sizeof(float));
    if (later < table_count)
#pragma unroll
        for (int k = 0; k < LG_SERIES; ++k) fetch_to_l2(series + (long long)k * table_count + later);
#endif
}
