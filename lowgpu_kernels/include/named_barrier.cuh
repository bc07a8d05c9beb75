// Barriers of some of a block's warps, by number: 1 to 15, as 0 is __syncthreads'. One PTX instruction
// a wrapper. Every lane of a warp that comes must come, THREADS of them in all.
#pragma once

template <int THREADS>
__device__ inline void named_barrier(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// The same, and whether any of the threads gave true.
template <int THREADS>
__device__ inline bool named_barrier_or(int number, bool given) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred given, any;\n"
        "setp.ne.s32 given, %1, 0;\n"
        "bar.red.or.pred any, %2, %3, given;\n"
        "selp.s32 %0, 1, 0, any;\n"
        "}"
        : "=r"(any)
        : "r"(int(given)), "r"(number), "n"(THREADS)
        : "memory");
    return any;
}
