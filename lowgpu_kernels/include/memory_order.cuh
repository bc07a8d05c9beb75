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
__device__ inline unsigned long long acquire_load(const unsigned long long* counter) {
    unsigned long long count;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(counter) : "memory");
    return count;
}
__device__ inline void release_store(unsigned long long* counter, unsigned long long count) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(counter), "l"(count) : "memory");
}
// Behind an operation that saw others' counts: what they wrote before is seen from here on.
__device__ inline void acquire_all() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
