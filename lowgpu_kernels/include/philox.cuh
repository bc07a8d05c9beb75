// Philox4x32-10, the counter-based generator of Salmon et al., SC'11.
// Twin of device/philox.py: same key and counter, same four words, bit for bit.
#pragma once
#include "host.cuh"

// What a draw is for. Two purposes never share a counter.
enum Purpose : unsigned {
    ACTION = 0, RESET = 1, STEP = 2, PERMUTE = 3, INIT = 4, SAMPLE = 5, EXPLORE = 6
};

__host__ __device__ inline uint4 philox4x32(uint4 counter, uint2 key) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2511F53ull * counter.x;
        const unsigned long long b = 0xCD9E8D57ull * counter.z;
        counter = make_uint4(unsigned(b >> 32) ^ counter.y ^ key.x, unsigned(b),
                             unsigned(a >> 32) ^ counter.w ^ key.y, unsigned(a));
        key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
    }
    return counter;
}

// The four words that belong to one environment, row or epoch (`index`) at one global step.
__host__ __device__ inline uint4 draw(unsigned long long seed, unsigned purpose, unsigned index,
                                      unsigned long long step) {
    return philox4x32(make_uint4(index, unsigned(step), unsigned(step >> 32), purpose),
                      make_uint2(unsigned(seed), unsigned(seed >> 32)));
}

// The top 24 bits of a word as a float in [0, 1): a multiple of 2^-24, so 1 cannot come out.
__host__ __device__ inline float unit(unsigned word) { return float(word >> 8) * 5.9604644775390625e-8f; }
