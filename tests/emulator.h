// Runs a CUDA C kernel on the host, block after block: a thread is a fiber, which runs until it waits
// for its team, its block or its warp. Stands in for bf16.cuh, async_copy.cuh, named_barrier.cuh and
// mma.cuh, whose PTX it does as the PTX manual's pictures of the fragments say, and for host.cuh.
// Shared memory starts as NaN.
//
// Forwards, the first thread runs first and a copy arrives when it is waited for; backwards, the last
// thread runs first and a copy arrives as it starts. A kernel with a barrier missing gives different
// results in one of the two.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__ static
#define __launch_bounds__(...)
using std::max;
using std::min;

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }

struct Three { unsigned x = 0, y = 0, z = 0; };
static Three threadIdx, blockIdx, blockDim, gridDim;
static uint4* memory;  // dynamic shared memory

struct Copy {
    void* to;
    const void* from;
    bool valid;
    void arrive() const { valid ? memcpy(to, from, 16) : memset(to, 0, 16); }
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(256 << 10);
    bool done = false, at_block_gate = false;
    std::vector<std::vector<Copy>> groups = {{}};
};

struct Gate {
    int waiting = 0, generation = 0;
    bool any[2] = {};  // what was given to this generation, and to the one before
};

struct Exchange {  // what the lanes of a warp show each other
    const void* address[32];
    unsigned a[32][4], b[32][2];
    char word[32][4];
};

static Fiber* running;
static ucontext_t scheduler;
static int living, gates_opened;
static bool copies_arrive_at_once;
static Gate block_gate, named_gates[16];
static std::vector<Gate> warp_gates;
static std::vector<Exchange> exchanges;

static void pause() {
    const Three mine = threadIdx;
    Fiber* const self = running;
    swapcontext(&self->context, &scheduler);
    threadIdx = mine;
}

static void pass(Gate& gate, int expected) {
    const int before = gate.generation;
    if (++gate.waiting == expected) {
        gate.waiting = 0;
        ++gate.generation;
    }
    while (gate.generation == before) pause();
}

static bool block_barrier(Gate& gate, int expected, bool given) {
    const int generation = gate.generation % 2;
    if (gate.waiting == 0) gate.any[generation] = false;
    gate.any[generation] |= given;
    running->at_block_gate = true;
    gates_opened += gate.waiting + 1 == expected;
    pass(gate, expected);
    running->at_block_gate = false;
    return gate.any[generation];
}
static void __syncthreads() { block_barrier(block_gate, living, false); }
static bool __syncthreads_or(bool given) { return block_barrier(block_gate, living, given); }
static void sync_warp() { pass(warp_gates[threadIdx.x / 32], 32); }

template <class T>
T __shfl_sync(unsigned, T mine, int lane) {
    static_assert(sizeof(T) == 4);
    Exchange& warp = exchanges[threadIdx.x / 32];
    memcpy(warp.word[threadIdx.x % 32], &mine, 4);
    sync_warp();
    memcpy(&mine, warp.word[lane], 4);
    sync_warp();
    return mine;
}
template <class T>
T __shfl_xor_sync(unsigned all, T mine, int gap) { return __shfl_sync(all, mine, threadIdx.x % 32 ^ gap); }

template <class... A, std::size_t... I>
static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<A>*>(args[I])...);
}

static void (*body)();

static void enter() {
    body();
    running->done = true;
    --living;
    swapcontext(&running->context, &scheduler);
}

