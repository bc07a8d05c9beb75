// One planted fault for each tool of compute-sanitizer. A fault that is not found means that a clean
// report says nothing. Each is launched as one block of two warps; `x` and `unwritten` have
// LG_THREADS elements, and nothing has written to `unwritten`.
static_assert(LG_THREADS == 64, "the faults are between two warps, and inside the first");

extern "C" __global__ void write_past_the_end(float* x, const float* unwritten) {
    x[LG_THREADS + threadIdx.x] = 1.f;
}

// The other warp's half is read with no barrier after it is written.
extern "C" __global__ void race_in_shared_memory(float* x, const float* unwritten) {
    __shared__ float shared[LG_THREADS];
    shared[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = shared[threadIdx.x ^ 32];
}

extern "C" __global__ void read_before_write(float* x, const float* unwritten) {
    x[threadIdx.x] = unwritten[threadIdx.x];
}

// Half of the first warp waits for threads that never come.
extern "C" __global__ void barrier_of_a_few(float* x, const float* unwritten) {
    __shared__ float shared[LG_THREADS];
    shared[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 16) __syncthreads();
    x[threadIdx.x] = shared[threadIdx.x];
}
