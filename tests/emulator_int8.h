// The emulator's stand-ins for cluster.cuh, tensor_copy.cuh, narrow_copy.cuh, int8_product.cuh and
// int8_levels.cuh, as the PTX manual says what they do. Blocks of a cluster are neighbours and run
// together.
//
// Forwards a copied box arrives when a thread waits for its barrier; backwards, as its copy starts.
#pragma once

#define __cluster_dims__(...)
#define __grid_constant__

struct alignas(8) int2 { int x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
struct alignas(16) int4 { int x, y, z, w; };
inline unsigned __float_as_uint(float x) { return float_as_uint(x); }

inline int __float2int_rn(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.f) return 2147483647;
    return x < -2147483648.f ? -2147483647 - 1 : int(std::nearbyint(x));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i)
        chosen |= unsigned(bytes >> (selectors >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return chosen;
}
inline void __syncwarp() { sync_warp(); }

// narrow_copy.cuh

template <int NBYTES>
void start_narrow_copy(void* shared, const void* global, bool valid) {
    if ((std::size_t)shared % NBYTES || (valid && (std::size_t)global % NBYTES)) __builtin_trap();
    // Arrives at once, in either order: the tests of 16 bytes show what waits for copies.
    valid ? memcpy(shared, global, NBYTES) : memset(shared, 0, NBYTES);
}

// cluster.cuh

#ifdef LG_CLUSTER
struct ClusterAddress {
    Block* block;
    long long offset;
};
inline Block* in_cluster(int rank) { return block - int(block->index.x % LG_CLUSTER) + rank; }
inline char* base_of(const Block* of) { return static_cast<char*>(of->memory.get()); }
inline long long offset_of(const void* shared) { return static_cast<const char*>(shared) - base_of(block); }

inline ClusterAddress address_in(const void* shared, int rank) { return {in_cluster(rank), offset_of(shared)}; }
inline int block_in_cluster() { return block->index.x % LG_CLUSTER; }

struct ClusterGate {
    int arrived = 0, generation = 0;
};
static std::map<Block*, ClusterGate> cluster_gates;
static std::map<Fiber*, int> cluster_arrivals;
inline void arrive_at_cluster() {
    ClusterGate& gate = cluster_gates[in_cluster(0)];
    cluster_arrivals[running] = gate.generation;
    if (++gate.arrived == LG_CLUSTER * int(blockDim.x)) {
        gate.arrived = 0;
        ++gate.generation;
        ++gates_opened;
    }
}
inline void wait_for_cluster() {
    const Block* const first = in_cluster(0);
    while (cluster_gates[const_cast<Block*>(first)].generation == cluster_arrivals[running]) pause_at_gate();
}

// tensor_copy.cuh

struct TensorMap {
    const unsigned char* from;
    long long rows, columns;
    int box_rows;
};
struct PhaseBarrier { unsigned long long state; };
struct PhaseCount {
    int made_for = 0, awaited = 0, phase = 0;
    long long nbytes = 0;
    std::vector<std::function<void()>> copies;  // that were counted and have not been made

    void end_if_complete() {
        if (awaited > 0 || nbytes != 0) return;
        ++phase;
        awaited = made_for;
        ++gates_opened;
    }
};
static std::map<std::pair<const Block*, long long>, PhaseCount> phase_counts;
inline PhaseCount& count_of(const PhaseBarrier* barrier) { return phase_counts.at({block, offset_of(barrier)}); }

inline void make_phase_barrier(PhaseBarrier* barrier, int arrivals) {
    PhaseCount made;
    made.made_for = made.awaited = arrivals;
    phase_counts[{block, offset_of(barrier)}] = made;
}
inline void show_phase_barriers() {}
inline void count_arrival(PhaseCount& count) {
    if (--count.awaited < 0) __builtin_trap();
    count.end_if_complete();
}
inline void arrive(PhaseBarrier* barrier) { count_arrival(count_of(barrier)); }
inline void arrive_there(ClusterAddress barrier) { count_arrival(phase_counts.at({barrier.block, barrier.offset})); }
inline void arrive_expecting(PhaseBarrier* barrier, int nbytes) {
    count_of(barrier).nbytes += nbytes;
    arrive(barrier);
}
inline void wait_for_phase(const PhaseBarrier* barrier, int parity) {
    PhaseCount& count = count_of(barrier);
    while (count.phase % 2 == parity) pause_at_gate();
    for (const auto& copy : count.copies) copy();
    count.copies.clear();
}

inline void copy_box(Block* to_block, long long offset, const TensorMap& matrix, int row, int column, long long barrier) {
    unsigned char* const to = reinterpret_cast<unsigned char*>(base_of(to_block)) + offset;
    if (offset % 1024 || (std::size_t)matrix.from % 16 || matrix.columns % 16 || column % 16) __builtin_trap();
    PhaseCount& count = phase_counts.at({to_block, barrier});
    const TensorMap of = matrix;
    count.copies.push_back([=] {
        for (int r = 0; r < of.box_rows; ++r)
            for (int c = 0; c < 128; ++c) {
                const bool inside = row + r < of.rows && column + c < of.columns;
                to[r * 128 + ((c / 16 ^ r % 8) * 16 + c % 16)] =
                    inside ? of.from[(row + r) * of.columns + column + c] : 0;
            }
    });
    if (copies_arrive_at_once) {
        count.copies.back()();
        count.copies.pop_back();
    }
    count.nbytes -= of.box_rows * 128;
    count.end_if_complete();
}
inline void start_box_copy(void* shared, const TensorMap& matrix, int row, int column, PhaseBarrier* barrier) {
    copy_box(block, offset_of(shared), matrix, row, column, offset_of(barrier));
}
inline void start_box_copies(void* shared, const TensorMap& matrix, int row, int column, PhaseBarrier* barrier,
                             unsigned short blocks) {
    for (int rank = 0; rank < LG_CLUSTER; ++rank)
        if (blocks >> rank & 1)
            copy_box(in_cluster(rank), offset_of(shared), matrix, row, column, offset_of(barrier));
}
#endif

// int8_product.cuh

inline void multiply_add_int8(int (&sums)[4], const unsigned (&a)[4], unsigned b_low, unsigned b_high) {
    Exchange& warp = block->exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    memcpy(warp.a[lane], a, sizeof a);
    warp.b[lane][0] = b_low;
    warp.b[lane][1] = b_high;
    sync_warp();
    const auto byte_of = [](unsigned word, int i) { return int((signed char)(word >> 8 * i)); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const int holder = k % 16 / 4;
            sums[i] += byte_of(warp.a[row % 8 * 4 + holder][row / 8 + k / 16 * 2], k % 4) *
                       byte_of(warp.b[column * 4 + holder][k / 16], k % 4);
        }
    }
    sync_warp();
}

