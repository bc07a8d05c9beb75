"""The recurrence of a long short-term memory, history and future in one kernel."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.dims import I32, REAL, Int
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.tft.lstm_tile import launch_lstm
from lowgpu_kernels.ops.tft.sizes import HIDDEN, LSTM_GATES, SEQUENCES, STEPS, weight_draw

PARTS = 2  # weights of the history and of the future


@op(
    # A step's roundings reach the next through weights that keep their size, halved by the gates.
    error=lambda steps, hidden, **_: 8 * (2 + np.sqrt(hidden)) * np.sqrt(1 + min(steps, 16)),
    sizes=lambda params, known: {LSTM_GATES: 4 * known.get(HIDDEN, 0)},
    bench=("steps=24 sequences=1024 hidden=128",),
    flops=lambda steps, sequences, hidden, lstm_gates, **_: (
        2 * steps * sequences * hidden * lstm_gates
    ),
)
def lstm(
    gates: REAL[STEPS, SEQUENCES, LSTM_GATES],
    recurrent: REAL[PARTS, LSTM_GATES, HIDDEN],
    first_hidden: REAL[SEQUENCES, HIDDEN],
    first_cell: REAL[SEQUENCES, HIDDEN],
    lengths: I32[SEQUENCES] | None = None,
    *,
    history: Int(0, 1 << 20),
) -> REAL[STEPS, SEQUENCES, HIDDEN]:
    """A layer of long short-term memory over the history, and one that goes on from it over the future.

        [i, f, g, o] = gates[t] + hidden recurrent[0 if t < history else 1]^T, four a unit
        cell         = sigmoid(f) cell + sigmoid(i) tanh(g)
        hidden       = sigmoid(o) tanh(cell)
        out[t]       = hidden

    Steps of the history from a sequence's length on are left out: they give zeros, and the future
    goes on from the last step before them. Sums, gates and the cell are float32; hidden is rounded to
    the precision of the gates from step to step. A sequence's result depends on no other one.

    Args:
        gates: what the inputs give the four gates, biases added; column 4u + n is gate n of unit u:
            input, forget, cell, output.
        recurrent: weights of the history and of the future, rows alike.
        first_hidden, first_cell: the state in front of step 0.
        lengths: steps of each sequence's history, in [0, history]; all where left out.
        history: steps that have the first weights.

    Returns:
        hidden after every step, time-major.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, a width whose weights its registers do not hold.

    Source: Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    steps, sequences, width = *gates.shape[:2], first_hidden.shape[1]
    out = np.zeros((steps, sequences, width))
    for b in range(sequences):
        hidden, cell = first_hidden[b], first_cell[b]
        for t in range(steps):
            if lengths is not None and lengths[b] <= t < history:
                continue
            total = gates[t, b] + recurrent[0 if t < history else 1] @ hidden
            i, f, g, o = total.reshape(width, 4).T
            cell = cell / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            hidden = np.tanh(cell) / (1 + np.exp(-o))
            out[t, b] = hidden
    return out


@lstm.draws
def _draw(rng, sizes, params):
    history = int(params["history"])
    return {
        "recurrent": weight_draw(rng, PARTS, sizes[LSTM_GATES], sizes[HIDDEN]),
        "lengths": rng.integers(0, history + 1, sizes[SEQUENCES]) if rng.random() < 0.5 else None,
    }


@lstm.on_cpu
def _cpu(gates, recurrent, first_hidden, first_cell, lengths, history, out):
    hidden, cell = first_hidden.astype(np.float32), first_cell.astype(np.float32)
    weights = [part.astype(np.float32).T for part in recurrent]
    one = np.float32(1)
    for t in range(len(gates)):
        total = gates[t].astype(np.float32) + hidden @ weights[0 if t < history else 1]
        i, f, g, o = (total[:, n::4] for n in range(4))
        with np.errstate(over="ignore"):
            next_cell = cell / (one + np.exp(-f)) + np.tanh(g) / (one + np.exp(-i))
            next_hidden = np.tanh(next_cell) / (one + np.exp(-o))
        next_hidden = next_hidden.astype(gates.dtype).astype(np.float32)
        if lengths is not None and t < history:
            seen = (t < lengths)[:, None]
            out[t] = np.where(seen, next_hidden, 0)
            hidden, cell = np.where(seen, next_hidden, hidden), np.where(seen, next_cell, cell)
        else:
            out[t], hidden, cell = next_hidden, next_hidden, next_cell


@lstm.on_cuda
def _launch(gates, recurrent, first_hidden, first_cell, lengths, history, out, stream):
    arrays = gates, recurrent, first_hidden, first_cell, lengths, out
    launch_lstm(arrays, history, launch.device(), stream)
