// A barrier of all blocks of a launch, which must all be on the GPU at once: launch it cooperatively.
// What any thread wrote before it arrived is seen by every thread after the wait; between the two a
// block may do what needs neither.
#pragma once
#include "memory_order.cuh"
#include "warpgroup.cuh"

struct GridBarrier {
    unsigned* const arrivals;  // one counter for all blocks, 0 before the launch
    unsigned wanted = 0;

    __device__ explicit GridBarrier(unsigned* counter) : arrivals(counter) {}

    // Every thread of the block; holds a block's barrier.
    __device__ void arrive() {
        wanted += gridDim.x;
        __syncthreads();
        if (thread_index() == 0) release_add(arrivals);
    }

    // Every thread of the block; holds a block's barrier.
    __device__ void wait() const {
        // The difference, because the counter may wrap around.
        if (thread_index() == 0)
            while (int(acquire_load(arrivals) - wanted) < 0) {
            }
        __syncthreads();
    }
};
