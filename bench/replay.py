"""Prioritized replay beside PyTorch's cumulative sum and binary search in a CUDA graph.

`python -m bench.versus per` measures: sample, importance weights, gather of the observations and update
of the priorities, at the capacity and batch of NUMBERS.
"""

import numpy as np

from bench import peers
from bench.peers import workload

CAPACITY, BATCH = 1 << 20, 8192
ENVS = 4096  # of the ring: as in the workload's DQN


def comparisons(comparison, graph_of, calls=50):
    """{name: () -> Comparison} for bench.versus, which gives its class and its way to a graph."""

    def ours():
        import cupy

        work = replaying(cupy, CAPACITY, ENVS, BATCH)
        cupy.cuda.get_current_stream().synchronize()  # the graph's stream is another
        return graph_of(work, calls)

    def rival(variant):
        given = CAPACITY, BATCH
        settings = peers.per_torch.VARIANTS[variant]
        return peers.repeated(lambda: peers.per_torch.PrioritizedReplay(*given, **settings), calls)

    def per():
        return comparison(
            f"prioritized replay, capacity 2^20, batch {BATCH}: sample, weights, gather, update",
            ours,
            {f"PyTorch graph, {name}": rival(name) for name in peers.per_torch.VARIANTS},
            bar_ratio=5,
            calls=calls,
            rounds=20,
        )

    return {"per": per}


def replaying(arrays, capacity, envs, batch, bars=1_000_000):
    """One round of prioritized replay of market states, as a function of a stream.

    The peer gathers the observation of each row it draws; ours gathers both states of a one-step window and
    makes the observation of the first.

    Args:
        arrays: cupy, or numpy for a test; then the stream is ignored.
        capacity: transitions of the ring, a multiple of envs.
        envs, batch: of the ring, and rows drawn.
        bars: rows of the market's table.
    """
    from lowgpu.envs import make
    from lowgpu_kernels import observe, priority_gather, priority_update
    from lowgpu_kernels.dims import BF16, I
    from lowgpu_kernels.ops.replay.ring import ring_arrays

    rng, env = np.random.default_rng(0), make("market", episode=workload.EPISODE)
    shapes = ring_arrays(capacity // envs, envs, len(env.floats), len(env.ints), prioritized=True)
    made = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    made["head"][:2] = 0, capacity // envs
    for name in ("kept_ints", "kept_next_ints"):
        made[name][..., 0] = rng.integers(bars, size=(capacity // envs, envs))
    made["highest"][:] = 1
    # In the order of a batch each leaf gets a priority once: the update makes the sums.
    index = np.arange(capacity, dtype=np.int32)
    error = (rng.random(capacity, np.float32) + 1e-3) ** (1 / 0.6)
    tree = "priority", "sums", "highest"
    priority_update(index, error, *(made[n] for n in tree), alpha=0.6, in_order=True)
    table = rng.standard_normal((bars, env.width), np.float32).astype(BF16[I].dtype({}))
    series = np.stack([np.ones(bars, np.float32), np.zeros(bars, np.float32)])
    b = {n: arrays.asarray(a) for n, a in made.items()}
    table, series, clock = (arrays.asarray(a) for a in (table, series, np.zeros(2, np.uint64)))
    error = arrays.asarray(rng.standard_normal(batch, np.float32))
    ring = [b[n] for n in shapes if n.startswith("kept_")]
    drawing, observing = (_memory(arrays, op, sizes, env) for op, sizes in _outputs(batch, env))

    def work(stream=None):
        rows, observed = drawing["out"], observing["out"]
        queue = {} if stream is None else {"stream": stream}
        given = b["priority"], b["sums"], clock, b["head"], *ring
        priority_gather(*given, batch=batch, **drawing, **queue)
        index, *states = rows[:3]
        observe(*states, table, series, env=env, precision="bfloat16", **observing, **queue)
        given = index, error, *(b[n] for n in tree)
        priority_update(*given, alpha=0.6, in_order=True, **queue)
        return rows, observed

    return work


def _outputs(batch, env):
    """The ops with outputs, in their order, and what gives their sizes."""
    from lowgpu_kernels import observe, priority_gather
    from lowgpu_kernels.dims import B, F, G, I, N

    fields = {F: len(env.floats), G: len(env.ints)}
    return (
        (priority_gather, (fields, {"batch": batch})),
        (
            observe,
            ({B: batch, N: batch, I: env.width, **fields}, {"env": env, "precision": "bfloat16"}),
        ),
    )


def _memory(arrays, op, sizes, env):
    """`out`, and on a GPU `scratch`, of an op's calls."""
    known, params = sizes
    params = op.checked_params(params)
    resolved, chosen = op.sizes_of(known, params), op.chosen_by(params)
    outputs = op.outputs.values()
    made = {"out": tuple(arrays.empty(s.resolve(resolved), s.dtype(chosen)) for s in outputs)}
    if arrays is np or not op.scratch:
        return made
    wanted = op.scratch_specs({d.name: n for d, n in resolved.items()}, params)
    return made | {"scratch": [arrays.empty(n, np.dtype(t)) for n, t in wanted.values()]}
