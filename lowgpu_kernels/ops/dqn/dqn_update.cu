// Kernels of dqn_update.py, launched one after another.
//
// dqn_update_tiles: a block takes tiles of LG_ROWS rows of the minibatch, one after another, of those from
// `first_tile` to before `last_tile`: all, or as many as working memory holds vectors. It takes all of its
// with the target's weights, for the values of the next states, and then all of them with the parameters,
// so that weights are staged twice and not with every tile. A thread of the first LG_ROWS owns a row: it
// gathers the row's states and works out its loss; all threads together run the network up and down as
// update_tile.cuh describes. A tile leaves its own vector of gradients and sums of statistics.
// dqn_update_sum: adds them up (update_sum.cuh); the last block adds up the statistics instead.
// dqn_update_move: a thread has an element of the parameters, of Adam's means and of the target.
#include "adam_terms.cuh"
#include "block.cuh"
#include "dqn_terms.cuh"
#include "observe_tile.cuh"
#include "update_gradient.cuh"
#include "update_sum.cuh"

static_assert(Tile::NBYTES == LG_TILE_NBYTES, "update_tile.py counts the same shared memory");
static_assert(LG_INPUTS == WIDTH, "the network is the env's");

// What states are observed with.
struct World {
    const Real* table;
    const float* series;
    int series_rows;
    int* table_rows;
};

// Runs the staged network over the states of rows `row`; ends with a barrier.
__device__ inline void values_of(const Tile& tile, const float* __restrict__ weights,
                                 const float* __restrict__ floats, const int* __restrict__ ints, int row,
                                 bool owns, const World& world) {
    State state = {};
    if (owns) state = load_state(floats, ints, row);
    observe_tile<ROWS>(
        tile.team, [&](int r, int c) { return tile.inputs + r * INPUT_STRIDE + c; }, state, owns,
        world.table, world.series, world.series_rows, world.table_rows);
    wait_for_copies_but<0>();
    __syncthreads();
    forward_from<0>(tile, weights);
}

extern "C" __global__ void __launch_bounds__(THREADS, LG_BLOCKS_A_SM)
    dqn_update_tiles(const float* __restrict__ parameters, const float* __restrict__ target,
                     const float* __restrict__ state_floats, const int* __restrict__ state_ints,
                     const int* __restrict__ action, const float* __restrict__ reward,
                     const float* __restrict__ discount, const float* __restrict__ next_floats,
                     const int* __restrict__ next_ints, const float* __restrict__ weight,
                     const Real* __restrict__ table, const float* __restrict__ series, int series_rows,
                     int batch, int first_tile, int last_tile, float delta, float* held, Real* __restrict__ partials,
                     float* __restrict__ tallies, float* __restrict__ errors) {
    extern __shared__ uint4 memory[];
    __shared__ int table_rows[ROWS];
    __shared__ float block_sums[LOSS_SUMS * WARPS];
    const Tile tile(memory);
    const World world{table, series, series_rows, table_rows};
    const float share = 1.f / float(batch);
    float* const y = tile.y + threadIdx.x * LG_OUTPUTS;
    stage<0, LAYER_COUNT>(tile, target);
#pragma unroll 1
    for (int at = first_tile + blockIdx.x; at < last_tile; at += gridDim.x) {
        const int row = at * ROWS + threadIdx.x;
        const bool owns = threadIdx.x < min(ROWS, batch - at * ROWS);
        values_of(tile, target, next_floats, next_ints, row, owns, world);
        // Read below by the same thread.
        if (owns)
            for (int c = 0; c < LG_HEADS; ++c) held[(long long)row * LG_OUTPUTS + c] = y[c];
    }
    stage<0, LAYER_COUNT>(tile, parameters);
#pragma unroll 1
    for (int at = first_tile + blockIdx.x; at < last_tile; at += gridDim.x) {
        const int row = at * ROWS + threadIdx.x;
        const bool owns = threadIdx.x < min(ROWS, batch - at * ROWS);
        const float* const of_next = held + (long long)row * LG_OUTPUTS;
        int best = 0;
#if LG_DOUBLE
        values_of(tile, parameters, next_floats, next_ints, row, owns, world);
        if (owns) best = best_action<ACTIONS>(y);
#else
        if (owns) best = best_action<ACTIONS>(of_next);
#endif
        values_of(tile, parameters, state_floats, state_ints, row, owns, world);
        float sums[LOSS_SUMS] = {};
        if (threadIdx.x < ROWS) {
            if (owns) {
                const float goal = goal_of_row(of_next, best, reward[row], discount[row]);
                errors[row] = loss_of_row(y, action[row], goal, weight == nullptr ? 1.f : weight[row],
                                          share, delta, sums);
            } else {
                for (int c = 0; c < LG_HEADS; ++c) y[c] = 0.f;
            }
            store_head_gradient(tile, threadIdx.x, y);
        }
        block_sum(sums, block_sums);
        if (threadIdx.x == 0)
            *reinterpret_cast<float4*>(tallies + (long long)at * LOSS_SUMS) =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
        backward_from<LAYER_COUNT - 1>(tile, parameters,
                                       partials + (long long)(at - first_tile) * LG_PARAMETERS);
        __syncthreads();  // the next tile's rows replace what the last gradient was made of
    }
}

