// Runs a CUDA C kernel on the host, block after block: a thread is a fiber, which runs until it waits
// for its team, its block or its warp. Stands in for bf16.cuh, async_copy.cuh, bulk_copy.cuh,
// named_barrier.cuh, memory_order.cuh, mma.cuh and warpgroup.cuh, whose PTX it does as the PTX manual's
// pictures of the fragments say, and for host.cuh. Shared memory starts as NaN.
//
// Forwards, the first thread runs first, and a copy arrives and a warpgroup's product is done when they
// are waited for; backwards, the last thread runs first and both happen as they start. A kernel with a barrier missing gives different
// results in one of the two.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
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
#define __align__(bytes)
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
static uint4* memory;  // dynamic shared memory of the block that runs

struct Copy {
    void* to;
    const void* from;
    bool valid;
    int nbytes;
    void arrive() const { valid ? memcpy(to, from, nbytes) : memset(to, 0, nbytes); }
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(128 << 10);
    bool done = false, at_block_gate = false;
    std::vector<std::vector<Copy>> groups = {{}};
    std::vector<std::vector<std::function<void()>>> products = {{}};
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

struct CopyCount {
    int phase = 0;
    long long awaited = 0;
    std::vector<std::function<void()>> copies;
};

struct Block {
    Three index;
    // As aligned as the tensor cores of sm_90a need it.
    std::unique_ptr<void, void (*)(void*)> memory{nullptr, std::free};
    std::vector<Fiber> fibers;
    int living = 0;
    Gate gate, named_gates[16];
    std::vector<Gate> warp_gates;
    std::vector<Exchange> exchanges;
    std::map<const void*, CopyCount> copy_barriers;
};

static Block* block;
static Fiber* running;
static ucontext_t scheduler;
static int gates_opened;
static bool copies_arrive_at_once;

static void pause() {
    const Three mine = threadIdx;
    Fiber* const self = running;
    swapcontext(&self->context, &scheduler);
    threadIdx = mine;
}

// Waits for other warps, or for other blocks.
static void pause_at_gate() {
    running->at_block_gate = true;
    pause();
    running->at_block_gate = false;
}

static void pass(Gate& gate, int expected, bool of_warps) {
    const int before = gate.generation;
    if (++gate.waiting == expected) {
        gate.waiting = 0;
        ++gate.generation;
        gates_opened += of_warps;
    }
    while (gate.generation == before) of_warps ? pause_at_gate() : pause();
}

static bool block_barrier(Gate& gate, int expected, bool given) {
    const int generation = gate.generation % 2;
    if (gate.waiting == 0) gate.any[generation] = false;
    gate.any[generation] |= given;
    pass(gate, expected, true);
    return gate.any[generation];
}
static void __syncthreads() { block_barrier(block->gate, block->living, false); }
static bool __syncthreads_or(bool given) { return block_barrier(block->gate, block->living, given); }
static void sync_warp() { pass(block->warp_gates[threadIdx.x / 32], 32, false); }

template <class T>
T __shfl_sync(unsigned, T mine, int lane) {
    static_assert(sizeof(T) == 4);
    Exchange& warp = block->exchanges[threadIdx.x / 32];
    memcpy(warp.word[threadIdx.x % 32], &mine, 4);
    sync_warp();
    memcpy(&mine, warp.word[lane], 4);
    sync_warp();
    return mine;
}
template <class T>
T __shfl_xor_sync(unsigned all, T mine, int gap) { return __shfl_sync(all, mine, threadIdx.x % 32 ^ gap); }

static unsigned __ballot_sync(unsigned all, bool mine) {
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= unsigned(__shfl_sync(all, int(mine), lane)) << lane;
    return ballot;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <class... A, std::size_t... I>
static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<A>*>(args[I])...);
}

static void (*body)();

static void enter() {
    body();
    running->done = true;
    --block->living;
    ++gates_opened;
    swapcontext(&running->context, &scheduler);
}

