// Copies from global to shared memory that run while the thread goes on. One PTX instruction a wrapper.
#pragma once

// Both addresses are multiples of 16 bytes. Where `valid` is false zeros are written and `global`
// is not read, though it must be an address.
__device__ inline void start_copy_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     unsigned(__cvta_generic_to_shared(shared))),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 4 bytes, at multiples of 4.
__device__ inline void start_copy_4(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                     unsigned(__cvta_generic_to_shared(shared))),
                 "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}

// Ends a group: the copies this thread has started since the last group.
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's groups but the newest GROUPS. Other threads' copies need a barrier.
template <int GROUPS>
__device__ inline void wait_for_copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
