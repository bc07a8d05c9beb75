// Copies of whole arrays from global to shared memory by the copy engine of sm_90, and the barrier that
// counts their bytes. One PTX instruction a wrapper.
#pragma once

// In shared memory, 8 bytes. One thread makes it; a fence and a block's barrier show it to the others.
struct CopyBarrier {
    unsigned long long state;
};

__device__ inline unsigned barrier_address(const CopyBarrier* barrier) {
    return unsigned(__cvta_generic_to_shared(barrier));
}

__device__ inline void make_copy_barrier(CopyBarrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_address(barrier)) : "memory");
}
__device__ inline void show_copy_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One thread: the barrier's phase ends when so many bytes have come.
__device__ inline void expect_bytes(CopyBarrier* barrier, int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_address(barrier)),
                 "r"(nbytes)
                 : "memory");
}

// One thread: both addresses and the count are multiples of 16 bytes.
__device__ inline void start_bulk_copy(void* shared, const void* global, int nbytes, CopyBarrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     unsigned(__cvta_generic_to_shared(shared))),
                 "l"(global), "r"(nbytes), "r"(barrier_address(barrier))
                 : "memory");
}

// Global memory written by ordinary stores, seen by copies that start later.
__device__ inline void show_to_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Until the phase of this parity has ended: 0 for the first, 1 for the second, 0 again.
__device__ inline void wait_for_bytes(const CopyBarrier* barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "waiting:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra waiting;\n"
        "}" ::"r"(barrier_address(barrier)),
        "r"(parity)
        : "memory");
}
