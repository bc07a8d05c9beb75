// For tests/test_statistics.py: block.cuh at work. One block a call.
#include "block.cuh"

// out[0] and out[1] are the sum and the largest of x, out[2] the sum of x^2, found twice over the
// same shared memory; every thread's answer goes to out[3 + thread], which tells whether all agree.
extern "C" __global__ void reductions(const float* x, float* out) {
    __shared__ float shared[32 * 2];
    float sums[2] = {x[threadIdx.x], x[threadIdx.x] * x[threadIdx.x]};
    block_sum(sums, shared);
    const float largest = block_max(x[threadIdx.x], shared);
    if (threadIdx.x == 0) {
        out[0] = sums[0];
        out[1] = largest;
        out[2] = sums[1];
    }
    out[3 + threadIdx.x] = block_sum(x[threadIdx.x], shared);
}
