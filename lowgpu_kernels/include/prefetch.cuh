// Asking for memory before it is read. No result depends on it, so a host does nothing.
#pragma once

constexpr int SECTOR_NBYTES = 32;  // that L2 fetches at least

// Starts to fetch the sector of `global` into L2.
__device__ inline void fetch_to_l2([[maybe_unused]] const void* global) {
#ifdef __CUDACC__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}
