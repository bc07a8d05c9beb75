// Kernel of dqn_rounds.py where a GPU's warpgroups multiply and one launch may hold an update whole: all
// rounds of a call. A block steps 64 environments at a time, always the same ones, a thread an
// environment, and writes their transitions to the ring; behind a barrier of the grid the gatherers
// draw windows from it (dqn_ring.cuh) for the updates (dqn_grid_update.cuh).
#include "atomics.cuh"
#include "dqn_grid_update.cuh"
#include "dqn_ring.cuh"

static_assert(sizeof(Progress) <= Tile::NOTES, "it lies there");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dqn_rounds(float* parameters, float* target, float* m, float* v, int* step, float* floats,
               int* ints, unsigned long long* clock, int* head, float* kept_floats, int* kept_ints,
               float* kept_next_floats, int* kept_next_ints, float* kept_reward,
               unsigned char* kept_mark, unsigned long long* draws, const Bf16* table,
               int table_count, const float* series, int series_rows, int slots, int envs,
               int rounds, int warm, int steps, int updates, int batch, unsigned long long seed,
               float epsilon_start, float epsilon_end, unsigned long long epsilon_steps, float gamma,
               float delta, float lr, float take1, float log1, float beta2, float take2, float log2,
               float eps, float max_norm, float tau, int target_every, unsigned long long every,
               float* gradient, float* statistics, float* norm, float* rewards,
               bool* terminated, bool* truncated, Bf16* partials, float* tallies, float* squares,
               unsigned char* images, unsigned* arrivals) {
    extern __shared__ __align__(1024) uint4 memory[];
    const World world{table, series, series_rows};
    const Ring ring{kept_floats, kept_ints, kept_next_floats, kept_next_ints,
                    kept_reward, kept_mark, slots,            envs};
    const Acting acting{world,       table_count, steps, seed,    epsilon_steps, epsilon_start,
                        epsilon_end, floats,      ints,  rewards, terminated,    truncated};
    Progress& progress = *static_cast<Progress*>(Tile(memory, images).notes);
    const Drawn from{world, updates, batch, ring, gamma, seed, progress};
    const Settings settings{batch, delta, lr,  take1,    log1, beta2,
                            take2, log2,  eps, max_norm, tau,  target_every};
    const Work work{partials, tallies, squares, images, gradient, nullptr, statistics, norm};
    GridBarrier grid(arrivals);

    {
        const Tile tile(memory, images);
        prepare(tile, 2 * LAYER_COUNT);
        take_parameters(tile, work, parameters, target, m, v);
    }
    if (thread_index() == 0) progress.begin(clock, draws, head, every, steps, envs);
    int done = *step;
    grid.arrive();
    grid.wait();

    int came = 0, followed = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        // Made anew: else what follows from where it lies is worked out before the first round, and
        // kept in registers that the sums of products need.
        Tile tile(memory, images);
        tile.came = came;
        tile.followed = followed;
        const bool has_weights = round > 0 && round <= warm;  // nothing was learned in between
        act(tile, acting, ring, has_weights, progress, round * steps);
        grid.arrive();
        if (thread_index() == 0) progress.play(steps, envs, slots, every);
        grid.wait();
        if (round >= warm) {
            const Turn home = {0, Turn::home()};
            if (Gatherers::are(tile.team.warp) && home.at * ROWS < batch) {
                Gatherers::fetch(tile, from, home);
                Gatherers().leave(tile, from, home);
            }
            update_all(tile, grid, from, settings, work, (round - warm) * updates, done,
                       progress.follows, round < rounds - 1);
            if (thread_index() == 0) ++progress.draws;
        } else if (progress.follows) {
            for_owned(tile, [&](Owned& of, int) { move_target(of, work, tau); });
        }
        came = tile.came;
        followed = tile.followed;
    }
    leave_parameters(Tile(memory, images), parameters, target, m, v);
    if (thread_index() == 0) {
        if (blockIdx.x == 0) {
            *step = done;
            *clock = progress.clock;
            *draws = progress.draws;
            head[0] = progress.head;
            head[1] = progress.filled;
        }
        // So the counter is 0 again.
        arrives_last(arrivals, grid.wanted + gridDim.x);
    }
}
