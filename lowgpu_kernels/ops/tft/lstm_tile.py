"""How a recurrence is cut into blocks: the macros of lstm.cu, and its launch."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.tft.rows import NBYTES, STEP, fours, whole

SEQUENCES_A_BLOCK = 8  # of a block: columns of a tensor core's product
UNITS_A_WARP = 8
MOST_WARPS = 16
# Widest layer whose weights the warps of a block keep in registers, 64 a thread, in bfloat16. In float32,
# and beyond, they are read from the L2 cache at every step.
MOST_HELD = 128


def state_stride(hidden, precision):
    """Elements from one sequence's state to the next; as the kernel has it."""
    padded = blocks(hidden, STEP[precision]) * STEP[precision]
    if precision == "float32":
        return padded + 4
    return padded if padded % 64 == 32 else padded + 32


def launch_lstm(arrays, history, on, stream):
    """Queue the recurrence: gates, recurrent, first_hidden, first_cell, lengths, out."""
    gates, recurrent, *_, out = arrays
    steps, sequences, hidden = out.shape
    if steps == 0 or sequences == 0 or hidden == 0:
        return
    precision = gates.dtype.name
    if not fours(4 * hidden, gates):
        raise ValueError("gates must start at a multiple of 16 bytes: give an array of its own")
    warps = min(blocks(hidden, UNITS_A_WARP), MOST_WARPS)
    threads = warps * launch.WARP
    # Hidden states of the step before and of this one.
    state = SEQUENCES_A_BLOCK * state_stride(hidden, precision)
    # In bfloat16 every second row starts 16 bytes further.
    shared = 2 * (state + (0 if precision == "float32" else 32)) * NBYTES[precision]
    if shared > on.shared_per_block:
        raise ValueError(
            f"a state of {hidden} units needs {shared} B of shared memory a block; {on.name} has "
            f"{on.shared_per_block} B: give a smaller hidden size"
        )
    kernel = cuda_c(
        "tft/lstm",
        "lstm",
        float32=precision == "float32",
        hidden=hidden,
        threads=threads,
        held=precision == "bfloat16" and hidden <= MOST_HELD,
        whole=whole(hidden, recurrent, out),
    )
    args = *arrays, *map(np.int32, (steps, sequences, history))
    launch.launch(kernel, blocks(sequences, SEQUENCES_A_BLOCK), threads, args, stream, shared)
