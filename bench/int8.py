"""Int8 beside PyTorch, interleaved on one GPU: `python -m bench.int8 [NAME ...]`.

Prints and writes what bench.versus does. The peer of the products is `torch._int_mm`. It gives int32;
what it would still have to do for a scaled int8 result is not counted against it. The peers of the
policy are PyTorch's in bfloat16, whose int8 is slower, and our own `act` in bfloat16.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import inference, peers
from bench.peers import workload
from bench.timing import device_facts, report, save
from bench.versus import COPY_BYTES_PER_SECOND, RESULTS, Comparison, graph_of

OPERATIONS_A_CLOCK_AND_SM = 8192  # int8 with int32 sums; architecture paper of the H100


def operations_per_second():
    """What the tensor cores of the current GPU do at its highest clock, a Hopper part taken as given."""
    facts = device_facts()
    return OPERATIONS_A_CLOCK_AND_SM * facts["sm_count"] * facts["sm_clock_max_mhz"] * 1e6


def product(rows, columns, terms, requantized, bar, calls):
    """int8 [rows, terms] by [columns, terms]: int32 sums, or scaled, biased, rectified and rounded to
    int8 in the same kernel."""

    def ours():
        import cupy

        import lowgpu_kernels as kernels

        rng = np.random.default_rng(0)
        a, b = (cupy.asarray(rng.integers(-128, 128, (n, terms), np.int8)) for n in (rows, columns))
        op, scales, params = kernels.int8_gemm, (), {}
        if requantized:
            op, params = kernels.int8_gemm_requantized, {"activation": "relu"}
            scale = np.full(columns, 40 / (5500 * terms**0.5), np.float32)
            scales = None, cupy.asarray(scale), cupy.zeros(columns, "f4")
        out = cupy.empty((rows, columns), "i1" if requantized else "i4")
        wanted = op.scratch_specs({"X": rows, "Y": columns, "Z": terms}, params)
        given = {"out": out, "scratch": [cupy.empty(*spec) for spec in wanted.values()]}
        return graph_of(lambda stream: op(a, b, *scales, **params, **given, stream=stream), calls)

    theirs = peers.repeated(lambda: peers.int8_torch.Gemm(rows, columns, terms), calls)
    nbytes = terms * (rows + columns) + rows * columns * (1 if requantized else 4)
    operations = 2 * rows * columns * terms
    return Comparison(
        f"int8 product {rows} x {columns} x {terms}, {'int8' if requantized else 'int32'} out",
        ours,
        {"torch._int_mm": theirs},
        items=operations,
        unit="OP",
        bar_ratio=bar,
        floor_seconds=max(nbytes / COPY_BYTES_PER_SECOND, operations / operations_per_second()),
        rounds=20,
        calls=calls,
    )


def acting(batch):
    """queue(stream): one sampled `act_int8` of the workload's network on random observations."""
    import cupy

    from lowgpu_kernels import act_int8, pack_int8
    from lowgpu_kernels.dims import BF16, I
    from lowgpu_kernels.ops.int8.pack_int8 import draw_quantized

    network, rng = inference.policy(), np.random.default_rng(0)
    arrays = draw_quantized(rng, network)
    arrays["hidden_zero"][:] = -128  # as calibration gives them for relu
    image = pack_int8(*map(cupy.asarray, arrays.values()), network=network)
    rows = rng.standard_normal((batch, network.inputs), np.float32)
    observation = cupy.asarray(rows.astype(BF16[I].dtype({})))
    clock = cupy.zeros(1, np.uint64)
    out = tuple(cupy.empty(batch, dtype) for dtype in ("i4", "f4", "f4"))
    settings = {"network": network, "actions": workload.ACTIONS, "seed": 0}
    cupy.cuda.get_current_stream().synchronize()  # the graph's stream is another
    return lambda stream: act_int8(observation, image, clock, **settings, out=out, stream=stream)


def policy(batch, calls, of_ours=False, **limits):
    """`act_int8` beside PyTorch's forward pass in bfloat16, or beside our `act`."""

    def rival(variant):
        settings = peers.mlp_torch.VARIANTS[variant]
        return peers.repeated(lambda: peers.mlp_torch.MLP(batch, calls=calls, **settings))

    rivals = {f"PyTorch graph, bfloat16, {name}": rival(name) for name in peers.mlp_torch.VARIANTS}
    if of_ours:
        rivals = {"our act, bfloat16": lambda: graph_of(inference.acting(batch), calls)}
    return Comparison(
        f"act_int8, batch {batch}, a call of {calls} in a graph",
        lambda: graph_of(acting(batch), calls),
        rivals,
        items=batch,
        unit="rows",
        calls=calls,
        rounds=20,
        floor_seconds=workload.FLOPS_FORWARD * batch / operations_per_second(),
        **limits,
    )


COMPARISONS = {
    "act-1": lambda: policy(1, 200, bar_seconds=4e-6),
    "act-256": lambda: policy(256, 200, bar_seconds=4e-6),
    "act-8192": lambda: policy(8192, 200),
    "act-large": lambda: policy(inference.LARGE, 20, bar_ratio=5),
    "act-8192-bf16": lambda: policy(8192, 200, of_ours=True),
    "act-large-bf16": lambda: policy(inference.LARGE, 20, of_ours=True, bar_ratio=1.4),
    "8192": lambda: product(8192, 8192, 8192, False, bar=1.3, calls=5),
    "8192-int8": lambda: product(8192, 8192, 8192, True, bar=1.3, calls=5),
    "4096": lambda: product(4096, 4096, 4096, False, bar=1.3, calls=20),
    "4096-int8": lambda: product(4096, 4096, 4096, True, bar=1.3, calls=20),
    "tall-int8": lambda: product(1 << 20, 128, 256, True, bar=1.8, calls=10),
    "few-rows": lambda: product(32, 4096, 4096, True, bar=None, calls=50),
}


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"of {', '.join(COMPARISONS)}; all by default")
    ] = None,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = RESULTS / "versus_int8.json",
):
    """Measure our int8 products and policy against the peers on this machine's GPU."""
    unknown = [n for n in names or [] if n not in COMPARISONS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(COMPARISONS)}")
    rows = []
    for name in names or COMPARISONS:
        rows.append(COMPARISONS[name]().measure())
        save(out, rows, device_facts())
    report(rows)


if __name__ == "__main__":
    typer.run(main)
