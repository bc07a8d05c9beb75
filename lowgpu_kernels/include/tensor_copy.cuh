// Copies of boxes of matrices from global to shared memory by the copy engine of sm_90, and the barriers
// at which threads and copies arrive. One PTX instruction a wrapper. The blocks of a cluster lay out
// their shared memory alike: what lies somewhere in one lies there in all.
#pragma once
#include "cluster.cuh"

// An argument `const __grid_constant__ TensorMap`, made by tensor_map.py: a matrix, the rows of a box.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// In shared memory. A phase ends when all arrivals that it was made for and all bytes expected in it
// have come.
struct PhaseBarrier {
    unsigned long long state;
};

// One thread makes it; a fence and a barrier of the block, or of the cluster, show it to the others.
__device__ inline void make_phase_barrier(PhaseBarrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_here(barrier)), "r"(arrivals)
                 : "memory");
}
__device__ inline void show_phase_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(PhaseBarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_here(barrier)) : "memory");
}
// At the same barrier of another block of the cluster, by address_in.
__device__ inline void arrive_there(ClusterAddress barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_expecting(PhaseBarrier* barrier, int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_here(barrier)),
                 "r"(nbytes)
                 : "memory");
}

// Whether the phase of this parity has ended, after a while of waiting for it.
__device__ inline bool phase_has_ended(const PhaseBarrier* barrier, int parity) {
    int ended;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.s32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(ended)
        : "r"(address_here(barrier)), "r"(parity)
        : "memory");
    return ended;
}

// Parity is 0 for the first phase, 1 for the second, 0 again; of a new barrier the phase of parity 1 has
// ended.
#ifndef LG_HANG_NANOSECONDS
__device__ inline void wait_for_phase(const PhaseBarrier* barrier, int parity) {
    while (!phase_has_ended(barrier, parity)) {
    }
}
#else
// For a kernel's first runs: an error in place of a hang.
__device__ inline void wait_for_phase(const PhaseBarrier* barrier, int parity) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    while (!phase_has_ended(barrier, parity)) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > LG_HANG_NANOSECONDS) __trap();
    }
}
#endif

// One thread: the box whose first element is (row, column), to a multiple of 1024 bytes.
__device__ inline void start_box_copy(void* shared, const TensorMap& matrix, int row, int column,
                                      PhaseBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(address_here(shared)),
        "l"(&matrix), "r"(column), "r"(row), "r"(address_here(barrier))
        : "memory");
}

// The same, to every block of the cluster whose bit is set; each block's barrier counts its bytes.
__device__ inline void start_box_copies(void* shared, const TensorMap& matrix, int row, int column,
                                        PhaseBarrier* barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address_here(shared)),
        "l"(&matrix), "r"(column), "r"(row), "r"(address_here(barrier)), "h"(blocks)
        : "memory");
}
