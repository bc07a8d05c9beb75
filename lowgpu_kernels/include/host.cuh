// Lets the host compiler take the scalar headers, so tests compare them with their Python twins.
#pragma once

#ifndef __CUDACC__
#include <math.h>
#include <string.h>
#define __host__
#define __device__
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
#endif
