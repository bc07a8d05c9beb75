// Kernel of dqn_update.py where a GPU's warpgroups multiply and one launch may hold it whole: all
// updates of a call, of rows that lie in arrays (dqn_grid_update.cuh).
#include "dqn_grid_update.cuh"

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
    Tile tile(memory, images);
    const World world{table, series, series_rows};
    const Windows from{world,     updates, batch,  state_floats, state_ints, next_floats,
                       next_ints, action,  reward, discount,     weight};
    const Settings settings{batch, delta, lr,  take1,    log1, beta2,
                            take2, log2,  eps, max_norm, tau,  target_every};
    const Work work{partials, tallies, squares, images, gradient, errors, statistics, norm};
    GridBarrier grid(arrivals);

    prepare(tile, 2 * LAYER_COUNT);
    take_parameters(tile, work, parameters, target, m, v);
    grid.arrive();
    if (Gatherers::are(tile.team.warp)) {
        const Turn first = {0, Turn::home()};
        Gatherers::fetch(tile, from, first);
        Gatherers().leave(tile, from, first);
    }
    int done = *step;
    grid.wait();

    update_all(tile, grid, from, settings, work, 0, done, false, false);
    leave_parameters(tile, parameters, target, m, v);
    if (blockIdx.x == 0 && threadIdx.x == 0) *step = done;
}
