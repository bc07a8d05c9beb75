// Kernel of dqn_update.py where a GPU's warpgroups multiply and one launch may hold it whole: all
// updates of a call (update_grid.cuh).
//
// There is room for the weights of one network only. A tile runs upwards with the target's over the next
// states, while layer after layer the parameters take their place; then with these over the next
// states, if they choose the action, and over the states; and then down. A thread of the first 64 owns
// a row and works out its goal and its loss. During the loss the gatherers, the second warpgroup, start
// the copies of the next tile's rows; what they brought becomes observations after the tile, or while
// the grid waits.
#include "dqn_grid_tile.cuh"
#include "update_grid_sum.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dqn_update_grid(float* parameters, float* target, float* m, float* v, int* step,
                    const float* state_floats, const int* state_ints, const int* action,
                    const float* reward, const float* discount, const float* next_floats,
                    const int* next_ints, const float* weight, const Bf16* table,
                    const float* series, int series_rows, int updates, int batch, float delta,
                    float lr, float take1, float log1, float beta2, float take2, float log2,
                    float eps, float max_norm, float tau, int target_every, float* gradient,
                    float* errors, float* statistics, float* norm, Bf16* partials, float* tallies,
                    float* squares, unsigned char* images, unsigned* arrivals) {
    extern __shared__ __align__(1024) uint4 memory[];
    unsigned char* const of_target = images + IMAGE_NBYTES;
    Tile tile(memory, images);
    const Windows from{state_floats, state_ints, next_floats, next_ints,   action,  reward, discount,
                       weight,       table,      series,      series_rows, updates, batch};
    const float share = 1.f / float(batch);
    const int tiles = (batch - 1) / ROWS + 1;
    GridBarrier grid(arrivals);
    const int warp = tile.team.warp;
    const bool gathers = Gatherers::are(warp) && Turn::home() < tiles;

    prepare(tile, LAYER_COUNT);
    clear_around(images, 2);
    find_places(tile);
    for_owned(tile, [&](Owned& of, int) {
        const int p = of.place.parameter;
        of.parameter = parameters[p];
        of.m = m[p];
        of.v = v[p];
        of.target = target[p];
        publish(images, of.place, of.parameter);
        publish(of_target, of.place, of.target);
    });
    grid.arrive();

    Turn turn = {0, Turn::home()};
    if (gathers) {
        Gatherers::fetch(tile, from, turn);
        Gatherers().leave(tile, from, turn);
    }
    int done = *step;
    grid.wait();

    for (int update = 0; update < updates; ++update) {
        for (int i = threadIdx.x; i < ROWS * LOSS_SUMS; i += THREADS) tile.loss_sums[i] = 0.f;
        for (int at = Turn::home(); at < tiles; at += Turn::AT_ONCE) {
            wait_for_copies_but<0>();
            show_to_products();
            __syncthreads();  // these rows are there, and the last tile's are done with
            if (threadIdx.x == 0) {
                show_to_copies();
                copy_target(tile, of_target);
            }
            tile.now ^= 1;
            turn = turn.next(tiles);
            const Window& window = tile.windows[threadIdx.x % ROWS];
            float* const y = tile.y + threadIdx.x * LG_OUTPUTS;
#pragma unroll 1
            for (tile.pass = 0; tile.pass < PASSES; ++tile.pass) {
                forward_from<0>(tile);
                if (tile.pass == 0) tile.follow_target<LAYER_COUNT - 1>();
                if (tile.pass < LAST_PASS && threadIdx.x < ROWS) {
                    float* const held = tile.held + threadIdx.x * LG_OUTPUTS;
                    if (tile.pass == 0)
                        for (int c = 0; c < LG_HEADS; ++c) held[c] = y[c];
                    if (tile.pass == LAST_PASS - 1)
                        tile.goals[threadIdx.x] = goal_of_row(held, best_action<ACTIONS>(y),
                                                              window.reward, window.discount);
                }
                // What is read here a first layer that is a head replaces in the next pass.
                if (LAYERS[0].head) tile.team.sync();
            }
            tile.pass = LAST_PASS;
            if (threadIdx.x < ROWS) {
                float sums[LOSS_SUMS] = {};
                if (window.action >= 0) {
                    const float error = loss_of_row(y, window.action, tile.goals[threadIdx.x],
                                                    window.weight, share, delta, sums);
                    if (Turn::leads())
                        errors[(long long)update * batch + at * ROWS + threadIdx.x] = error;
                } else {
                    for (int c = 0; c < LG_HEADS; ++c) y[c] = 0.f;
                }
#pragma unroll
                for (int k = 0; k < LOSS_SUMS; ++k)
                    tile.loss_sums[threadIdx.x * LOSS_SUMS + k] += sums[k];
                store_head_gradient(tile, threadIdx.x, y);
                show_to_products();
            } else if (gathers) {
                Gatherers::fetch(tile, from, turn);
            }
            tile.team.sync();
            backward_from<LAYER_COUNT - 1>(tile, vector_of(partials, at));
            if (gathers && at + Turn::AT_ONCE < tiles) Gatherers().leave(tile, from, turn);
        }
        grid.arrive();
        if (gathers) Gatherers().leave(tile, from, turn);
        if (warp < LOSS_SUMS)
            leave_tally<LOSS_SUMS>(tile, warp, tallies);
        else if (warp == WARPS - 1)
            *tile.rates = adam_rates(lr, log1, log2, done, 0, 1);
        grid.wait();

        add_up(tile, partials, vectors_of(tiles), squares);
        grid.arrive();
        grid.wait();

        const float length = norm_of(tile, squares);
        const AdamRates rates = *tile.rates;
        const bool finite = length - length == 0.f;
        const float factor = clip_factor(length, max_norm);
        done += finite;
        const bool moves = done % target_every == 0;
        for_owned(tile, [&](Owned& of, int e) {
            if (update == updates - 1) gradient[of.place.parameter] = tile.sums[e];
            if (!finite) return;
            adam_element(of.parameter, of.m, of.v, factor * tile.sums[e], take1, beta2, take2, eps, rates);
            publish(images, of.place, of.parameter);
            if (!moves) return;
            of.target = moved_target(of.target, of.parameter, tau);
            publish(of_target, of.place, of.target);
        });
        if (blockIdx.x == 0 && threadIdx.x == 0) norm[update] = length;
        grid.arrive();
        if (blockIdx.x == LG_GRID - 1 && warp == WARPS - 1) {
            float totals[LOSS_SUMS];
            add_tallies(tallies, vectors_of(tiles), totals);
            if (threadIdx.x % WARP_LANES == 0)
#pragma unroll
                for (int k = 0; k < LOSS_SUMS; ++k)
                    statistics[update * LOSS_SUMS + k] = statistic(k, totals[k], batch);
        }
        if (update < updates - 1) grid.wait();
    }
    for_owned(tile, [&](const Owned& of, int) {
        const int p = of.place.parameter;
        parameters[p] = of.parameter;
        m[p] = of.m;
        v[p] = of.v;
        target[p] = of.target;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) *step = done;
}
