// Copies like async_copy.cuh's of 4 or 8 bytes, for rows that start at no multiple of 16. One PTX
// instruction a wrapper.
#pragma once
#include "async_copy.cuh"

// Both addresses are multiples of NBYTES. Where `valid` is false zeros are written and `global` is not
// read, though it must be an address.
template <int NBYTES>
__device__ inline void start_narrow_copy(void* shared, const void* global, bool valid) {
    static_assert(NBYTES == 4 || NBYTES == 8, "16 has a copy of its own");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                     unsigned(__cvta_generic_to_shared(shared))),
                 "l"(global), "n"(NBYTES), "r"(valid ? NBYTES : 0)
                 : "memory");
}
