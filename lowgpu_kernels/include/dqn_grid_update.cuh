// Updates of action values, one after another, by all blocks of a launch (update_grid.cuh).
//
// There is room for the weights of one network only. The second warpgroup runs upwards with the target's
// over the next states, while layer after layer the parameters take their place; then with these, if they
// choose the action. Beside it the first warpgroup runs with the parameters over the states, layer after
// layer as they come, and keeps what the layers give. Then all run down. A thread a row of the second
// works out the goal, one of the first the loss.
//
// While the grid waits for the gradients the gatherers, the second warpgroup again, start the copies of
// the next tile's rows; what they brought becomes observations while it waits for the norm. Where a block
// has several tiles they do both during a tile.
#pragma once
#include "dqn_grid_rows.cuh"
#include "update_grid_sum.cuh"

struct Settings {
    int batch;
    float delta, lr, take1, log1, beta2, take2, log2, eps, max_norm, tau;
    int target_every;
};

// Working memory, and the results of each update but the gradient, which is the last one's. Errors may be
// left out.
struct Work {
    Bf16* partials;
    float *tallies, *squares;
    unsigned char* images;  // of the parameters, and of the target
    float *gradient, *errors, *statistics, *norm;

    __device__ unsigned char* of_target() const { return images + IMAGE_NBYTES; }
    __device__ float* errors_of(int update, int batch) const {
        return errors == nullptr ? nullptr : errors + (long long)update * batch;
    }
};

// What the block owns, and images of it that every block may copy behind the next barrier.
__device__ inline void take_parameters(const Tile& tile, const Work& work, const float* parameters,
                                       const float* target, const float* m, const float* v) {
    clear_around(work.images, 2);
    find_places(tile);
    for_owned(tile, [&](Owned& of, int) {
        const int p = of.place.parameter;
        of.parameter = parameters[p];
        of.m = m[p];
        of.v = v[p];
        of.target = target[p];
        publish(work.images, of.place, of.parameter);
        publish(work.of_target(), of.place, of.target);
    });
}

__device__ inline void leave_parameters(const Tile& tile, float* parameters, float* target, float* m,
                                        float* v) {
    for_owned(tile, [&](const Owned& of, int) {
        const int p = of.place.parameter;
        parameters[p] = of.parameter;
        m[p] = of.m;
        v[p] = of.v;
        target[p] = of.target;
    });
}

__device__ inline void move_target(Owned& of, const Work& work, float tau) {
    of.target = moved_target(of.target, of.parameter, tau);
    publish(work.of_target(), of.place, of.target);
}

template <int L = 0>
__device__ inline void await_all(const Chain& chain) {
    if constexpr (L < LAYER_COUNT) {
        chain.await_weights<L>();
        await_all<L + 1>(chain);
    }
}

// All passes upwards over a tile whose rows are there. The first warpgroup has the states, whose outputs
// it leaves in tile.y; the second has the next states, and leaves the rows' goals in tile.goals.
__device__ inline void run_upwards(const Tile& tile) {
    const Group group;
    const bool of_next = group.index > 0;
    const Bf16* const rows = of_next ? tile.next_states() : tile.input<0>();
#pragma unroll 1
    for (int pass = of_next ? 0 : LAST_PASS; pass < (of_next ? LAST_PASS : PASSES); ++pass) {
        float* const y = !of_next ? tile.y : pass == 0 ? tile.held : tile.online;
        run_chain<0>(tile, Chain{tile, group, rows, y, !of_next, pass > 0, pass == 0});
    }
    if (!of_next) {
        show_to_products();
        return;
    }
    // The way down is with these weights.
    if (LAST_PASS == 1) await_all(Chain{tile, group, rows, tile.held, false, true, false});
    group.sync();
    const int r = group.thread();
    if (r < ROWS) {
        const float* const held = tile.held + r * LG_OUTPUTS;
        const float* const chooser = LAST_PASS > 1 ? tile.online + r * LG_OUTPUTS : held;
        const Taken& taken = tile.taken[r];
        tile.goals[r] =
            goal_of_row(held, best_action<ACTIONS>(chooser), taken.reward, taken.discount);
    }
}

