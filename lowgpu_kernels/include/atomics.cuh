// Memory that several threads change at once, by operations whose order does not change the result:
// integers only. On the host, where tests run one thread at a time, they are plain.
#pragma once
#include "host.cuh"

#ifdef __CUDACC__
__device__ inline void add_to(unsigned long long* sum, unsigned long long more) { atomicAdd(sum, more); }

// Gives what was there before.
__device__ inline unsigned raise_to(unsigned* value, unsigned least) { return atomicMax(value, least); }

// Whether this is the last of `count` arrivals; the counter is 0 before the first and after the last.
// What an arriving thread has read, or a barrier before says was read, the last one may write over:
// a store decided by the answer cannot go ahead of it. Ask early and use the answer late.
__device__ inline bool arrives_last(unsigned* counter, unsigned count) {
    unsigned before;
    asm volatile("atom.release.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(count - 1)
                 : "memory");
    return before == count - 1;
}
#else
inline void add_to(unsigned long long* sum, unsigned long long more) { *sum += more; }

inline unsigned raise_to(unsigned* value, unsigned least) {
    const unsigned before = *value;
    if (before < least) *value = least;
    return before;
}

inline bool arrives_last(unsigned* counter, unsigned count) {
    *counter = *counter + 1 == count ? 0 : *counter + 1;
    return *counter == 0;
}
#endif
