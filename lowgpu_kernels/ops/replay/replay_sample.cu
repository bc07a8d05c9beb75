// Kernel of replay_sample.py. A thread owns a row; neighbouring threads write neighbouring indices.
#include "atomics.cuh"
#include "philox.cuh"
#include "replay.cuh"

extern "C" __global__ void __launch_bounds__(LG_THREADS)
    replay_sample_kernel(const int* head, unsigned long long* clock, int envs, int rows,
                         unsigned long long seed, int* out) {
    const unsigned b = blockIdx.x * LG_THREADS + threadIdx.x;
    const unsigned long long now = clock[0];
    const unsigned count = unsigned(head[1]) * unsigned(envs);
    __syncthreads();
    // After the barrier, so that the last block to come here knows that all have read the clock.
    bool last = false;
    if (threadIdx.x == 0) last = arrives_last(reinterpret_cast<unsigned*>(clock + 1), gridDim.x);
    const uint4 words = draw(seed, SAMPLE, b, now);
    if (b < unsigned(rows)) out[b] = count > 0 ? int(uniform_of(words.x, words.y, count)) : -1;
    if (last) clock[0] = now + 1;
}
