// The blocks of a cluster of sm_90, which reach each other's shared memory. One PTX instruction a
// wrapper.
#pragma once

using ClusterAddress = unsigned;

__device__ inline unsigned address_here(const void* shared) { return unsigned(__cvta_generic_to_shared(shared)); }

// Where another block has what lies at an address here.
__device__ inline ClusterAddress address_in(const void* shared, int block) {
    ClusterAddress there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(address_here(shared)), "r"(block));
    return there;
}

__device__ inline int block_in_cluster() {
    int block;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    return block;
}

// Every thread of every block, whole warps; between the two a thread may do what needs no other.
__device__ inline void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
