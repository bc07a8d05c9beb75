// Kernels of mlp_backward.py, launched one after another.
//
// mlp_backward_rows: a block owns LG_ROWS rows and takes the gradient from the heads down to the
// first layer in shared memory, as mlp_tile.cuh's forward goes up. It leaves a row of gradients for
// each row of the batch: the gradient of the sum that each layer forms before its activation.
// mlp_backward_weights: a block owns a SIDE x SIDE tile of one layer's weights and one of the splits
// of the batch; it sums gradient times input over its rows into a vector of parameters of its split.
// mlp_backward_sum: a thread owns a parameter and sums it over the splits, in order.
#include "mlp_tile.cuh"

static_assert(MlpTile<LG_ROWS>::NBYTES == LG_TILE_NBYTES, "tile.py counts the same shared memory");

template <int L>
__device__ inline void backward_from(const MlpTile<LG_ROWS>& tile, const Real* hidden,
                                     const float* grad_y, const float* __restrict__ parameters,
                                     Real* gradients, int rows) {
    constexpr Layer layer = LAYERS[L];
    constexpr int STRIDE = MlpTile<LG_ROWS>::stride(layer.depth);
    Real* const gradient = tile.at(layer.depth);
    if constexpr (layer.head) {
        constexpr int COLUMNS = round_up(layer.fan_out, 16);
        __syncthreads();  // the tower before may still be storing from this buffer
        for (int i = threadIdx.x; i < LG_ROWS * COLUMNS; i += MLP_THREADS) {
            const int row = i / COLUMNS, column = i % COLUMNS;
            const bool valid = row < rows && column < layer.fan_out;
            gradient[row * STRIDE + column] = to_real(
                valid ? grad_y[(long long)row * LG_OUTPUTS + layer.column + column] : 0.f);
        }
        __syncthreads();
    }
    store_tile_rows<LG_ROWS, round_up(layer.fan_out, 8)>(gradients + layer.gradient, LG_GRADIENTS,
                                                    gradient, STRIDE, rows);
    if constexpr (layer.depth > 0) {
        // What the layer before gave lies where its gradient will: each thread replaces its own.
        constexpr Layer before = LAYERS[L - 1];
        constexpr int BEFORE = MlpTile<LG_ROWS>::stride(before.depth);
        Real* const into = tile.at(before.depth);
        load_tile_rows<LG_ROWS, before.fan_out>(into, BEFORE, hidden + before.column, LG_HIDDEN, rows);
        wait_for_copies_but<0>();
        __syncthreads();
        product<LG_ROWS, Map<L, true>>(
            gradient, STRIDE, parameters + layer.weight,
            [&](float (&sums)[Fragment::SUMS], int) {
                for (int i = 0; i < Fragment::SUMS; ++i) sums[i] = 0.f;
            },
            [&](float (&sums)[Fragment::SUMS], int row, int column) {
                Real* const at = into + row * BEFORE + column;
                float stored[Fragment::SUMS];
                Fragment::load(stored, at, BEFORE);
                for (int i = 0; i < Fragment::SUMS; ++i)
                    sums[i] = through_activation(sums[i], stored[i]);
                Fragment::store(at, BEFORE, sums);
            });
        __syncthreads();
    }
    if constexpr (L > 0) backward_from<L - 1>(tile, hidden, grad_y, parameters, gradients, rows);
}

extern "C" __global__ void __launch_bounds__(MLP_THREADS, 2)
    mlp_backward_rows(const Real* __restrict__ hidden, const float* __restrict__ grad_y,
                      const float* __restrict__ parameters, Real* __restrict__ gradients,
                      int batch) {
    extern __shared__ uint4 memory[];
    const MlpTile<LG_ROWS> tile(memory);
    const long long first = (long long)blockIdx.x * LG_ROWS;
    const int rows = int(min((long long)LG_ROWS, batch - first));
    backward_from<LAYER_COUNT - 1>(tile, hidden + first * LG_HIDDEN, grad_y + first * LG_OUTPUTS,
                                   parameters, gradients + first * LG_GRADIENTS, rows);
}

constexpr int SIDE = LG_SIDE;
constexpr int WEIGHT_THREADS = 128;
constexpr int STAGE = LG_STAGE;      // rows that are in shared memory at once, twice over
constexpr int PITCH = SIDE + PIECE;  // an odd number of 16 B pieces: ldmatrix meets no bank twice

struct Stage {
    alignas(16) Real gradients[STAGE][PITCH];
    alignas(16) Real inputs[STAGE][PITCH];
};

// Starts copying SIDE columns of up to STAGE rows; zeros past `rows` and `columns`, a multiple of 8.
__device__ inline void load_stage(Real (&to)[STAGE][PITCH], const Real* from, long long stride,
                                  int rows, int columns) {
    constexpr int PIECES = SIDE / PIECE;
    for (int i = threadIdx.x; i < STAGE * PIECES; i += WEIGHT_THREADS) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        const bool valid = row < rows && column < columns;
        start_copy_16(&to[row][column], valid ? from + row * stride + column : from, valid);
    }
}

#if LG_FLOAT32

// A thread's 8 outputs by 4 inputs of the tile. Half a warp shares its outputs, so those are
// broadcast, and neighbouring threads read neighbouring inputs.
struct WeightSums {
    float sums[8][4] = {};
    float bias[8] = {};

    __device__ int output() const { return threadIdx.x / 16 * 8; }
    __device__ int input() const { return threadIdx.x % 16 * 4; }

