// Kernels of ppo_update.py, launched one after another; the parameters then change in adam.py's.
//
// ppo_update_tiles: a block takes tiles of LG_ROWS rows of the minibatch, one after another, of those from
// `first_tile` to before `last_tile`: all, or as many as working memory holds vectors. A thread
// of the first LG_ROWS owns a row: it gathers the row's state and transition and works out its loss;
// all threads together run the network up and down as update_tile.cuh describes. A tile leaves its own
// vector of gradients and its own sums of statistics.
// ppo_update_sum: adds them up (update_sum.cuh); the last block adds up the statistics instead.
#include "observe_tile.cuh"
#include "ppo_terms.cuh"
#include "update_gradient.cuh"
#include "update_sum.cuh"

constexpr int ACTIONS = LG_ACTIONS, TALLY = 8;
static_assert(Tile::NBYTES == LG_TILE_NBYTES, "update_tile.py counts the same shared memory");
static_assert(LG_INPUTS == WIDTH && LG_HEADS == ACTIONS + 1, "the network is the env's");

extern "C" __global__ void __launch_bounds__(THREADS, LG_BLOCKS_A_SM)
    ppo_update_tiles(const float* __restrict__ parameters, const float* __restrict__ state_floats,
                     const int* __restrict__ state_ints, const Real* __restrict__ table,
                     const float* __restrict__ series, int series_rows,
                     const int* __restrict__ index, const int* __restrict__ action,
                     const float* __restrict__ log_probability, const float* __restrict__ value,
                     const float* __restrict__ advantage, const float* __restrict__ returns,
                     const float* __restrict__ moments, int batch, int first_tile, int last_tile,
                     float clip, float value_clip, float value_weight, float entropy_weight, Real* __restrict__ partials,
                     float* __restrict__ tallies) {
    extern __shared__ uint4 memory[];
    __shared__ int table_rows[ROWS];
    __shared__ float block_sums[LOSS_SUMS * WARPS];
    const Tile tile(memory);
    const LossWeights weights{clip, value_clip, value_weight, entropy_weight};
    const float share = 1.f / float(batch);
    // Every wait for the first tile's rows is filled with the staging of some of the layers.
    int n = 0;
    for (int at = first_tile + blockIdx.x; at < last_tile; at += gridDim.x) {
        const bool first = at == first_tile + blockIdx.x;
        const int row = at * ROWS + threadIdx.x;
        const bool owns = threadIdx.x < min(ROWS, batch - at * ROWS);
        if (owns) n = index[row];
        if (first) stage<0, 1>(tile, parameters);
        State state = {};
        Taken taken = {};
        if (owns) {
            state = load_state(state_floats, state_ints, n);
            taken = {action[n], log_probability[n], value[n], advantage[n], returns[n]};
        }
        if (first) stage<1, 2>(tile, parameters);
        if (moments != nullptr) taken.gain = (taken.gain - moments[0]) / (moments[1] + 1e-8f);
        observe_tile<ROWS>(
            tile.team, [&](int r, int c) { return tile.inputs + r * INPUT_STRIDE + c; }, state, owns,
            table, series, series_rows, table_rows);
        if (first) stage<2, LAYER_COUNT>(tile, parameters);
        wait_for_copies_but<0>();
        __syncthreads();
        forward_from<0>(tile, parameters);
        float sums[LOSS_SUMS] = {};
        if (threadIdx.x < ROWS) {
            float* const y = tile.y + threadIdx.x * LG_OUTPUTS;
            if (owns)
                loss_of_row<ACTIONS>(y, taken, weights, share, sums);
            else
                for (int c = 0; c < LG_HEADS; ++c) y[c] = 0.f;
            store_head_gradient(tile, threadIdx.x, y);
        }
        block_sum(sums, block_sums);
        if (threadIdx.x == 0) {
            auto* const to = reinterpret_cast<float4*>(tallies + (long long)at * TALLY);
            to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            to[1] = make_float4(sums[4], sums[5], sums[6], 0.f);
        }
        backward_from<LAYER_COUNT - 1>(tile, parameters,
                                       partials + (long long)(at - first_tile) * LG_PARAMETERS);
        __syncthreads();  // the next tile's rows replace what the last gradient was made of
    }
}

// One block: the sums of all tiles' statistics, a warp each, and the means they give.
__device__ inline void finish_statistics(const float* __restrict__ tallies, int tiles, int batch,
                                         float value_weight, float entropy_weight, float* totals,
                                         float* statistics) {
    const int k = threadIdx.x / 32;
    float total = 0.f;
    if (k < LOSS_SUMS)
        for (int at = threadIdx.x % 32; at < tiles; at += 32)
            total += tallies[(long long)at * TALLY + k];
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) totals[k] = total;
    __syncthreads();
    if (threadIdx.x != 0) return;
    const float count = float(max(batch, 1));
    float means[TALLY];
#pragma unroll
    for (int i = 0; i < LOSS_SUMS - 1; ++i) means[i] = totals[i] / count;
    means[LOSS_SUMS - 1] = totals[LOSS_SUMS - 1];
    means[LOSS_SUMS] = means[0] + (value_weight * means[1] - entropy_weight * means[2]);
#pragma unroll
    for (int i = 0; i < TALLY; ++i) statistics[i] = means[i];
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    ppo_update_sum(const Real* __restrict__ partials, const float* __restrict__ tallies,
                   const int* __restrict__ step, int first_tile, int last_tile, int tiles, int batch,
                   float value_weight, float entropy_weight, float* __restrict__ gradient,
                   float* carried, float* __restrict__ squares, int* __restrict__ done,
                   float* __restrict__ statistics) {
    extern __shared__ uint4 memory[];
    __shared__ float scratch[SLICES];
    static_assert(SLICES >= LOSS_SUMS, "a warp a statistic");
    const bool begins = first_tile == 0, ends = last_tile == tiles;
    if (blockIdx.x == gridDim.x - 1) {
        if (!ends) return;
        // The step is copied here, because the next launch both reads and advances it.
        if (threadIdx.x == 0) *done = *step;
        finish_statistics(tallies, tiles, batch, value_weight, entropy_weight, scratch, statistics);
        return;
    }
    sum_tiles(partials, last_tile - first_tile, begins ? nullptr : carried, ends ? nullptr : carried,
              memory, gradient, squares);
}
