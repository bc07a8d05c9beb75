// What a kernel says of the grid in front of it and of the next one, where launches overlap (overlap.py);
// nothing where they do not. One PTX instruction a wrapper, from sm_90 on; before that, none.
#pragma once

// Until the grid in front has ended and what it wrote is seen. Every thread, before it reads anything
// that may have been written, and before it writes.
__device__ inline void wait_for_grid_in_front() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next grid may begin when every block has come here.
__device__ inline void let_next_grid_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
