"""The recurrence of a long short-term memory in int8, and what its inputs give its gates, in one kernel."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import BF16, F32, I8, I32, Int
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.tft.levels import (
    GIVEN,
    LEVELS,
    given_levels,
    levels_of,
    product,
    scale_draw,
    spec_levels,
    spec_product,
    weight_levels,
)
from lowgpu_kernels.ops.tft.lstm_tile import MOST_HELD, MOST_WARPS, SEQUENCES_A_BLOCK, UNITS_A_WARP
from lowgpu_kernels.ops.tft.rows import STEP, whole
from lowgpu_kernels.ops.tft.sizes import HIDDEN, LSTM_GATES, SEQUENCES, STEPS

PARTS = 2  # weights of the history and of the future
ONE = 127  # levels of hidden states that are a 1
# By which a level may differ: a GPU's tangents are within a tenth of one, and weights carry it on. Few
# states may be further off, where a level on the boundary was carried on by a unit that reads itself.
OTHER_LEVELS, CARRIED_LEVELS = 2, 16


@op(
    error=lambda **_: 0,  # `_compare` has a bound of its own
    sizes=lambda params, known: {LSTM_GATES: 4 * known.get(HIDDEN, 0)},
    bench=("steps=24 sequences=1024 hidden=128",),
    flops=lambda steps, sequences, hidden, lstm_gates, **_: (
        4 * steps * sequences * hidden * lstm_gates
    ),
    examples=lambda: [
        {"levels": 30.0, "first_levels": 40.0},
        {"levels": 12.0, "first_levels": 127.0},
    ],
)
def lstm_int8(
    x: GIVEN[STEPS, SEQUENCES, HIDDEN],
    input: I8[PARTS, LSTM_GATES, HIDDEN],
    input_scale: F32[PARTS, LSTM_GATES],
    bias: F32[PARTS, LSTM_GATES],
    recurrent: I8[PARTS, LSTM_GATES, HIDDEN],
    recurrent_scale: F32[PARTS, LSTM_GATES],
    first_hidden: BF16[SEQUENCES, HIDDEN],
    first_cell: BF16[SEQUENCES, HIDDEN],
    lengths: I32[SEQUENCES] | None = None,
    *,
    history: Int(0, 1 << 20),
    levels: LEVELS,
    first_levels: LEVELS,
) -> I8[STEPS, SEQUENCES, HIDDEN]:
    """`lstm` with products of int8, and with what the inputs give the gates worked out inside.

        p            = 0 if t < history else 1
        l            = x[t] levels, the nearest whole number, ends at -128 and 127; x[t] where it is int8
        [i, f, g, o] = input_scale[p] (l input[p]^T) + bias[p]
                     + recurrent_scale[p] (hidden recurrent[p]^T), four a unit
        cell         = sigmoid(f) cell + sigmoid(i) tanh(g)
        hidden       = 127 sigmoid(o) tanh(cell), the nearest whole number
        out[t]       = hidden

    The state in front of step 0 is first_hidden first_levels, and its sums are worth 127 / first_levels as
    much. Steps of the history from a sequence's length on are left out, as in `lstm`. Sums are int32 and
    exact; gates and the cell are float32. A sequence's result depends on no other one.

    Args:
        x: inputs, or their levels, as another layer gives them.
        input, recurrent: weights of the history and of the future; row 4u + n is gate n of unit u:
            input, forget, cell, output.
        input_scale, recurrent_scale: what a 1 of each of their sums is worth.
        bias: of each gate.
        first_hidden, first_cell: the state in front of step 0.
        lengths: steps of each sequence's history, in [0, history]; all where left out.
        history: steps that have the first weights.
        levels: that a 1 of x is, in (0, 2^40]; of no use where x is int8.
        first_levels: that a 1 of first_hidden is.

    Returns:
        levels of hidden after every step, time-major: 127 are a 1.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, a state that its shared memory does not hold.

    Source: Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    steps, sequences, width = x.shape
    out = np.zeros((steps, sequences, width))
    for b in range(sequences):
        hidden, cell = spec_levels(first_hidden[b], first_levels), first_cell[b]
        worth = ONE / first_levels
        for t in range(steps):
            p = 0 if t < history else 1
            if lengths is not None and lengths[b] <= t < history:
                continue
            total = spec_product(spec_levels(x[t, b], levels), input[p], input_scale[p]) + bias[p]
            total = total + worth * spec_product(hidden, recurrent[p], recurrent_scale[p])
            i, f, g, o = total.reshape(width, 4).T
            cell = cell / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            hidden, worth = np.rint(ONE * np.tanh(cell) / (1 + np.exp(-o))), 1
            out[t, b] = hidden
    return out