    __device__ void add(const Stage& stage, bool with_bias) {
#pragma unroll 4
        for (int row = 0; row < STAGE; ++row) {
            const float* g = &stage.gradients[row][output()];
            const float4 low = *reinterpret_cast<const float4*>(g);
            const float4 high = *reinterpret_cast<const float4*>(g + 4);
            const float4 x = *reinterpret_cast<const float4*>(&stage.inputs[row][input()]);
            const float of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                sums[n][0] = fmaf(of[n], x.x, sums[n][0]);
                sums[n][1] = fmaf(of[n], x.y, sums[n][1]);
                sums[n][2] = fmaf(of[n], x.z, sums[n][2]);
                sums[n][3] = fmaf(of[n], x.w, sums[n][3]);
                if (with_bias) bias[n] += of[n];
            }
        }
    }

    // weight(output, input, pointer to neighbouring sums), two by two; bias_of(output, sum).
    template <class Weight, class Bias>
    __device__ void give(Weight weight, Bias bias_of) const {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            weight(output() + n, input(), sums[n][0], sums[n][1]);
            weight(output() + n, input() + 2, sums[n][2], sums[n][3]);
            if (threadIdx.x % 16 == 0) bias_of(output() + n, bias[n]);
        }
    }
};

#else

// A warp's 32 outputs by 32 inputs of the tile; lanes hold sums as mma.cuh says, outputs as rows.
// The batch is what is summed over and lies along the rows of both operands, so both are transposed
// on the way from shared memory. The bias gradient is a product with a matrix of ones.
struct WeightSums {
    float sums[2][4][4] = {};
    float bias[2][4] = {};

    __device__ int output() const { return threadIdx.x / 64 * 32; }
    __device__ int input() const { return threadIdx.x / 32 % 2 * 32; }

    __device__ void add(const Stage& stage, bool with_bias) {
        constexpr unsigned ONES = 0x3F803F80u;
        const int lane = threadIdx.x % 32;
        const bool ones = with_bias && input() == 0;
#pragma unroll
        for (int row = 0; row < STAGE; row += 16) {
            unsigned g[2][4], x[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                load_matrices_transposed(g[i], &stage.gradients[row + lane / 16 * 8 + lane % 8]
                                                               [output() + i * 16 + lane / 8 % 2 * 8]);
                load_matrices_transposed(
                    x[i], &stage.inputs[row + lane % 16][input() + i * 16 + lane / 16 * 8]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply_add_bf16(sums[i][j], g[i], x[j / 2][j % 2 * 2],
                                      x[j / 2][j % 2 * 2 + 1]);
                if (ones) multiply_add_bf16(bias[i], g[i], ONES, ONES);
            }
        }
    }

    template <class Weight, class Bias>
    __device__ void give(Weight weight, Bias bias_of) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = output() + i * 16 + half * 8 + lane / 4;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    weight(at, input() + j * 8 + lane % 4 * 2, sums[i][j][half * 2],
                           sums[i][j][half * 2 + 1]);
                if (input() == 0 && lane % 4 == 0) bias_of(at, bias[i][half * 2]);
            }
    }
};

#endif

extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS)
    mlp_backward_weights(const Real* __restrict__ x, const Real* __restrict__ hidden,
                         const Real* __restrict__ gradients, float* __restrict__ partials, int batch,
                         int rows_a_split) {
    __shared__ Stage stages[2];
    // Tiles are numbered layer after layer, outputs before inputs.
    int tile = blockIdx.x, at = 0, across = 0;
    for (; at < LAYER_COUNT; ++at) {
        across = (LAYERS[at].fan_in + SIDE - 1) / SIDE;
        const int tiles = (LAYERS[at].fan_out + SIDE - 1) / SIDE * across;
        if (tile < tiles) break;
        tile -= tiles;
    }
    const Layer layer = LAYERS[at];
    const int output = tile / across * SIDE, input = tile % across * SIDE;
    const int gradient_columns = min(SIDE, round_up(layer.fan_out, 8) - output);
    const int input_columns = min(SIDE, layer.fan_in - input);
    const long long first = (long long)blockIdx.y * rows_a_split;
    const int rows = int(max(0ll, min((long long)rows_a_split, batch - first)));
    const long long stride = layer.source < 0 ? LG_INPUTS : LG_HIDDEN;
    const Real* from = layer.source < 0 ? x : hidden + layer.source;
    from += first * stride + input;
    gradients += first * LG_GRADIENTS + layer.gradient + output;

    const auto load = [&](int stage) {
        const int row = stage * STAGE;
        if (row < rows) {
            load_stage(stages[stage % 2].gradients, gradients + (long long)row * LG_GRADIENTS,
                       LG_GRADIENTS, rows - row, gradient_columns);
            load_stage(stages[stage % 2].inputs, from + row * stride, stride, rows - row,
                       input_columns);
        }
        end_copy_group();
    };
    WeightSums sums;
    load(0);
    for (int stage = 0; stage * STAGE < rows; ++stage) {
        load(stage + 1);
        wait_for_copies_but<1>();
        __syncthreads();
        sums.add(stages[stage % 2], input == 0);
        __syncthreads();
    }

    partials += (long long)blockIdx.y * LG_PARAMETERS;
    sums.give(
        [&](int n, int k, float left, float right) {
            if (output + n < layer.fan_out && k < input_columns)
                *reinterpret_cast<float2*>(partials + layer.weight +
                                           (output + n) * layer.fan_in + input + k) =
                    make_float2(left, right);
        },
        [&](int n, float sum) {
            // Past a head's width the gradients are zero, so the gap after its bias gets zero too.
            if (input == 0 && n < gradient_columns) partials[layer.bias + output + n] = sum;
        });
}

extern "C" __global__ void mlp_backward_sum(const float* __restrict__ partials,
                                            float* __restrict__ gradient, int splits) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= LG_PARAMETERS) return;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < splits; ++split)
        sum += partials[(long long)split * LG_PARAMETERS + at];
    gradient[at] = sum;
}
