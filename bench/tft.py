"""The Temporal Fusion Transformer beside PyTorch, interleaved on one GPU: `python -m bench.tft [NAME ...]`.

Prints and writes what bench.versus does. Weights are random and of the size of trained ones: the time does
not depend on them.
"""

import importlib
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import peers
from bench.timing import device_facts, report, save
from bench.versus import BF16_FLOPS_PER_SECOND, RESULTS, Comparison, graph_of

HISTORY, FUTURE, BATCH, HIDDEN, HEADS, CLIENTS = 168, 24, 1024, 128, 4, 370
CALIBRATION = 16  # sequences
KNOWN = ("hour", "day", "week", "month", "index")


def electricity(hidden=HIDDEN, heads=HEADS):
    """The shape of the peers' workload: one static category, five known reals, one target."""
    from lowgpu.tft import Selection, TFTShape

    counts = {"variable_units": hidden}
    return TFTShape(
        hidden=hidden,
        heads=heads,
        reals=(*KNOWN, "load"),
        categoricals=("client",),
        static=Selection(categoricals=("client",), cardinalities=(CLIENTS,), units=1),
        history=Selection(reals=(*KNOWN, "load"), units=6, **counts),
        future=Selection(reals=KNOWN, units=5, **counts),
        outputs=(7,),
    )


def random_arrays(shape, seed=0):
    """Arrays of a shape, products' of the size that keeps numbers as they are."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, array in shape.arrays().items():
        if array.optional:
            continue
        scale = 1 / np.sqrt(max(array.shape[-1], 1)) if array.product else 0.1
        arrays[name] = rng.normal(size=array.shape) * scale
        if name.endswith("norm_weight"):
            arrays[name] += 1
    return arrays


def flops(shape, batch=BATCH, history=HISTORY, future=FUTURE):
    """Floating-point operations of a pass's products over steps; what sequences have once is left out."""
    hidden, value, steps = shape.hidden, shape.hidden // shape.heads, history + future
    mixing = sum(
        count * len(selection.reals) * 2 * hidden * selection.variable_units
        for count, selection in ((history, shape.history), (future, shape.future))
    )
    lstm = steps * shape.layers * 8 * hidden**2
    # The LSTM's gate, the enrichment, keys and value.
    each = steps * (2 * hidden**2 + 3 * hidden**2 + hidden * (hidden + value))
    attention = future * steps * (hidden + value)
    # Queries, the attention's gate, feed-forward and the last gate.
    behind = future * (hidden**2 + 2 * hidden * value + 3 * hidden**2 + 2 * hidden**2)
    return 2 * batch * (mixing + lstm + each + attention + behind)


def inputs_of(shape, batch=BATCH, library="cupy", seed=0):
    """Arguments of `TFT.predict`, of a library's arrays."""
    xp = importlib.import_module(library)
    rng, inputs = np.random.default_rng(seed), {}
    for name, steps in (("history", HISTORY), ("future", FUTURE)):
        reals = rng.normal(size=(batch, steps, len(shape.reals))).astype(np.float32)
        clients = rng.integers(0, CLIENTS, (batch, steps, 1), np.int32)
        inputs |= {f"{name}_reals": xp.asarray(reals), f"{name}_categories": xp.asarray(clients)}
    return inputs


def model_of(shape, precision):
    """Ours on the GPU, with random weights; INT8 calibrated on a few sequences on the CPU."""
    from lowgpu.tft import TFT, quantize_tft

    arrays = random_arrays(shape)
    if precision == "int8":
        inputs = inputs_of(shape, CALIBRATION, "numpy", seed=1)
        arrays = quantize_tft(TFT(shape, arrays), [inputs]).arrays
    return TFT(shape, arrays, precision, "cupy")


def passing(model, inputs):
    """queue(stream): one pass of ours."""
    import cupy

    from lowgpu_kernels.arrays import on_stream

    cupy.cuda.get_current_stream().synchronize()  # the graph's stream is another

    def queue(stream):
        with on_stream(stream.ptr):
            model.predict(**inputs)

    return queue


def whole(precision, library, calls=10):
    """A pass in a graph, beside pytorch-forecasting's module and the lean one of the same weights.

    The peers of INT8 are in bfloat16.
    """
    theirs = "bfloat16" if precision == "int8" else precision

    def lean(variant):
        shape = electricity()
        given = {"precision": theirs, **peers.tft_lean_torch.VARIANTS[variant]}
        return peers.tft_lean_torch.TFT(
            shape, random_arrays(shape), BATCH, HISTORY, FUTURE, **given
        )

    def original():
        return peers.tft_torch.TFT(BATCH, HIDDEN, HEADS, HISTORY, FUTURE, precision=theirs)

    rivals = {
        "lean": peers.repeated(lambda: lean("original"), calls),
        "lean, compiled": peers.repeated(lambda: lean("compiled"), calls),
    }
    if library:
        rivals["pytorch-forecasting"] = peers.repeated(original, calls)
    return _compared(precision, rivals, calls, bar_ratio=2)


def beside_bfloat16(calls=10):
    """INT8 beside our own bfloat16."""
    return _compared("int8", {"our bfloat16": lambda: _ours("bfloat16", calls)}, calls, 1.3)


def _ours(precision, calls):
    shape = electricity()
    return graph_of(passing(model_of(shape, precision), inputs_of(shape)), calls)


def _compared(precision, rivals, calls, bar_ratio):
    rate = BF16_FLOPS_PER_SECOND if precision == "bfloat16" else None
    return Comparison(
        f"TFT, batch {BATCH}, hidden {HIDDEN}, {HISTORY} + {FUTURE} steps, {precision}",
        lambda: _ours(precision, calls),
        rivals,
        items=BATCH,
        unit="sequences",
        bar_ratio=bar_ratio,
        floor_seconds=rate and flops(electricity()) / rate,
        rounds=10,
        calls=calls,
    )


def stages(precision, calls=50):
    """Print what each op of a pass takes, in a graph of its own; a graph's launch is in it."""
    taken = []

    def run(op, arrays, out, **parameters):
        replay = graph_of(lambda s: op(*arrays, **parameters, out=out, stream=s), calls)
        replay()
        start = time.perf_counter()
        replay()
        taken.append((time.perf_counter() - start) * 1e6 / calls)
        first = out[0] if isinstance(out, tuple) else out
        print(f"{op!s:26} {first.shape!s:22} {taken[-1]:8.1f} µs")

    shape = electricity()
    model = model_of(shape, precision)
    model.run = run
    model.predict(**inputs_of(shape))
    print(f"{'all, one after the other':49} {sum(taken):8.1f} µs")


PRECISIONS = "int8", "bfloat16", "float32"


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"of {', '.join(PRECISIONS)}; all by default")
    ] = None,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = RESULTS / "versus_tft.json",
    library: Annotated[
        bool, typer.Option(help="measure pytorch-forecasting, which has to be installed")
    ] = True,
    by_stage: Annotated[bool, typer.Option(help="print the time of each op instead")] = False,
):
    """Measure our transformer against PyTorch's on this machine's GPU."""
    unknown = [n for n in names or [] if n not in PRECISIONS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(PRECISIONS)}")
    if by_stage:
        for name in names or PRECISIONS:
            stages(name)
        return
    rows = []
    for name in names or PRECISIONS:
        rows.append(whole(name, library).measure())
        if name == "int8":
            rows.append(beside_bfloat16().measure())
        save(out, rows, device_facts())
    report(rows)


if __name__ == "__main__":
    typer.run(main)
