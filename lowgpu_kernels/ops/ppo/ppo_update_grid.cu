// Kernel of ppo_update.py where a GPU's warpgroups multiply and one launch may hold it whole: all
// updates of a call, with barriers of the whole grid between their parts (grid_barrier.cuh).
//
// A block takes tiles of 64 rows of the minibatch, one after another. Two warpgroups run the network
// up and down over a tile (warpgroup_gradient.cuh). In between, a thread of the first 64 owns a row and
// works out its loss, while the gatherers, two warps of the second group, start the copies of the next
// tile's rows, a thread a row: not earlier, because that would hold up the weights. What they brought
// becomes observations after the tile, or while the grid waits. A tile leaves its own vector of
// gradients. Then a block adds up its share of the gradient over all tiles, a warp 32
// neighbouring 16-byte pieces and every SLICES-th tile; a thread owns some elements of the share for
// the whole launch, with the parameters and Adam's means in shared memory, and leaves the rounded
// weights in the image that every block copies for the next update.
#include "grid_barrier.cuh"
#include "update_gatherers.cuh"

constexpr int ACTIONS = LG_ACTIONS, TALLY = 8;
static_assert(LG_INPUTS == WIDTH && LG_HEADS == ACTIONS + 1, "the network is the env's");
static_assert(TEAMS == 1 && THREADS == 256, "a block has one tile, and two warpgroups");

union Piece {
    uint4 bits;
    Bf16 of[PIECE];
};

// The block's share of the gradient added up over the tiles, in order: elements in tile.sums[0].
__device__ inline void add_up(const Tile& tile, const Bf16* partials, int tiles) {
    const int thread = thread_index(), lane = thread % WIDE, slice = thread / WIDE;
    const int piece = blockIdx.x * A_BLOCK + lane;
    if (lane < A_BLOCK && slice < SLICES) {
        float of[PIECE] = {};
        const Bf16* const from = partials + (long long)piece * PIECE;
        // Of a piece that belongs to no parameter nothing was written.
        bool wanted = false;
#pragma unroll
        for (int j = 0; j < PIECE; ++j)
            wanted |= tile.owned[lane * PIECE + j].place.parameter >= 0;
        if (wanted)
#pragma unroll 1
            for (int first = slice; first < tiles; first += SLICES * AHEAD) {
                Piece got[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const int at = first + i * SLICES;
                    got[i].bits = make_uint4(0u, 0u, 0u, 0u);
                    if (at < tiles)
                        got[i].bits = __ldcg(reinterpret_cast<const uint4*>(
                            from + (long long)at * LG_PARTIAL));
                }
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                    for (int j = 0; j < PIECE; ++j)
                        of[j] += __uint_as_float(unsigned(got[i].of[j].bits) << 16);
            }
        float4* const to = reinterpret_cast<float4*>(tile.sums + slice * ELEMENTS + lane * PIECE);
        to[0] = make_float4(of[0], of[1], of[2], of[3]);
        to[1] = make_float4(of[4], of[5], of[6], of[7]);
    }
    __syncthreads();
}

// The sum of all blocks' numbers, in every thread; a warp alone does it.
__device__ inline float sum_of(const float* of_blocks) {
    constexpr int A_LANE = (LG_GRID + WARP_LANES - 1) / WARP_LANES;
    float held[A_LANE], total = 0.f;
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) {
        const int at = threadIdx.x % WARP_LANES + i * WARP_LANES;
        held[i] = at < LG_GRID ? __ldcg(of_blocks + at) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) total += held[i];
    return warp_sum(total);
}

