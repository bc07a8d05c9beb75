// exp, log, sin, cos and tanh in float32 from +, -, *, / and bit operations: the same bits on the
// CPU and the GPU. Twin of device/maths.py, which says what each is good for and where it is from.
// No fmaf, and contraction must be off: Python has neither.
#pragma once
#include "host.cuh"

constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer
constexpr float LN_2_HIGH = 0.693145751953125f;
constexpr float LN_2_LOW = 1.42860682030941723212e-6f;

__host__ __device__ inline unsigned bits_of(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

__host__ __device__ inline float float_of(unsigned bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

__host__ __device__ inline float infinity_f32() { return float_of(0x7F800000u); }
__host__ __device__ inline float nan_f32() { return float_of(0x7FC00000u); }

// 2^n for n in [-126, 127], given as the low bits of an unsigned.
__host__ __device__ inline float power_of_two(unsigned n) { return float_of((n + 127u) << 23); }

__host__ __device__ inline float exp_f32(float x) {
    const float shifted = x * 1.4426950408889634f + ROUNDER;
    const float n = shifted - ROUNDER;
    const float r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    float p = float(1. / 5040);
    p = p * r + float(1. / 720);
    p = p * r + float(1. / 120);
    p = p * r + float(1. / 24);
    p = p * r + float(1. / 6);
    p = p * r + 0.5f;
    const float y = 1.f + (r + r * r * p);
    // n reaches -150 and 128, past what one power of two can hold: scale by two.
    const unsigned count = bits_of(shifted) - bits_of(ROUNDER);
    const unsigned half = ((count + 256u) >> 1) - 128u;
    float found = y * power_of_two(half) * power_of_two(count - half);
    // Chosen last, and not by leaving early: several of these then run side by side.
    if (x > 88.72283172607422f) found = infinity_f32();
    if (x < -103.97207641601562f) found = 0.f;
    return x == x ? found : x;
}

__host__ __device__ inline float log_f32(float x) {
    if (x != x || x == infinity_f32()) return x;
    if (x == 0.f) return -infinity_f32();
    if (x < 0.f) return nan_f32();
    float n = -127.f;
    if (x < 1.1754943508222875e-38f) {
        x = x * 8388608.f;
        n = -150.f;
    }
    // The bits of sqrt(1/2) are taken away and put back, so that m starts there and not at 1.
    const unsigned from_root = bits_of(x) - 0x3F3504F3u;
    n = n + float((from_root + 0x3F800000u) >> 23);
    const float m = float_of((from_root & 0x007FFFFFu) + 0x3F3504F3u);
    const float f = m - 1.f;
    const float s = f / (f + 2.f);
    const float z = s * s;
    float p = float(2. / 9);
    p = p * z + float(2. / 7);
    p = p * z + float(2. / 5);
    p = p * z + float(2. / 3);
    p = p * z;
    const float half_square = 0.5f * f * f;
    return n * LN_2_HIGH + (f - (half_square - (s * (half_square + p) + n * LN_2_LOW)));
}

// sin(x + ahead * pi / 2).
__host__ __device__ inline float sin_of_quadrants(float x, unsigned ahead) {
    if (!(-1e4f <= x && x <= 1e4f)) return nan_f32();
    const float shifted = x * 0.6366197723675814f + ROUNDER;
    const float n = shifted - ROUNDER;
    const float r =
        ((x - n * 1.5703125f) - n * 4.835128784179687e-4f) - n * 3.139164786504813e-7f;
    const unsigned quadrant = bits_of(shifted) + ahead;
    const float z = r * r;
    float y;
    if (quadrant & 1u) {
        float p = float(-1. / 3628800);
        p = p * z + float(1. / 40320);
        p = p * z - float(1. / 720);
        p = p * z + float(1. / 24);
        p = p * z - 0.5f;
        y = 1.f + z * p;
    } else {
        float p = float(1. / 362880);
        p = p * z - float(1. / 5040);
        p = p * z + float(1. / 120);
        p = p * z - float(1. / 6);
        y = r + r * (z * p);
    }
    return quadrant & 2u ? -y : y;
}

__host__ __device__ inline float sin_f32(float x) { return sin_of_quadrants(x, 0u); }
__host__ __device__ inline float cos_f32(float x) { return sin_of_quadrants(x, 1u); }

__host__ __device__ inline float tanh_f32(float x) {
    const float size = x < 0.f ? -x : x;
    if (size < 0.25f) {
        const float z = x * x;
        float p = float(62. / 2835);
        p = p * z - float(17. / 315);
        p = p * z + float(2. / 15);
        p = p * z - float(1. / 3);
        return x + x * (z * p);
    }
    const float y = 1.f - 2.f / (exp_f32(size + size) + 1.f);
    return x < 0.f ? -y : y;
}
