"""`act` beside PyTorch's forward pass in a CUDA graph, and the memory of inference.

`python -m bench.versus act-1 act-256 act-large` measures; `python -m bench.inference` prints the bytes.
"""

import numpy as np

from bench import peers
from bench.peers import workload

LARGE = 1 << 20
BF16_FLOPS_PER_SECOND = 780e12  # measured: H200, 8192^3 bfloat16 product on random data


def comparisons(comparison, graph_of):
    """{name: () -> Comparison} for bench.versus, which gives its class and its way to a graph."""

    def inference(batch, calls, **limits):
        def ours():
            return graph_of(acting(batch), calls)

        def rival(variant):
            settings = peers.mlp_torch.VARIANTS[variant]
            return peers.repeated(lambda: peers.mlp_torch.MLP(batch, calls=calls, **settings))

        variants = ("original", "fused relu", "compiled")
        return comparison(
            f"act, batch {batch}, bfloat16, a call of {calls} in a graph",
            ours,
            {f"PyTorch graph, {name}": rival(name) for name in variants},
            items=batch,
            unit="rows",
            calls=calls,
            rounds=20,
            **limits,
        )

    floor = workload.FLOPS_FORWARD * LARGE / BF16_FLOPS_PER_SECOND
    return {
        "act-1": lambda: inference(1, 200, bar_seconds=4e-6),
        "act-256": lambda: inference(256, 200, bar_seconds=4e-6),
        "act-large": lambda: inference(LARGE, 20, bar_ratio=3, floor_seconds=floor),
    }


def acting(batch):
    """queue(stream): one sampled `act` of the workload's network on random observations."""
    import cupy

    from lowgpu_kernels import act, pack_network
    from lowgpu_kernels.dims import BF16, I
    from lowgpu_kernels.ops.mlp.examples import draw_parameters

    network, rng = policy(), np.random.default_rng(0)
    parameters = cupy.asarray(draw_parameters(rng, network))
    rows = rng.standard_normal((batch, network.inputs), np.float32)
    observation = cupy.asarray(rows.astype(BF16[I].dtype({})))
    image = pack_network(parameters, network=network)
    clock = cupy.zeros(1, np.uint64)
    out = tuple(cupy.empty(batch, dtype) for dtype in ("i4", "f4", "f4"))
    settings = {"network": network, "actions": workload.ACTIONS, "seed": 0}
    cupy.cuda.get_current_stream().synchronize()  # the graph's stream is another
    return lambda stream: act(
        observation, parameters, image, clock, **settings, out=out, stream=stream
    )


def policy():
    """The workload's network, whose head holds as many columns as the peers' padded one."""
    from lowgpu_kernels.ops.mlp.network import policy_network

    return policy_network(workload.PADDED, workload.ACTIONS, workload.HIDDEN)


def written(op, batch, **params):
    """Bytes that an op of the workload's network writes for a batch in bfloat16."""
    from lowgpu_kernels.dims import REAL, B

    params = {"network": policy(), **params}
    sizes = op.sizes_of({B: batch}, params)
    return sum(
        int(np.prod(spec.resolve(sizes))) * spec.dtype({REAL.dtypes: "bfloat16"}).itemsize
        for spec in op.outputs.values()
    )


def main(batch=LARGE):
    """Print what a forward pass for training and one for inference write."""
    from lowgpu.pools import shown
    from lowgpu_kernels import act, mlp_forward

    training = written(mlp_forward, batch)
    inference = written(act, batch, actions=workload.ACTIONS)
    print(f"batch {batch}, bfloat16: written beside the {shown(batch * 2 * workload.PADDED)} read")
    print(f"  forward for training, activations kept  {shown(training):>9}")
    print(f"  act                                     {shown(inference):>9}")


if __name__ == "__main__":
    main()
