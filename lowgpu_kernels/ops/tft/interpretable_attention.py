"""Attention of the predicted steps to all steps, with one value for all heads."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, I32, REAL, Int, Outputs
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.tft.sizes import FUTURE, PROJECTED, SEQUENCES, SOURCES, STEPS, VALUE

HIDDEN_SCORE = -1e9  # of a step that is not seen: of use where no step is
# Queries of a warp, and floats from one column of a chunk of keys to the next; as the kernel has them.
QUERIES, KEY_STRIDE = 4, 66
MOST_WARPS = 8  # of a block; fewer where the future is short. Untuned.
ROWS, WARPS = (
    16,
    2,
)  # predicted steps of a warp, and warps of a block, where tensor cores multiply. Untuned.


def _sizes(params, known):
    heads = int(params["heads"])
    value = known.get(PROJECTED, 0) // heads
    future = min(known.get(FUTURE, 0), known.get(STEPS, 0))
    return {
        FUTURE: future,
        PROJECTED: value * heads,
        SOURCES: value * (heads + 1),
        VALUE: value,
    }


@op(
    # A score's error is a sum's; the softmax passes on twice that, and averages what is behind it.
    error=lambda value, steps, **_: 4 * (2 + np.sqrt(value) + np.sqrt(steps)),
    sizes=_sizes,
    bench=("future=24 sequences=1024 projected=128 steps=192",),
    flops=lambda future, sequences, steps, projected, value, **_: (
        2 * future * sequences * steps * (projected + value)
    ),
)
def interpretable_attention(
    query: REAL[FUTURE, SEQUENCES, PROJECTED],
    sources: REAL[STEPS, SEQUENCES, SOURCES],
    lengths: I32[SEQUENCES] | None = None,
    future_lengths: I32[SEQUENCES] | None = None,
    *,
    heads: Int(1, 16) = 4,
    ahead: Int(0, 1 << 20) = 0,
) -> Outputs(mixed=REAL[FUTURE, SEQUENCES, VALUE], attention=F32[FUTURE, SEQUENCES, STEPS]):
    """Where each predicted step looks, averaged over heads, and the mean of what it finds there.

        score[h, s]  = query[q, h] . key[s, h] / sqrt(value columns), -1e9 where q does not see s
        attention[s] = mean over h of softmax over s of score[h, s]
        mixed        = sum over s of attention[s] value[s]

    Step s of the history is seen where it is before the sequence's length; step j of the future where
    j < q + ahead and before the sequence's future length. Sums and the softmax are float32.

    Args:
        query: of the predicted steps, heads side by side.
        sources: of all steps, history first: keys, heads side by side, then one value.
        lengths: steps of each sequence's history; all where left out.
        future_lengths: steps of each sequence's future; all where left out.
        heads: that the queries' columns are cut into.
        ahead: future steps that are seen from the predicted step on; 0 is none, not even itself.

    Returns:
        mixed: time-major, before the projection back to the transformer's width.
        attention: a row sums to 1; evenly spread where no step is seen.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together, or a future longer than all steps; on a GPU,
            more steps than its shared memory holds.

    Source: Lim et al. 2021, equations 13 to 16 (arXiv:1912.09363).
    """
    future, sequences, columns = query.shape
    steps, width = len(sources), columns // heads
    history = steps - future
    mixed = np.zeros((future, sequences, width))
    attention = np.zeros((future, sequences, steps))
    for b in range(sequences):
        for q in range(future):
            for h in range(heads):
                at = slice(h * width, (h + 1) * width)
                score = sources[:, b, at] @ query[q, b, at] / np.sqrt(max(width, 1))
                for s in range(steps):
                    if s < history:
                        seen = lengths is None or s < lengths[b]
                    else:
                        seen = s - history < q + ahead
                        seen &= future_lengths is None or s - history < future_lengths[b]
                    if not seen:
                        score[s] = HIDDEN_SCORE
                powers = np.exp(score - score.max())
                attention[q, b] += powers / powers.sum() / heads
            mixed[q, b] = attention[q, b] @ sources[:, b, heads * width :]
    return mixed, attention


@interpretable_attention.draws
def _draw(rng, sizes, params):
    history = sizes[STEPS] - sizes[FUTURE]
    given = {}
    for name, most in (("lengths", history), ("future_lengths", sizes[FUTURE])):
        some = rng.random() < 0.5
        given[name] = rng.integers(0, most + 1, sizes[SEQUENCES]) if some else None
    return given


@interpretable_attention.on_cpu
def _cpu(query, sources, lengths, future_lengths, heads, ahead, mixed, attention):
    future, sequences, columns = query.shape
    steps, width = len(sources), columns // heads
    history, step = steps - future, np.arange(steps)
    if mixed.size == 0 and attention.size == 0:
        return
    seen = np.ones((future, sequences, steps), bool)
    if lengths is not None:
        seen &= (step < lengths[:, None]) | (step >= history)
    if future_lengths is not None:
        seen &= step < history + future_lengths[:, None]
    seen &= (step < history + ahead + np.arange(future)[:, None])[:, None]
    by_sequence = sources.astype(np.float32).swapaxes(0, 1)
    asked = query.astype(np.float32).swapaxes(0, 1)
    total = np.zeros((sequences, future, steps), np.float32)
    scale = np.float32(1 / np.sqrt(max(width, 1)))
    for h in range(heads):
        at = slice(h * width, (h + 1) * width)
        score = asked[..., at] @ by_sequence[..., at].swapaxes(1, 2) * scale
        score = np.where(seen.swapaxes(0, 1), score, np.float32(HIDDEN_SCORE))
        powers = np.exp(score - score.max(-1, keepdims=True))
        total += powers / powers.sum(-1, keepdims=True)
    total /= np.float32(heads)
    attention[:] = total.swapaxes(0, 1)
    mixed[:] = (total @ by_sequence[..., heads * width :]).swapaxes(0, 1)


@interpretable_attention.on_cuda
def _launch(query, sources, lengths, future_lengths, heads, ahead, mixed, attention, stream):
    future, sequences, columns = query.shape
    steps, width, on = len(sources), columns // int(heads), launch.device()
    if future == 0 or steps == 0:
        return
    arrays = query, sources, lengths, future_lengths, mixed, attention
    counts = future, sequences, steps, int(heads)
    if query.dtype.name == "bfloat16":
        macros = {"float32": False, "warps": WARPS, "width": width}
        kernel = cuda_c("tft/attention_products", "attention_products", **macros)
        grid = sequences * blocks(future, WARPS * ROWS)
        args = (*arrays, *map(np.int32, (*counts, ahead)))
        launch.launch(kernel, grid, WARPS * launch.WARP, args, stream)
        return
    warps = min(blocks(future, QUERIES), MOST_WARPS)
    # Scores and mean attention of each warp, its queries, and a chunk of keys.
    shared = 4 * (warps * QUERIES * (2 * steps + width) + width * KEY_STRIDE)
    if shared > on.shared_per_block:
        raise ValueError(
            f"attention over {steps} steps needs {shared} B of shared memory a block; {on.name} has "
            f"{on.shared_per_block} B: give fewer steps"
        )
    kernel = cuda_c("tft/interpretable_attention", "interpretable_attention", float32=True)
    args = (*arrays, *map(np.int32, (*counts, width, ahead)))
    launch.launch(kernel, sequences, warps * launch.WARP, args, stream, shared)
