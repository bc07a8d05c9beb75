// The first state of an episode, for every environment.
#include "env.cuh"

// A thread owns an environment. Its state is a few adjacent words, so a warp writes whole lines.
extern "C" __global__ void __launch_bounds__(LG_THREADS)
reset_kernel(float* floats, int* ints, const float* series, const unsigned long long* clock,
             unsigned long long seed, int envs, int rows) {
    const int e = blockIdx.x * LG_THREADS + threadIdx.x;
    if (e >= envs) return;  // no barrier follows
    State state;
    reset_env(state, draw(seed, RESET, e, *clock), series, rows);
    store_state(state, floats, ints, e);
}