template <class... A>
static int launch(void (*kernel)(A...), void** args, int grid_x, int grid_y, int threads, int shared,
                  int backwards) {
    copies_arrive_at_once = backwards;
    static void (*the_kernel)(A...);
    static void** the_args;
    the_kernel = kernel;
    the_args = args;
    body = [] { call(the_kernel, the_args, std::index_sequence_for<A...>()); };
    std::vector<Fiber> all(threads);
    const std::unique_ptr<uint4[]> held(new uint4[shared / 16 + 1]);
    memory = held.get();
    blockDim = {unsigned(threads), 1, 1};
    gridDim = {unsigned(grid_x), unsigned(grid_y), 1};
    for (int y = 0; y < grid_y; ++y)
        for (int x = 0; x < grid_x; ++x) {
            memset(memory, 0xFF, shared);
            blockIdx = {unsigned(x), unsigned(y), 0};
            living = threads;
            block_gate = {};
            for (Gate& gate : named_gates) gate = {};
            warp_gates.assign(threads / 32, {});
            exchanges.assign(threads / 32, {});
            for (auto& fiber : all) {
                fiber.done = false;
                fiber.groups = {{}};
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.data();
                fiber.context.uc_stack.ss_size = fiber.stack.size();
                fiber.context.uc_link = nullptr;
                makecontext(&fiber.context, enter, 0);
            }
            for (int turns = 0; living > 0;)
                for (int i = 0; i < threads / 32;) {
                    const int warp = backwards ? threads / 32 - 1 - i : i;
                    const int before = gates_opened;
                    // A warp runs on until only others can let it pass: warps drift far apart.
                    for (bool stuck = false; !stuck;) {
                        stuck = true;
                        for (int lane = 0; lane < 32; ++lane) {
                            const int t = warp * 32 + (backwards ? 31 - lane : lane);
                            if (all[t].done) continue;
                            running = &all[t];
                            threadIdx = {unsigned(t), 0, 0};
                            swapcontext(&scheduler, &running->context);
                            stuck = stuck && (all[t].done || all[t].at_block_gate);
                        }
                        // Somebody waits for a thread that will not come.
                        if (++turns > 10000000) return 1;
                    }
                    // Forwards, teams drift apart too: whom it has let pass goes first. Backwards,
                    // they take turns.
                    i = backwards || gates_opened == before ? i + 1 : 0;
                }
        }
    return 0;
}

// bf16.cuh

struct Bf16 { unsigned short bits; };

inline unsigned round_bf16(float x) {
    const unsigned bits = float_as_uint(x);
    return x != x ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
inline unsigned pack_bf16(float low, float high) {
    return round_bf16(low) | round_bf16(high) << 16;
}
inline float low_bf16(unsigned pair) { return __uint_as_float(pair << 16); }
inline float high_bf16(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }
inline float tanh_approximate(float x) { return tanhf(x); }

// async_copy.cuh

inline void start_copy_16(void* shared, const void* global, bool valid) {
    if ((std::size_t)shared % 16 || (valid && (std::size_t)global % 16)) __builtin_trap();
    const Copy copy = {shared, global, valid};
    copies_arrive_at_once ? copy.arrive() : running->groups.back().push_back(copy);
}
inline void end_copy_group() { running->groups.push_back({}); }

template <int GROUPS>
void wait_for_copies_but() {
    auto& groups = running->groups;
    while (groups.size() > GROUPS + 1) {
        for (const Copy& copy : groups.front()) copy.arrive();
        groups.erase(groups.begin());
    }
}

// named_barrier.cuh

template <int THREADS>
void named_barrier(int number) { block_barrier(named_gates[number], THREADS, false); }
template <int THREADS>
bool named_barrier_or(int number, bool given) {
    return block_barrier(named_gates[number], THREADS, given);
}

// mma.cuh

inline void load_matrices_as(unsigned (&to)[4], const void* row, bool transposed) {
    Exchange& warp = exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    if ((std::size_t)row % 16) __builtin_trap();
    warp.address[lane] = row;
    sync_warp();
    for (int m = 0; m < 4; ++m) {
        to[m] = 0;
        for (int half = 0; half < 2; ++half) {
            const int r = transposed ? lane % 4 * 2 + half : lane / 4;
            const int c = transposed ? lane / 4 : lane % 4 * 2 + half;
            to[m] |= unsigned(static_cast<const unsigned short*>(warp.address[m * 8 + r])[c])
                     << half * 16;
        }
    }
    sync_warp();
}
inline void load_matrices(unsigned (&to)[4], const void* row) { load_matrices_as(to, row, false); }
inline void load_matrices_transposed(unsigned (&to)[4], const void* row) {
    load_matrices_as(to, row, true);
}

inline void multiply_add_bf16(float (&sums)[4], const unsigned (&a)[4], unsigned b_low,
                              unsigned b_high) {
    Exchange& warp = exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    memcpy(warp.a[lane], a, sizeof a);
    warp.b[lane][0] = b_low;
    warp.b[lane][1] = b_high;
    sync_warp();
    const auto half_of = [](unsigned pair, int high) {
        return high ? high_bf16(pair) : low_bf16(pair);
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int holder = k % 8 / 2;
            const float left =
                half_of(warp.a[row % 8 * 4 + holder][row / 8 + k / 8 * 2], k % 2);
            const float right = half_of(warp.b[column * 4 + holder][k / 8], k % 2);
            sums[i] = fmaf(left, right, sums[i]);
        }
    }
    sync_warp();
}