template <int N>
struct Int8Product {
    static void start(int (&sums)[N / 8][4], const Factor& a, const Factor& b, bool adds) {
        const int thread = threadIdx.x % 128;
        const char* const shared = reinterpret_cast<const char*>(memory);
        const auto element = [=](const Factor& of, int row, int k) {
            unsigned at = of.address + row / 8 * of.eight_nbytes + row % 8 * 128 + k;
            at ^= (at >> 7 & 7) << 4;
            return int((signed char)shared[at]);
        };
        int(*const to)[4] = sums;
        const auto product = [=] {
            for (int s = 0; s < N / 2; ++s) {
                const int row = thread / 32 * 16 + s / 2 % 2 * 8 + thread % 32 / 4;
                const int column = s / 4 * 8 + thread % 4 * 2 + s % 2;
                int sum = adds ? to[s / 4][s % 4] : 0;
                for (int k = 0; k < 32; ++k) sum += element(a, row, k) * element(b, column, k);
                to[s / 4][s % 4] = sum;
            }
        };
        if (copies_arrive_at_once)
            product();
        else
            running->products.back().push_back(product);
    }
};
template <int FRAGMENTS>
void hold(int (&)[FRAGMENTS][4]) {}

inline unsigned pack_int8(int low, int high, unsigned above) {
    const auto byte = [](int value) { return unsigned(std::min(std::max(value, -128), 127)) & 0xFF; };
    return byte(low) | byte(high) << 8 | above << 16;
}

// int8_levels.cuh

inline int level_byte(unsigned word, int i) { return int(word >> 8 * i & 0xFF); }
inline int weight_byte(unsigned word, int i) { return int((signed char)(word >> 8 * i)); }

inline void multiply_add_levels(int (&sums)[4], const unsigned* levels, unsigned low, unsigned high) {
    Exchange& warp = block->exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    memcpy(warp.a[lane], levels, sizeof warp.a[lane]);
    warp.b[lane][0] = low;
    warp.b[lane][1] = high;
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const int holder = k % 16 / 4;
            sums[i] += level_byte(warp.a[row % 8 * 4 + holder][row / 8 + k / 16 * 2], k % 4) *
                       weight_byte(warp.b[column * 4 + holder][k / 16], k % 4);
        }
    }
    sync_warp();
}

// What a lane holds of a row: words of its four lanes, gathered as the products start.
template <int N>
struct LevelsProduct {
    static void start(int (&sums)[N / 8][4], const unsigned* levels, const Factor& weights, bool adds) {
        Exchange& warp = block->exchanges[threadIdx.x / 32];
        const int lane = threadIdx.x % 32;
        memcpy(warp.a[lane], levels, sizeof warp.a[lane]);
        sync_warp();
        int rows[2][32];
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < 32; ++k)
                rows[h][k] = level_byte(warp.a[lane / 4 * 4 + k % 16 / 4][h + k / 16 * 2], k % 4);
        sync_warp();
        int(*const to)[4] = sums;
        const char* const shared = reinterpret_cast<const char*>(memory);
        const auto product = [=] {
            for (int s = 0; s < N / 2; ++s) {
                const int column = s / 4 * 8 + lane % 4 * 2 + s % 2;
                int sum = adds ? to[s / 4][s % 4] : 0;
                for (int k = 0; k < 32; ++k) {
                    unsigned at = weights.address + column / 8 * weights.eight_nbytes + column % 8 * 128 + k;
                    at ^= (at >> 7 & 7) << 4;
                    sum += rows[s / 2 % 2][k] * int((signed char)shared[at]);
                }
                to[s / 4][s % 4] = sum;
            }
        };
        if (copies_arrive_at_once)
            product();
        else
            running->products.back().push_back(product);
    }
};

inline unsigned pack_levels(int low, int high, unsigned above) {
    const auto byte = [](int value) { return unsigned(std::min(std::max(value, 0), 255)); };
    return byte(low) | byte(high) << 8 | above << 16;
}
inline float larger_or_nan(float x, float y) { return x != x || y != y ? std::nanf("") : std::max(x, y); }
inline unsigned larger_pair_or_nan(unsigned x, unsigned y) {
    return pack_bf16(larger_or_nan(low_bf16(x), low_bf16(y)), larger_or_nan(high_bf16(x), high_bf16(y)));
}