// One warp: means of the statistics from the sums of the blocks that had rows.
__device__ inline void finish_statistics(const float* tallies, int blocks, int batch, float value_weight,
                                         float entropy_weight, float* statistics) {
    const int lane = threadIdx.x % WARP_LANES;
    float totals[LOSS_SUMS] = {};
    for (int at = lane; at < blocks; at += WARP_LANES) {
        const float4* const of = reinterpret_cast<const float4*>(tallies + (long long)at * TALLY);
        const float4 low = __ldcg(of), high = __ldcg(of + 1);
        const float seven[LOSS_SUMS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z};
#pragma unroll
        for (int k = 0; k < LOSS_SUMS; ++k) totals[k] += seven[k];
    }
#pragma unroll
    for (int k = 0; k < LOSS_SUMS; ++k) totals[k] = warp_sum(totals[k]);
    if (lane != 0) return;
    const float count = float(max(batch, 1));
#pragma unroll
    for (int k = 0; k < LOSS_SUMS - 1; ++k) statistics[k] = totals[k] / count;
    statistics[LOSS_SUMS - 1] = totals[LOSS_SUMS - 1];
    statistics[LOSS_SUMS] =
        totals[0] / count + (value_weight * (totals[1] / count) - entropy_weight * (totals[2] / count));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ppo_update_grid(float* parameters, float* m, float* v, int* step, const float* state_floats,
                    const int* state_ints, const Bf16* table, const float* series, int series_rows,
                    const int* index, const int* action, const float* log_probability,
                    const float* value, const float* advantage, const float* returns,
                    const float* moments, int updates, int batch, float clip, float value_clip,
                    float value_weight, float entropy_weight, float lr, float take1, float log1,
                    float beta2, float take2, float log2, float eps, float max_norm,
                    int decay_updates, int decay_every, float* gradient, float* statistics,
                    float* norm, Bf16* partials, float* tallies, float* squares,
                    unsigned char* image, unsigned* arrivals) {
    extern __shared__ __align__(1024) uint4 memory[];
    Tile tile(memory);
    const Rollout from{state_floats, state_ints,      table, series,    series_rows, updates, batch,
                       index,        action,          log_probability, value, advantage, returns,
                       moments};
    const LossWeights weights{clip, value_clip, value_weight, entropy_weight};
    const float share = 1.f / float(batch);
    const int tiles = (batch - 1) / ROWS + 1;
    GridBarrier grid(arrivals);
    const int warp = tile.team.warp;
    const bool gathers = Gatherers::are(warp) && blockIdx.x < tiles;

    for (int i = threadIdx.x; i < Tile::ONES; i += THREADS) tile.ones[i] = {0x3F80};
    if (threadIdx.x == 0)
        for (int l = 0; l <= LAYER_COUNT; ++l) make_copy_barrier(tile.copies + l);
    show_copy_barriers();
    // Everything around the weights is zero and stays zero.
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < IMAGE_NBYTES / 16; i += LG_GRID * THREADS)
        reinterpret_cast<uint4*>(image)[i] = make_uint4(0u, 0u, 0u, 0u);
    for (int e = thread_index(); e < ELEMENTS; e += THREADS) {
        const int element = blockIdx.x * ELEMENTS + e;
        Owned& of = tile.owned[e];
        of.place = element < LG_PARTIAL ? place_of(element) : Place{-1, 0, false};
        const int p = of.place.parameter;
        if (p < 0) continue;
        of.parameter = parameters[p];
        of.m = m[p];
        of.v = v[p];
    }
    grid.arrive();
    grid.wait();
    const auto publish = [&](const Owned& of) {
        unsigned char* const to = image + of.place.image;
        if (of.place.bias)
            *reinterpret_cast<float*>(to) = of.parameter;
        else
            *reinterpret_cast<Bf16*>(to) = to_real(of.parameter);
    };
    for (int e = thread_index(); e < ELEMENTS; e += THREADS)
        if (tile.owned[e].place.parameter >= 0) publish(tile.owned[e]);
    grid.arrive();

    Turn turn = {0, int(blockIdx.x)};
    if (gathers) {
        tile.rows[Gatherers::thread()].following =
            Gatherers::owns(from, turn) ? *Gatherers::place(from, turn) : 0;
        Gatherers::fetch(tile, from, turn, tiles);
        Gatherers().leave(tile, from, turn);
    }
    int done = *step;
    grid.wait();

    for (int update = 0; update < updates; ++update) {
        if (threadIdx.x == 0 && blockIdx.x < tiles) copy_weights(tile, image);
        for (int i = threadIdx.x; i < ROWS * LOSS_SUMS; i += THREADS) tile.loss_sums[i] = 0.f;
        for (int at = blockIdx.x; at < tiles; at += LG_GRID) {
            wait_for_copies_but<0>();
            show_to_products();
            __syncthreads();  // these rows are there, and the last tile's are done with
            tile.now ^= 1;
            turn = turn.next(tiles);
            forward_from<0>(tile);
            if (threadIdx.x < ROWS) {
                float* const y = tile.y + threadIdx.x * LG_OUTPUTS;
                const Taken taken = tile.taken[tile.now * ROWS + threadIdx.x];
                float sums[LOSS_SUMS] = {};
                if (taken.action >= 0)
                    loss_of_row<ACTIONS>(y, taken, weights, share, sums);
                else
                    for (int c = 0; c < LG_HEADS; ++c) y[c] = 0.f;
#pragma unroll
                for (int k = 0; k < LOSS_SUMS; ++k)
                    tile.loss_sums[threadIdx.x * LOSS_SUMS + k] += sums[k];
                store_head_gradient(tile, threadIdx.x, y);
                show_to_products();
            } else if (gathers) {
                Gatherers::fetch(tile, from, turn, tiles);
            }
            tile.team.sync();
            backward_from<LAYER_COUNT - 1>(tile, partials + (long long)at * LG_PARTIAL);
            if (gathers && at + LG_GRID < tiles) Gatherers().leave(tile, from, turn);
        }
        grid.arrive();
        if (gathers) Gatherers().leave(tile, from, turn);
        if (warp < LOSS_SUMS) {
            const float* const of = tile.loss_sums + threadIdx.x % WARP_LANES * LOSS_SUMS + warp;
            const float total = warp_sum(of[0] + of[WARP_LANES * LOSS_SUMS]);
            if (threadIdx.x % WARP_LANES == 0) tallies[blockIdx.x * TALLY + warp] = total;
        } else if (warp == WARPS - 1) {
            *tile.rates = adam_rates(lr, log1, log2, done, decay_updates, decay_every);
        }
        tile.parity ^= 1;
        grid.wait();

        add_up(tile, partials, tiles);
        float square = 0.f;
        for (int e = thread_index(); e < ELEMENTS; e += THREADS) {
            float total = 0.f;
            if (tile.owned[e].place.parameter >= 0)
#pragma unroll
                for (int s = 0; s < SLICES; ++s) total += tile.sums[s * ELEMENTS + e];
            tile.sums[e] = total;
            square = fmaf(total, total, square);
        }
        square = warp_sum(square);
        if (threadIdx.x % WARP_LANES == 0) tile.squares[warp] = square;
        __syncthreads();
        if (threadIdx.x == 0) {
            float of_block = 0.f;
            for (int w = 0; w < WARPS; ++w) of_block += tile.squares[w];
            squares[blockIdx.x] = of_block;
        }
        grid.arrive();
        grid.wait();

        // One warp of a block: all of them together would wait for the same few lines.
        if (warp == 0) {
            const float squared = sum_of(squares);
            if (threadIdx.x == 0) tile.squares[0] = squared;
        }
        __syncthreads();
        const AdamRates rates = *tile.rates;
        const float length = sqrtf(tile.squares[0]);
        const bool finite = length - length == 0.f;
        const float factor = clip_factor(length, max_norm);
        done += finite;
        for (int e = thread_index(); e < ELEMENTS; e += THREADS) {
            Owned& of = tile.owned[e];
            if (of.place.parameter < 0) continue;
            if (update == updates - 1) gradient[of.place.parameter] = tile.sums[e];
            if (!finite) continue;
            adam_element(of.parameter, of.m, of.v, factor * tile.sums[e], take1, beta2, take2, eps, rates);
            publish(of);
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) norm[update] = length;
        grid.arrive();
        if (blockIdx.x == LG_GRID - 1 && warp == WARPS - 1)
            finish_statistics(tallies, min(tiles, LG_GRID), batch, value_weight, entropy_weight,
                              statistics + (long long)update * TALLY);
        grid.wait();
    }
    for (int e = thread_index(); e < ELEMENTS; e += THREADS) {
        const Owned& of = tile.owned[e];
        const int p = of.place.parameter;
        if (p < 0) continue;
        parameters[p] = of.parameter;
        m[p] = of.m;
        v[p] = of.v;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *step = done;
}