@lstm_int8.draws
def _draw(rng, sizes, params):
    history, gates, width = int(params["history"]), sizes[LSTM_GATES], sizes[HIDDEN]
    given = {"lengths": rng.integers(0, history + 1, sizes[SEQUENCES])}
    for name, levels in (("input", params["levels"]), ("recurrent", ONE)):
        given[name] = weight_levels(rng, PARTS, gates, width)
        given[f"{name}_scale"] = scale_draw(rng, (PARTS, gates), width, levels)
    return given if rng.random() < 0.5 else given | {"lengths": None}


@lstm_int8.compares
def _compare(name, found, expected, arguments, allowed):
    apart = np.abs(found - expected)
    carried = int((apart > OTHER_LEVELS).sum())
    most = apart.max(initial=0)
    said = f"lstm_int8.{name} is {most} levels off, and {carried} states more than {OTHER_LEVELS}"
    assert most <= CARRIED_LEVELS and carried <= 1 + apart.size // 1000, said


@lstm_int8.on_cpu
def _cpu(
    x,
    input,
    input_scale,
    bias,
    recurrent,
    recurrent_scale,
    first_hidden,
    first_cell,
    lengths,
    history,
    levels,
    first_levels,
    out,
):
    hidden, cell = levels_of(first_hidden, first_levels), first_cell.astype(np.float32)
    one = np.float32(1)
    worth = np.full((x.shape[1], 1), np.float32(ONE) / np.float32(first_levels), np.float32)
    for t in range(len(x)):
        p = 0 if t < history else 1
        total = product(given_levels(x[t], levels), input[p], input_scale[p]) + bias[p]
        total += product(hidden, recurrent[p], recurrent_scale[p]) * worth
        i, f, g, o = (total[:, n::4] for n in range(4))
        with np.errstate(over="ignore"):
            next_cell = cell / (one + np.exp(-f)) + np.tanh(g) / (one + np.exp(-i))
            next_hidden = np.rint(np.float32(ONE) * np.tanh(next_cell) / (one + np.exp(-o)))
        if lengths is not None and t < history:
            seen = (t < lengths)[:, None]
            out[t] = np.where(seen, next_hidden, 0)
            hidden, cell = np.where(seen, next_hidden, hidden), np.where(seen, next_cell, cell)
            worth = np.where(seen, one, worth)
        else:
            out[t], hidden, cell = next_hidden, next_hidden, next_cell
            worth = np.ones_like(worth)


@lstm_int8.on_cuda
def _launch(*given):
    *arrays, history, levels, first_levels, out, stream = given
    x, input, recurrent = arrays[0], arrays[1], arrays[4]
    steps, sequences, hidden = x.shape
    if steps == 0 or sequences == 0 or hidden == 0:
        return
    on = launch.device()
    threads = min(blocks(hidden, UNITS_A_WARP), MOST_WARPS) * launch.WARP
    padded = blocks(hidden, STEP["int8"]) * STEP["int8"]
    stride = padded if padded % 128 == 64 else padded + 64
    # States and inputs of two steps each, and two scales and a bias of every gate.
    shared = 4 * (SEQUENCES_A_BLOCK * stride + 64) + 3 * 4 * 4 * hidden
    if shared > on.shared_per_block:
        raise ValueError(
            f"a state of {hidden} units needs {shared} B of shared memory a block; {on.name} has "
            f"{on.shared_per_block} B: give a smaller hidden size"
        )
    macros = {
        "levels": x.dtype.name == "int8",
        "hidden": hidden,
        "threads": threads,
        "held": hidden <= MOST_HELD,
        "whole": whole(hidden, x) and whole(hidden, input, recurrent, out),
    }
    kernel = cuda_c("tft/lstm_int8", "lstm_int8", **macros)
    sizes = map(np.int32, (steps, sequences, history))
    args = *arrays, out, *sizes, levels, first_levels
    launch.launch(kernel, blocks(sequences, SEQUENCES_A_BLOCK), threads, args, stream, shared)
