// What a warp multiplies at once, and how it reads a layer's weights: FFMA in float32, tensor cores in
// bfloat16, behind one interface. Also the activation and its derivative.
#pragma once
#include "mlp_layers.cuh"
#include "mma.cuh"
#include "real.cuh"

#if LG_FLOAT32

// Eight rows by eight columns of sums in a warp, by FFMA: lane l holds rows l / 8 and l / 8 + 4 of
// column l % 8.
struct Fragment {
    static constexpr int ROWS = 8, STEP = 4, SUMS = 2;
    struct Activations {
        float4 row[2];
    };
    struct Weights {
        float of[4];
    };

    static __device__ int lane() { return threadIdx.x % 32; }
    static __device__ int row(int i) { return lane() / 8 + i * 4; }
    static __device__ int column(int) { return lane() % 8; }

    static __device__ Activations activations(const float* rows, int stride, int k) {
        Activations a;
        for (int i = 0; i < 2; ++i)
            a.row[i] = *reinterpret_cast<const float4*>(rows + row(i) * stride + k);
        return a;
    }

    template <class Map, bool TAIL>
    static __device__ Weights weights(const float* weight, int k, int first_column) {
        const int at = Map::column(first_column + lane() % 8);
        if constexpr (!Map::BACKWARD) {
            const float4 w = *reinterpret_cast<const float4*>(weight + Map::offset(k, at));
            return {{w.x, w.y, w.z, w.w}};
        }
        Weights w;
        for (int j = 0; j < 4; ++j)
            w.of[j] = TAIL && k + j >= Map::SUMMED ? 0.f : weight[Map::offset(k + j, at)];
        return w;
    }

    static __device__ void multiply_add(float (&sums)[SUMS], const Activations& a, const Weights& w) {
        for (int i = 0; i < 2; ++i) {
            sums[i] = fmaf(a.row[i].x, w.of[0], sums[i]);
            sums[i] = fmaf(a.row[i].y, w.of[1], sums[i]);
            sums[i] = fmaf(a.row[i].z, w.of[2], sums[i]);
            sums[i] = fmaf(a.row[i].w, w.of[3], sums[i]);
        }
    }

    static __device__ void store(float* tile, int stride, const float (&values)[SUMS]) {
        for (int i = 0; i < SUMS; ++i) tile[row(i) * stride + column(i)] = values[i];
    }

    static __device__ void load(float (&values)[SUMS], const float* tile, int stride) {
        for (int i = 0; i < SUMS; ++i) values[i] = tile[row(i) * stride + column(i)];
    }
};

#else

// Sixteen rows by eight columns of sums in a warp, by tensor cores, laid out as mma.cuh says.
struct Fragment {
    static constexpr int ROWS = 16, STEP = 16, SUMS = 4;
    struct Activations {
        unsigned a[4];
    };
    struct Weights {
        unsigned low, high;
    };

    static __device__ int lane() { return threadIdx.x % 32; }
    static __device__ int row(int i) { return lane() / 4 + i / 2 * 8; }
    static __device__ int column(int i) { return lane() % 4 * 2 + i % 2; }

    static __device__ Activations activations(const Bf16* rows, int stride, int k) {
        Activations a;
        load_matrices(a.a, rows + lane() % 16 * stride + k + lane() / 16 * 8);
        return a;
    }

    template <class Map, bool TAIL>
    static __device__ Weights weights(const float* weight, int k, int first_column) {
        const int at = Map::column(first_column + lane() / 4);
        const int first = k + lane() % 4 * 2;
        return {pair<Map, TAIL>(weight, first, at), pair<Map, TAIL>(weight, first + 8, at)};
    }

    template <class Map, bool TAIL>
    static __device__ unsigned pair(const float* weight, int k, int at) {
        const float* from = weight + Map::offset(k, at);
        if constexpr (!Map::BACKWARD) {
            if (TAIL && k >= Map::SUMMED) return 0u;
            const float2 w = *reinterpret_cast<const float2*>(from);
            return pack_bf16(w.x, w.y);
        }
        return pack_bf16(TAIL && k >= Map::SUMMED ? 0.f : from[0],
                         TAIL && k + 1 >= Map::SUMMED ? 0.f : from[Map::offset(1, 0)]);
    }

    static __device__ void multiply_add(float (&sums)[SUMS], const Activations& a, const Weights& w) {
        multiply_add_bf16(sums, a.a, w.low, w.high);
    }

    static __device__ void store(Bf16* tile, int stride, const float (&values)[SUMS]) {
        for (int i = 0; i < SUMS; i += 2)
            *reinterpret_cast<unsigned*>(tile + row(i) * stride + column(i)) =
                pack_bf16(values[i], values[i + 1]);
    }

    static __device__ void load(float (&values)[SUMS], const Bf16* tile, int stride) {
        for (int i = 0; i < SUMS; i += 2) {
            const unsigned two =
                *reinterpret_cast<const unsigned*>(tile + row(i) * stride + column(i));
            values[i] = low_bf16(two);
            values[i + 1] = high_bf16(two);
        }
    }
};

#endif

// A layer's weights as a matrix [SUMMED, COLUMNS]: forward sums over its inputs, backward over its
// outputs.
template <int L, bool BACKWARD_>
struct Map {
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int FAN_IN = LAYERS[L].fan_in;
    static constexpr int SUMMED = BACKWARD ? LAYERS[L].fan_out : FAN_IN;
    static constexpr int COLUMNS = BACKWARD ? FAN_IN : LAYERS[L].fan_out;

    static __device__ int offset(int k, int column) {
        return BACKWARD ? k * FAN_IN + column : column * FAN_IN + k;
    }
    // Lanes past a head's last column compute that column again; nobody stores it.
    static __device__ int column(int at) { return COLUMNS % 8 ? min(at, COLUMNS - 1) : at; }
};

__device__ inline float activation(float x) {
#if !LG_TANH
    return x < 0.f ? 0.f : x;  // and not fmaxf, which would hide a NaN
#elif LG_FLOAT32
    return tanhf(x);
#else
    return tanh_approximate(x);
#endif
}

// value times the activation's derivative, from what the activation gave.
__device__ inline float through_activation(float value, float stored) {
#if LG_TANH
    return value * fmaf(-stored, stored, 1.f);
#else
    return stored > 0.f ? value : 0.f;
#endif
}
