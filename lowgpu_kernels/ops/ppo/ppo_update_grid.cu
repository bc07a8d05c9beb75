// Kernel of ppo_update.py where a GPU's warpgroups multiply and one launch may hold it whole: all
// updates of a call (update_grid.cuh).
//
// Between a tile's way up and its way down two threads of the first group own a row and work out its
// loss, while the gatherers, two warps of the second group, start the copies of the next tile's rows, a
// thread a row: not earlier, because that would hold up the weights. What they brought becomes
// observations after the tile, or while the grid waits. Behind a block's first tile no weights are under
// way: there rows are asked for before the way up, and observed during the loss.
#include "ppo_gatherers.cuh"
#include "ppo_shared_loss.cuh"
#include "update_grid_sum.cuh"

constexpr int ACTIONS = LG_ACTIONS, TALLY = 8;
constexpr int LOSS_LANES = GROUP_THREADS / ROWS;
static_assert(LG_HEADS == ACTIONS + 1, "the network gives the env's logits and a value");

// One warp: means of the statistics from the sums of the blocks that had rows.
__device__ inline void finish_statistics(const float* tallies, int vectors, int batch, float value_weight,
                                         float entropy_weight, float* statistics) {
    float totals[LOSS_SUMS];
    add_tallies(tallies, vectors, totals);
    if (threadIdx.x % WARP_LANES != 0) return;
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
    const bool gathers = Gatherers::are(warp) && Turn::home() < tiles;
    const bool left_early = SEVERAL && Turn::home() + Turn::AT_ONCE < tiles;  // the last tile's next rows

    prepare(tile, LAYER_COUNT + 1);
    clear_around(image, 1);
    find_places(tile);
    for_owned(tile, [&](Owned& of, int) {
        const int p = of.place.parameter;
        of.parameter = parameters[p];
        of.m = m[p];
        of.v = v[p];
        publish(image, of.place, of.parameter);
    });
    grid.arrive();

    Turn turn = {0, Turn::home()};
    if (gathers) {
        tile.rows[Gatherers::thread()].following =
            Gatherers::owns(from, turn) ? *Gatherers::place(from, turn) : 0;
        Gatherers::fetch(tile, from, turn, tiles);
        Gatherers().leave(tile, from, turn);
    }
    int done = *step;
    grid.wait();

    for (int update = 0; update < updates; ++update) {
        if (threadIdx.x == 0 && Turn::home() < tiles) copy_weights(tile, image);
        for (int i = threadIdx.x; i < ROWS * LOSS_SUMS; i += THREADS) tile.loss_sums[i] = 0.f;
        Kept kept;
        for (int at = Turn::home(); at < tiles; at += Turn::AT_ONCE) {
            wait_for_copies_but<0>();
            show_to_products();
            __syncthreads();  // these rows are there, and the last tile's are done with
            tile.now ^= 1;
            turn = turn.next(tiles);
            const bool early = SEVERAL && at != Turn::home();
            if (gathers && early) Gatherers::fetch(tile, from, turn, tiles);
            forward_from<0>(tile);
            if (threadIdx.x < LOSS_LANES * ROWS) {
                const int row = threadIdx.x / LOSS_LANES, lane = threadIdx.x % LOSS_LANES;
                float* const y = tile.y + row * LG_OUTPUTS;
                float sums[LOSS_SUMS] = {};
                loss_of_shared_row<ACTIONS, LOSS_LANES>(y, tile.taken[tile.now * ROWS + row], weights,
                                                        share, lane, sums);
                if (lane == 0)
#pragma unroll
                    for (int k = 0; k < LOSS_SUMS; ++k) tile.loss_sums[row * LOSS_SUMS + k] += sums[k];
                __syncwarp();  // a row is its lanes' together
                store_head_gradient<LOSS_LANES>(tile, row, y, lane);
                show_to_products();
            } else if (gathers && early) {
                Gatherers().leave(tile, from, turn);
            } else if (gathers) {
                Gatherers::fetch(tile, from, turn, tiles);
            }
            tile.team.sync();
            backward_from<LAYER_COUNT - 1>(tile, vector_of(partials, at), kept);
            if (gathers && !early && at + Turn::AT_ONCE < tiles) Gatherers().leave(tile, from, turn);
        }
        if (Turn::home() < tiles)
            kept.store(vector_of(partials, Turn::home()).vector, sharing_group(tile));
        grid.arrive();
        if (gathers && !left_early) Gatherers().leave(tile, from, turn);
        if (warp < LOSS_SUMS)
            leave_tally<LOSS_SUMS>(tile, warp, tallies);
        else if (warp == WARPS - 1)
            *tile.rates = adam_rates(lr, log1, log2, done, decay_updates, decay_every);
        tile.parity ^= 1;
        grid.wait();

        add_up(tile, partials, vectors_of(tiles), squares);
        grid.arrive();
        grid.wait();

        const float length = norm_of(tile, squares);
        const AdamRates rates = *tile.rates;
        const bool finite = length - length == 0.f;
        const float factor = clip_factor(length, max_norm);
        done += finite;
        for_owned(tile, [&](Owned& of, int e) {
            if (update == updates - 1) gradient[of.place.parameter] = tile.sums[e];
            if (!finite) return;
            adam_element(of.parameter, of.m, of.v, factor * tile.sums[e], take1, beta2, take2, eps, rates);
            publish(image, of.place, of.parameter);
        });
        if (blockIdx.x == 0 && threadIdx.x == 0) norm[update] = length;
        grid.arrive();
        if (blockIdx.x == LG_GRID - 1 && warp == WARPS - 1)
            finish_statistics(tallies, vectors_of(tiles), batch, value_weight, entropy_weight,
                              statistics + (long long)update * TALLY);
        grid.wait();
    }
    for_owned(tile, [&](const Owned& of, int) {
        const int p = of.place.parameter;
        parameters[p] = of.parameter;
        m[p] = of.m;
        v[p] = of.v;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) *step = done;
}
