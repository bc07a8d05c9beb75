"""A minibatch of prioritized replay in one launch: draws, n-step transitions and weights."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32
from lowgpu_kernels.dims import (
    F32,
    I32,
    SEED,
    U8,
    U64,
    B,
    E,
    F,
    Float,
    G,
    Int,
    K,
    L,
    Outputs,
    W,
)
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.priority_sample import GROUP, MEMBERS, priority_sample, tree_macros
from lowgpu_kernels.ops.replay.replay_gather import replay_gather
from lowgpu_kernels.ops.replay.replay_write import ring_sizes, spec_sums
from lowgpu_kernels.ops.replay.tree import FAN, UNIT, stride_of


@op(
    # As replay_gather: a product and a sum a step; a weight is exp(beta log x).
    error=lambda **_: 64,
    changes=("clock",),
    sizes=lambda params, sizes: ring_sizes(sizes) | {B: int(params["batch"])},
    scratch={"least": ("float32", lambda sizes, params: (_grid(sizes["B"]),))},
    bench=("E=4096 K=256 F=2 G=2 batch=8192", "E=4096 K=256 F=2 G=2 batch=262144"),
)
def priority_gather(
    priority: F32[L],
    sums: U64[W],
    clock: U64[2],
    head: I32[3],
    kept_floats: F32[K, E, F],
    kept_ints: I32[K, E, G],
    kept_next_floats: F32[K, E, F],
    kept_next_ints: I32[K, E, G],
    kept_reward: F32[K, E],
    kept_mark: U8[K, E],
    *,
    batch: Int(1),
    seed: SEED = 0,
    steps: Int(1, 16) = 1,
    gamma: Float(0, 1) = 0.99,
    beta: Float(0, 1) = 0.4,
) -> Outputs(
    index=I32[B],
    state_floats=F32[B, F],
    state_ints=I32[B, G],
    action=I32[B],
    reward=F32[B],
    discount=F32[B],
    next_floats=F32[B, F],
    next_ints=I32[B, G],
    weight=F32[B],
):
    """What `priority_sample` draws, gathered as `replay_gather` does, bit for bit, in one launch.

        index  = priority_sample(priority, sums, clock)
        rows   = replay_gather(index, head, ring)
        weight = (min over the batch of drawn / drawn)^beta

    Args:
        priority, sums: the tree; see `priority_sample`.
        clock: batches drawn so far, and a count that is 0 between calls.
        head, kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark: the
            ring; see `replay_write`.
        batch: rows to draw, at least 1.
        seed: of the run.
        steps: most steps of a return, n, in [1, 16].
        gamma: discount per step, in [0, 1].
        beta: how far weights make up for uneven draws, in [0, 1]; 1 does wholly.

    Changes: clock, by one batch, so that a replayed graph never draws the same numbers.

    Returns:
        index: of each row, not decreasing; what `priority_update` takes; -1 from an empty tree.
        state_floats, state_ints: state the action was taken in.
        action: in [0, 64).
        reward: n-step return without the bootstrap, in the reward's unit.
        discount: what the value of the next state counts for, in [0, 1].
        next_floats, next_ints: state to bootstrap from; the final one where the episode was cut.
        weight: in (0, 1], 1 for the row least likely to be drawn.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: sizes that are not a tree's or disagree; a parameter out of range; on a GPU,
            priority or sums not aligned to 16 bytes.

    Source: Schaul et al. 2016, algorithm 1 (arXiv:1511.05952); one launch and integer sums ours.
    """
    index, drawn, least = priority_sample.spec(priority, sums, clock, batch=batch, seed=seed)
    ring = kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark
    how = {"steps": steps, "gamma": gamma, "beta": beta}
    return index, *replay_gather.spec(index, head, *ring, drawn, least, **how)


def _grid(batch):
    """Blocks, which all must be on the GPU at once: at most one an SM."""
    return min(blocks(batch, GROUP), launch.device().sms)


@priority_gather.draws
def _draw(rng, sizes, params):
    slots, envs = sizes[K], sizes[E]
    filled = slots if rng.random() < 0.5 else rng.integers(slots + 1)
    drawn = replay_gather.draw_inputs(rng, sizes | {B: 1}, {})
    units = rng.integers(1, 2 ** rng.integers(1, 31), size=sizes[L]).astype("f4").astype("f8")
    units[filled * envs :] = 0
    head = rng.integers(slots) if filled == slots else filled
    return {
        "priority": units * UNIT,
        "sums": spec_sums(units * UNIT),
        "clock": [rng.integers(2**62), 0],
        "head": [head, filled, 0],
        "kept_mark": drawn["kept_mark"],
    }


@priority_gather.on_cpu
def _cpu(priority, sums, clock, head, *rest):
    *ring, batch, seed, steps, gamma, beta, index = rest[:12]
    *outputs, _ = rest[12:]
    drawn, least = np.empty(len(index), "f4"), np.empty(blocks(len(index), GROUP), "f4")
    priority_sample.cpu(priority, sums, clock, batch, seed, index, drawn, least)
    replay_gather.cpu(index, head, *ring, drawn, least, steps, gamma, beta, *outputs)


@priority_gather.on_cuda
def _launch(priority, sums, clock, head, *rest):
    *ring, batch, seed, steps, gamma, beta = rest[:11]
    *outputs, least, stream = rest[11:]
    slots, envs, floats = ring[0].shape
    macros = {"steps": int(steps), "floats": floats, "ints": ring[1].shape[2]}
    kernel = cuda_c(
        "replay/priority_gather", "priority_gather_kernel", **tree_macros(priority, sums), **macros
    )
    sizes = map(i32, (len(priority) // FAN, batch, slots, envs))
    args = priority, sums, clock, head, *ring, *sizes, seed, stride_of(batch), gamma, beta
    args = *args, *outputs, least
    how = {"cooperative": True, "early": launch.from_the_wait()}
    launch.launch(kernel, _grid(int(batch)), GROUP * MEMBERS, args, stream, **how)