static void start(Block& made, Three index, int threads, int shared) {
    made.index = index;
    made.memory.reset(std::aligned_alloc(1024, (shared / 1024 + 1) * 1024));
    memset(made.memory.get(), 0xFF, shared);
    made.fibers = std::vector<Fiber>(threads);
    made.living = threads;
    made.warp_gates.assign(threads / 32, {});
    made.exchanges.assign(threads / 32, {});
    for (auto& fiber : made.fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
}

// Runs a block until its threads are done or wait for other blocks.
static void run(Block& chosen, bool backwards) {
    block = &chosen;
    memory = static_cast<uint4*>(block->memory.get());
    blockIdx = block->index;
    const int threads = block->fibers.size();
    for (int i = 0; i < threads / 32;) {
        const int warp = backwards ? threads / 32 - 1 - i : i;
        const int before = gates_opened;
        // A warp runs on until only others can let it pass: warps drift far apart.
        for (bool stuck = false; !stuck;) {
            stuck = true;
            for (int lane = 0; lane < 32; ++lane) {
                const int t = warp * 32 + (backwards ? 31 - lane : lane);
                Fiber& fiber = block->fibers[t];
                if (fiber.done) continue;
                running = &fiber;
                threadIdx = {unsigned(t), 0, 0};
                swapcontext(&scheduler, &running->context);
                stuck = stuck && (fiber.done || fiber.at_block_gate);
            }
        }
        // Forwards, teams drift apart too: whom it has let pass goes first. Backwards, they take
        // turns.
        i = backwards || gates_opened == before ? i + 1 : 0;
    }
}

// All blocks at once where they wait for each other, else one after another.
template <class... A>
static int launch(void (*kernel)(A...), void** args, int grid_x, int grid_y, int threads, int shared,
                  int backwards, int cooperative) {
    copies_arrive_at_once = backwards;
    static void (*the_kernel)(A...);
    static void** the_args;
    the_kernel = kernel;
    the_args = args;
    body = [] { call(the_kernel, the_args, std::index_sequence_for<A...>()); };
    blockDim = {unsigned(threads), 1, 1};
    gridDim = {unsigned(grid_x), unsigned(grid_y), 1};
    const int count = grid_x * grid_y, together = cooperative ? count : 1;
    for (int first = 0; first < count; first += together) {
        std::vector<Block> blocks(together);
        for (int b = 0; b < together; ++b)
            start(blocks[b], {unsigned((first + b) % grid_x), unsigned((first + b) / grid_x), 0},
                  threads, shared);
        for (bool living = true; living;) {
            living = false;
            const int before = gates_opened;
            for (int b = 0; b < together; ++b) {
                Block& next = blocks[backwards ? together - 1 - b : b];
                run(next, backwards);
                living |= next.living > 0;
            }
            // Somebody waits for a thread that will not come.
            if (living && gates_opened == before) return 1;
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

inline void start_copy(void* shared, const void* global, bool valid, int nbytes) {
    if ((std::size_t)shared % nbytes || (valid && (std::size_t)global % nbytes)) __builtin_trap();
    const Copy copy = {shared, global, valid, nbytes};
    copies_arrive_at_once ? copy.arrive() : running->groups.back().push_back(copy);
}
inline void start_copy_16(void* shared, const void* global, bool valid) {
    start_copy(shared, global, valid, 16);
}
inline void start_copy_4(void* shared, const void* global, bool valid) {
    start_copy(shared, global, valid, 4);
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
void named_barrier(int number) { block_barrier(block->named_gates[number], THREADS, false); }
template <int THREADS>
bool named_barrier_or(int number, bool given) {
    return block_barrier(block->named_gates[number], THREADS, given);
}

// mma.cuh

inline void load_matrices_as(unsigned (&to)[4], const void* row, bool transposed) {
    Exchange& warp = block->exchanges[threadIdx.x / 32];
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

inline unsigned turned(unsigned of) {
    Exchange& warp = block->exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    warp.b[lane][0] = of;
    sync_warp();
    unsigned to = 0;
    for (int half = 0; half < 2; ++half) {
        const unsigned from = warp.b[(lane % 4 * 2 + half) * 4 + lane / 8][0];
        to |= (lane / 4 % 2 ? from >> 16 : from & 0xFFFFu) << half * 16;
    }
    sync_warp();
    return to;
}

inline void multiply_add_bf16(float (&sums)[4], const unsigned (&a)[4], unsigned b_low,
                              unsigned b_high) {
    Exchange& warp = block->exchanges[threadIdx.x / 32];
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

// bulk_copy.cuh

struct CopyBarrier { unsigned long long state; };

inline void make_copy_barrier(CopyBarrier* barrier) { block->copy_barriers[barrier] = {}; }
inline void show_copy_barriers() {}
inline void show_to_copies() {}
inline void expect_bytes(CopyBarrier* barrier, int nbytes) { block->copy_barriers.at(barrier).awaited += nbytes; }
inline void start_bulk_copy(void* shared, const void* global, int nbytes, CopyBarrier* barrier) {
    if ((std::size_t)shared % 16 || (std::size_t)global % 16 || nbytes % 16) __builtin_trap();
    CopyCount& count = block->copy_barriers.at(barrier);
    count.copies.push_back([=] { memcpy(shared, global, nbytes); });
    if (copies_arrive_at_once) count.copies.back()();
    count.awaited -= nbytes;
    if (count.awaited == 0) {
        ++count.phase;
        ++gates_opened;
    }
}
inline void wait_for_bytes(const CopyBarrier* barrier, int parity) {
    CopyCount& count = block->copy_barriers.at(barrier);
    while (count.phase % 2 == parity) pause_at_gate();
    if (!copies_arrive_at_once)
        for (const auto& copy : count.copies) copy();
    count.copies.clear();
}

// memory_order.cuh

inline void release_add(unsigned* counter) {
    ++*counter;
    ++gates_opened;
}
// Asked again and again, so others go on meanwhile.
inline unsigned acquire_load(const unsigned* counter) {
    pause_at_gate();
    return *counter;
}
inline unsigned long long acquire_load(const unsigned long long* counter) {
    pause_at_gate();
    return *counter;
}
inline void release_store(unsigned long long* counter, unsigned long long count) {
    *counter = count;
    ++gates_opened;
}
inline void acquire_all() {}
template <class T>
T __ldcg(const T* from) { return *from; }

// warpgroup.cuh

inline unsigned shared_address(const void* at) {
    return unsigned(static_cast<const char*>(at) - reinterpret_cast<const char*>(memory));
}
struct Factor {
    unsigned address;
    int block_nbytes, eight_nbytes;
};
inline Factor factor(unsigned address, int block_nbytes) { return {address, block_nbytes, 1024}; }
inline Factor further(Factor from, int nbytes) {
    from.address += nbytes;
    return from;
}
inline Factor ones_factor(unsigned address) { return {address, 0, 0}; }
inline void show_to_products() {}
inline int lane_index() { return threadIdx.x % 32; }
inline int thread_index() { return threadIdx.x; }
inline void start_products() {}
template <int COUNT>
void take_sums(float (&)[COUNT]) {}
inline void end_product_group() { running->products.push_back({}); }
template <int GROUPS>
void wait_for_products_but() {
    auto& groups = running->products;
    while (groups.size() > GROUPS + 1) {
        for (const auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}

// Element (i, k) of a factor: i counts its rows or, of the second, its columns, k what is summed over.
inline float element_of(const Factor& from, bool tall, int i, int k) {
    unsigned at = from.address;
    if (tall)
        at += i / 64 * from.block_nbytes + k / 8 * from.eight_nbytes + k % 8 * 128 + i % 64 * 2;
    else
        at += i / 8 * from.eight_nbytes + i % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    unsigned short bits;
    memcpy(&bits, reinterpret_cast<const char*>(memory) + at, 2);
    return __uint_as_float(unsigned(bits) << 16);
}

template <int N, bool TALL_A, bool TALL_B>
struct Product {
    static void start(float (&sums)[N / 2], const Factor& a, const Factor& b, bool adds) {
        const int thread = threadIdx.x % 128;
        float* const to = sums;
        const auto product = [=] {
            for (int s = 0; s < N / 2; ++s) {
                const int row = thread / 32 * 16 + s / 2 % 2 * 8 + thread % 32 / 4;
                const int column = s / 4 * 8 + thread % 4 * 2 + s % 2;
                float sum = adds ? to[s] : 0.f;
                for (int k = 0; k < 16; ++k)
                    sum = fmaf(element_of(a, TALL_A, row, k), element_of(b, TALL_B, column, k), sum);
                to[s] = sum;
            }
        };
        if (copies_arrive_at_once)
            product();
        else
            running->products.back().push_back(product);
    }
};

// The first factor in registers: a thread's two rows of 16 are its quad's.
template <int N>
struct ProductOf {
    static void first(float (&sums)[N / 2], const Factor& a, const Factor& b) {
        Product<N, false, false>::start(sums, a, b, false);
    }
    static void first(float (&sums)[N / 2], const unsigned* a, const Factor& b) {
        start(sums, a, b, false);
    }
    static void add(float (&sums)[N / 2], const unsigned* a, const Factor& b) {
        start(sums, a, b, true);
    }
    static void start(float (&sums)[N / 2], const unsigned* a, const Factor& b, bool adds) {
        Exchange& warp = block->exchanges[threadIdx.x / 32];
        const int lane = threadIdx.x % 32;
        memcpy(warp.a[lane], a, sizeof warp.a[lane]);
        sync_warp();
        std::vector<float> rows(32);
        for (int i = 0; i < 32; ++i) {
            const unsigned pair = warp.a[lane / 4 * 4 + i % 8 / 2][i % 16 / 8 * 2 + i / 16];
            rows[i] = i % 2 ? high_bf16(pair) : low_bf16(pair);
        }
        sync_warp();
        float* const to = sums;
        const auto product = [=] {
            for (int s = 0; s < N / 2; ++s) {
                const int column = s / 4 * 8 + lane % 4 * 2 + s % 2;
                float sum = adds ? to[s] : 0.f;
                for (int k = 0; k < 16; ++k)
                    sum = fmaf(rows[s / 2 % 2 * 16 + k], element_of(b, false, column, k), sum);
                to[s] = sum;
            }
        };
        if (copies_arrive_at_once)
            product();
        else
            running->products.back().push_back(product);
    }
};
template <int COUNT>
void keep_words(unsigned (&)[COUNT]) {}

inline char* in_shared(unsigned address) { return reinterpret_cast<char*>(memory) + address; }
inline void store_matrices(unsigned row, const unsigned (&from)[4]) {
    Exchange& warp = block->exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    if (row % 16) __builtin_trap();
    warp.address[lane] = in_shared(row);
    memcpy(warp.a[lane], from, sizeof from);
    sync_warp();
    for (int m = 0; m < 4; ++m)
        memcpy(static_cast<char*>(const_cast<void*>(warp.address[m * 8 + lane / 4])) + lane % 4 * 4,
               &warp.a[lane][m], 4);
    sync_warp();
}
inline void load_matrices(unsigned (&to)[4], unsigned row) { load_matrices(to, in_shared(row)); }

inline unsigned relu_pair(unsigned pair) {
    const auto larger = [](float x) { return x < 0.f ? 0.f : x; };
    return pack_bf16(larger(low_bf16(pair)), larger(high_bf16(pair)));
}
inline unsigned where_positive(unsigned pair) {
    return (low_bf16(pair) > 0.f ? 0xFFFFu : 0u) | (high_bf16(pair) > 0.f ? 0xFFFF0000u : 0u);
}

#include "emulator_int8.h"
#include "emulator_act.h"
