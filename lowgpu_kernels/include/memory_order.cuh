// Counters in global memory that order what blocks write and read. One PTX instruction a wrapper.
#pragma once

// One thread, after its block's barrier: who sees the new count sees all that the block wrote before.
__device__ inline void release_add(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline unsigned acquire_load(const unsigned* counter) {
    unsigned count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
