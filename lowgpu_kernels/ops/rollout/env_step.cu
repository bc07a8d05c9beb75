// One step of every environment.
#include "env.cuh"

// A thread owns an environment. Its state is a few adjacent words, so a warp reads and writes whole
// lines; what it reads of the series is scattered, since each environment is at a row of its own.
extern "C" __global__ void __launch_bounds__(LG_THREADS)
env_step_kernel(float* floats, int* ints, const int* action, const float* series,
                const unsigned long long* clock, unsigned long long seed, int envs, int rows,
                float* reward, bool* terminated, bool* truncated) {
    const int e = blockIdx.x * LG_THREADS + threadIdx.x;
    if (e >= envs) return;  // no barrier follows
    State state = load_state(floats, ints, e);
    float earned;
    const int ended = step_env(state, action[e], draw(seed, STEP, e, *clock), series, rows, earned);
    store_state(state, floats, ints, e);
    reward[e] = earned;
    terminated[e] = ended == 1;
    truncated[e] = ended == 2;
}
