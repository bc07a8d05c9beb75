// Rows of a padded array between device memory and shared memory, in 16-byte vectors. In device
// memory a row is WIDTH elements, a multiple of 8; in shared memory it is padded<TILE>(WIDTH), with
// zeros after WIDTH, so that a tensor-core step of TILE columns reads no garbage. T is float, or a
// 16-bit type for bfloat16; zero is all bits zero in both. Both addresses must be 16-byte aligned.
// `thread` of `threads` share the work: neighbouring threads take neighbouring vectors, and so
// whole lines of memory. The caller puts the barrier.
#pragma once
#include "host.cuh"

// The next multiple of TILE.
template <int TILE>
__host__ __device__ constexpr int padded(int width) {
    return (width + TILE - 1) / TILE * TILE;
}

// Copies rows [first, first + count) of `rows` to `shared`; a row past the end of the array, which
// has `available` of them, is all zeros.
template <int WIDTH, int TILE, typename T>
__host__ __device__ inline void load_rows(const T* rows, long long first, int count,
                                          long long available, T* shared, int thread, int threads) {
    constexpr int A_VECTOR = 16 / int(sizeof(T));
    static_assert(WIDTH % 8 == 0 && TILE % 16 == 0, "rows and tiles are whole 16-byte vectors");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "float or bfloat16");
    constexpr int VECTORS = WIDTH / A_VECTOR, SLOTS = padded<TILE>(WIDTH) / A_VECTOR;
    const uint4* from = reinterpret_cast<const uint4*>(rows) + first * VECTORS;
    uint4* to = reinterpret_cast<uint4*>(shared);
    for (int i = thread; i < count * SLOTS; i += threads) {
        const int row = i / SLOTS, slot = i % SLOTS;
        const bool stored = slot < VECTORS && first + row < available;
        to[i] = stored ? from[(long long)row * VECTORS + slot] : make_uint4(0, 0, 0, 0);
    }
}

// Copies the first WIDTH columns of `count` rows of `shared` to rows [first, first + count) of
// `rows`; a row past its end is left out.
template <int WIDTH, int TILE, typename T>
__host__ __device__ inline void store_rows(const T* shared, T* rows, long long first, int count,
                                           long long available, int thread, int threads) {
    constexpr int A_VECTOR = 16 / int(sizeof(T));
    static_assert(WIDTH % 8 == 0 && TILE % 16 == 0, "rows and tiles are whole 16-byte vectors");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "float or bfloat16");
    constexpr int VECTORS = WIDTH / A_VECTOR, SLOTS = padded<TILE>(WIDTH) / A_VECTOR;
    const uint4* from = reinterpret_cast<const uint4*>(shared);
    uint4* to = reinterpret_cast<uint4*>(rows) + first * VECTORS;
    for (int i = thread; i < count * VECTORS; i += threads) {
        const int row = i / VECTORS, slot = i % VECTORS;
        if (first + row < available) to[(long long)row * VECTORS + slot] = from[row * SLOTS + slot];
    }
}