// A row's loss, and in place of its outputs their gradient.
__device__ inline void lose(const Tile& tile, const Settings& settings, float* errors, int at) {
    const Taken& taken = tile.taken[threadIdx.x % ROWS];
    float* const y = tile.y + threadIdx.x * LG_OUTPUTS;
    float sums[LOSS_SUMS] = {};
    if (taken.action >= 0) {
        const float error = loss_of_row(y, taken.action, tile.goals[threadIdx.x], taken.weight,
                                        1.f / float(settings.batch), settings.delta, sums);
        if (errors != nullptr && Turn::leads()) errors[at * ROWS + threadIdx.x] = error;
    } else {
        for (int c = 0; c < LG_HEADS; ++c) y[c] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < LOSS_SUMS; ++k) tile.loss_sums[threadIdx.x * LOSS_SUMS + k] += sums[k];
    store_head_gradient(tile, threadIdx.x, y);
    show_to_products();
}

// All updates of `from`, whose first rows have been left, and of which `first` is the first one's number
// among the results. The images are everybody's, and the weights'
// place is free. `done` counts steps of Adam. Where the target `follows` it moves with the last update
// whatever the count says. Without `goes_on` nothing waits for the last barrier.
template <class From>
__device__ inline void update_all(Tile& tile, GridBarrier& grid, const From& from,
                                  const Settings& settings, const Work& work, int first, int& done,
                                  bool follows, bool goes_on) {
    const int tiles = (settings.batch - 1) / ROWS + 1, warp = tile.team.warp;
    const bool has_tiles = Turn::home() < tiles, gathers = has_tiles && Gatherers::are(warp);
    Turn turn = {0, Turn::home()};
    for (int update = 0; update < from.updates; ++update) {
        const bool last = update == from.updates - 1;
        if (thread_index() == 0 && has_tiles) copy_image(tile, work.of_target());
        for (int i = threadIdx.x; i < ROWS * LOSS_SUMS; i += THREADS) tile.loss_sums[i] = 0.f;
        for (int at = Turn::home(); at < tiles; at += Turn::AT_ONCE) {
            const bool more = at + Turn::AT_ONCE < tiles;
            wait_for_copies_but<0>();
            show_to_products();
            __syncthreads();  // these rows are there, and the last tile's are done with
            if (thread_index() == 0 && at != Turn::home()) copy_image(tile, work.of_target());
            tile.now ^= 1;
            turn = turn.next(tiles);
            run_upwards(tile);
            __syncthreads();
            if (threadIdx.x < ROWS)
                lose(tile, settings, work.errors_of(update, settings.batch), at);
            else if (gathers && more)
                Gatherers::fetch(tile, from, turn);
            tile.team.sync();
            backward_from<LAYER_COUNT - 1>(tile, vector_of(work.partials, at));
            tile.came ^= 1;
            tile.followed ^= 1;
            if (gathers && more) Gatherers().leave(tile, from, turn);
        }
        grid.arrive();
        if (gathers && !last) Gatherers::fetch(tile, from, turn);
        if (warp < LOSS_SUMS)
            leave_tally<LOSS_SUMS>(tile, warp, work.tallies);
        else if (warp == WARPS - 1)
            *tile.rates = adam_rates(settings.lr, settings.log1, settings.log2, done, 0, 1);
        grid.wait();

        add_up(tile, work.partials, vectors_of(tiles), work.squares);
        grid.arrive();
        if (gathers && !last) Gatherers().leave(tile, from, turn);
        grid.wait();

        const float length = norm_of(tile, work.squares);
        const AdamRates rates = *tile.rates;
        const bool finite = length - length == 0.f;
        const float factor = clip_factor(length, settings.max_norm);
        done += finite;
        const bool moves = (finite && done % settings.target_every == 0) || (last && follows);
        for_owned(tile, [&](Owned& of, int e) {
            if (last) work.gradient[of.place.parameter] = tile.sums[e];
            if (finite) {
                adam_element(of.parameter, of.m, of.v, factor * tile.sums[e], settings.take1,
                             settings.beta2, settings.take2, settings.eps, rates);
                publish(work.images, of.place, of.parameter);
            }
            if (moves) move_target(of, work, settings.tau);
        });
        if (blockIdx.x == 0 && thread_index() == 0) work.norm[first + update] = length;
        grid.arrive();
        if (blockIdx.x == LG_GRID - 1 && warp == WARPS - 1) {
            float totals[LOSS_SUMS];
            add_tallies(work.tallies, vectors_of(tiles), totals);
            if (threadIdx.x % WARP_LANES == 0)
#pragma unroll
                for (int k = 0; k < LOSS_SUMS; ++k)
                    work.statistics[(first + update) * LOSS_SUMS + k] =
                        statistic(k, totals[k], settings.batch);
        }
        if (!last || goes_on) grid.wait();
    }
}