// One block: the sums of all tiles' statistics, a warp each, and the means they give.
__device__ inline void finish_statistics(const float* __restrict__ tallies, int tiles, int batch,
                                         float* statistics) {
    static_assert(SLICES >= LOSS_SUMS, "a warp a statistic");
    const int k = threadIdx.x / 32;
    float total = 0.f;
    if (k < LOSS_SUMS)
        for (int at = threadIdx.x % 32; at < tiles; at += 32)
            total += tallies[(long long)at * LOSS_SUMS + k];
    total = warp_sum(total);
    if (k < LOSS_SUMS && threadIdx.x % 32 == 0)
        statistics[k] = statistic(k, total, batch);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    dqn_update_sum(const Real* __restrict__ partials, const float* __restrict__ tallies,
                   const int* __restrict__ step, int first_tile, int last_tile, int tiles, int batch,
                   float* __restrict__ gradient, float* carried, float* __restrict__ squares,
                   int* __restrict__ done, float* __restrict__ statistics) {
    extern __shared__ uint4 memory[];
    const bool begins = first_tile == 0, ends = last_tile == tiles;
    if (blockIdx.x == gridDim.x - 1) {
        if (!ends) return;
        // The step is copied here, because the next launch both reads and advances it.
        if (threadIdx.x == 0) *done = *step;
        finish_statistics(tallies, tiles, batch, statistics);
        return;
    }
    sum_tiles(partials, last_tile - first_tile, begins ? nullptr : carried, ends ? nullptr : carried,
              memory, gradient, squares);
}

extern "C" __global__ void __launch_bounds__(LG_MOVE_THREADS)
    dqn_update_move(float* parameters, float* target, const float* __restrict__ gradient, float* m,
                    float* v, int* step, float lr, float take1, float log1, float beta2, float take2,
                    float log2, float eps, float max_norm, float tau, int target_every,
                    const float* __restrict__ squares, int square_count, const int* __restrict__ done,
                    float* norm) {
    __shared__ float scratch[LG_MOVE_THREADS / WARP_LANES];
    // Every block sums all squares, in the same order.
    float total = 0.f;
    for (int i = threadIdx.x; i < square_count; i += LG_MOVE_THREADS) total += squares[i];
    const float length = sqrtf(block_sum(total, scratch));
    const bool finite = length - length == 0.f;
    const int before = *done, i = blockIdx.x * LG_MOVE_THREADS + threadIdx.x;
    if (i == 0) {
        *norm = length;
        if (finite) *step = before + 1;
    }
    if (!finite || i >= LG_PARAMETERS) return;
    const AdamRates rates = adam_rates(lr, log1, log2, before, 0, 1);
    adam_element(parameters[i], m[i], v[i], clip_factor(length, max_norm) * gradient[i], take1, beta2,
                 take2, eps, rates);
    if ((before + 1) % target_every == 0) target[i] = moved_target(target[i], parameters[i], tau);
}
