"""The clipped PPO objective of a minibatch: its gradient at the network's output, and statistics."""

import numpy as np
from numba import prange
from numba.extending import register_jitable

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import absent
from lowgpu_kernels.device import cuda, f32, njit, scalar
from lowgpu_kernels.device.draws import softmax
from lowgpu_kernels.device.maths import INFINITY, NAN, exp_f32, log_f32
from lowgpu_kernels.dims import F32, I32, B, Float, Int, N, O, Outputs
from lowgpu_kernels.launch import WARP
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.mlp.network import round_up

STATISTICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approximate_kl",
    "clip_fraction",
    "ratio",
    "non_finite_rows",
    "loss",
)
SUMS = 7  # statistics that are sums over rows: all but the loss, which follows from three of them
ROWS = 128  # rows a block or a CPU task sums, one a thread. Untuned.


@op(
    # Log-sum-exp adds O terms one after another, a task ROWS rows, the end B / ROWS partial sums;
    # 32 is the rest of a row: two exponentials, a square, a quotient.
    error=lambda B, O, **_: 2 * O + min(B, ROWS) + B // ROWS + 32,  # noqa: E741
    scratch={"partials": ("float32", lambda sizes, params: (SUMS, blocks(sizes["B"], ROWS)))},
    # The row width follows from the actions; rows can only be taken from a rollout that has some.
    sizes=lambda params, sizes: {
        O: round_up(int(params["actions"]) + 1, 8),
        N: max(sizes[N], min(sizes[B], 1)),
    },
    bench=("B=4096 N=65536", "B=65536 N=524288"),
    flops=lambda B, O, **_: B * (50 * O + 60),  # noqa: E741
)
def ppo_loss(
    y: F32[B, O],
    index: I32[B],
    action: I32[N],
    log_probability: F32[N],
    value: F32[N],
    advantage: F32[N],
    returns: F32[N],
    moments: F32[2] | None = None,
    *,
    actions: Int(2, 64),
    clip: Float(0, 10, above=True) = 0.2,
    value_clip: Float(0) = 0.2,
    value_weight: Float(0) = 0.5,
    entropy_weight: Float(0) = 0.01,
) -> Outputs(grad_y=F32[B, O], statistics=F32[8]):
    """Gradient of the clipped PPO loss at the network's output rows, and what the loss is made of.

        n         = index[b]
        A         = advantage[n], or (advantage[n] - mean) / (std + 1e-8) with moments
        ratio     = exp(log softmax(y[b, :actions])[action[n]] - log_probability[n])
        policy[b] = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)
        V         = y[b, actions]
        Vclip     = value[n] + clamp(V - value[n], -value_clip, value_clip)
        value[b]  = max((V - returns[n])^2, (Vclip - returns[n])^2) / 2
        entropy[b] = -sum(p * log(p)) over p = softmax(y[b, :actions])
        loss      = mean over b of policy + value_weight * value - entropy_weight * entropy
        grad_y    = d loss / d y, the 1 / B included

    The gradient is that of torch.clamp, torch.max and torch.min: the edges of a clamp are inside,
    and where the clipped and the unclipped term are equal each gets half. An action whose logit is
    -inf is masked: it adds nothing to the entropy and its gradient is 0.

    Args:
        y: a row of the network's output: `actions` logits, the value, then padding that is not
            read. O is actions + 1 rounded up to a multiple of 8.
        index: transition of each row, in [0, N).
        action: action taken, in [0, actions).
        log_probability: its natural logarithm under the policy that took it.
        value: V(s) of the network that took it, same unit as returns.
        advantage: not normalised, same unit as returns.
        returns: what the value is trained on.
        moments: mean and standard deviation of the advantages, to normalise them with. A minibatch
            of one has no deviation: leave moments out, or give (0, 1) as minibatch_moments does.
        actions: discrete actions, 2 to 64.
        clip: how far the ratio may leave 1 before its gradient stops, in (0, 10].
        value_clip: how far V may leave `value` before its gradient stops, in the unit of returns;
            0 switches this off.
        value_weight: weight of the value loss, 0 or more.
        entropy_weight: weight of the entropy, 0 or more.

    Returns:
        grad_y: d loss / d y; 0 in the padding.
        statistics: in the order of STATISTICS. Means over the rows of the three terms, of
            ratio - 1 - log(ratio), of whether |ratio - 1| > clip, and of the ratio; the number of
            rows whose loss is not finite; the loss. All 0 for an empty minibatch.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that disagree, an O that does not follow from the actions, rows of an
            empty rollout; on the CPU, an index or an action out of range, or a deviation that is
            negative or not a number. On a GPU nothing can be raised without waiting: an index or
            action must be in range, and a NaN shows in non_finite_rows.

    Source: Schulman et al. 2017, eq. 7 and 9 (arXiv:1707.06347); the value clip as in OpenAI
    Baselines' ppo2; the KL estimate is k3 of Schulman 2020, "Approximating KL divergence".
    """
    rows = np.arange(len(index))
    gain, old, target = advantage[index], value[index], returns[index]
    if moments is not None:
        gain = (gain - moments[0]) / (moments[1] + 1e-8)
    scores = y[:, :actions] - y[:, :actions].max(axis=1, keepdims=True)
    log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    known_log_p = np.where(p > 0, log_p, 0)
    entropy = -(p * known_log_p).sum(axis=1)

    log_ratio = log_p[rows, action[index]] - log_probability[index]
    ratio = np.exp(log_ratio)
    unclipped, clipped = -ratio * gain, -np.clip(ratio, 1 - clip, 1 + clip) * gain
    inside = (1 - clip <= ratio) & (ratio <= 1 + clip)
    through = 1.0 * (unclipped > clipped) + 0.5 * (unclipped == clipped)
    slope = -gain * np.where(inside, 1, through)
    push = np.where(slope == 0, 0, slope * ratio)

    error = y[:, actions] - target
    moved = y[:, actions] - old
    near = (np.abs(moved) <= value_clip) | (value_clip == 0)
    clipped_error = np.where(near, error, old + np.clip(moved, -value_clip, value_clip) - target)
    through = 1.0 * (error**2 > clipped_error**2) + 0.5 * (error**2 == clipped_error**2)
    pull = error * np.where(near, 1, through)

    count = max(len(index), 1)
    grad_y = np.zeros_like(y)
    grad_y[:, :actions] = -push[:, None] * p
    grad_y[rows, action[index]] += push
    grad_y[:, :actions] += entropy_weight * p * (known_log_p + entropy[:, None])
    grad_y[:, :actions][np.isneginf(log_p)] = 0
    grad_y[:, actions] = value_weight * pull

    policy_loss = np.maximum(unclipped, clipped)
    value_loss = np.maximum(error**2, clipped_error**2) / 2
    loss = policy_loss + value_weight * value_loss - entropy_weight * entropy
    terms = (policy_loss, value_loss, entropy, ratio - 1 - log_ratio, ~inside, ratio)
    means = [term.sum() / count for term in terms]
    return grad_y / count, np.array([*means, (~np.isfinite(loss)).sum(), loss.sum() / count])


@ppo_loss.draws
def _draw(rng, sizes, params):
    transitions, actions = sizes[N], int(params["actions"])
    logits = rng.normal(size=(transitions, actions)).astype("f4")
    v = rng.normal(size=transitions).astype("f4")
    index = rng.integers(0, max(transitions, 1), sizes[B])
    y = np.zeros((sizes[B], sizes[O]))
    y[:, :actions], y[:, actions] = logits[index], v[index]
    return {"y": y, "index": index, **draw_taken(rng, logits, v, params)}


def draw_taken(rng, logits, v, params, margin=1e-3):
    """Transitions of a policy that gives `logits` and `v` now, by the loss's names.

    They are `margin` away from the edges of the clips and from ties, where one rounding moves the
    gradient.
    """
    transitions, actions = logits.shape
    clip, value_clip = float(params["clip"]), float(params["value_clip"])
    action = rng.integers(0, actions, transitions)
    scores = logits.astype("f8")
    log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    drift = rng.normal(size=transitions) * 0.3
    drift[np.abs(np.abs(np.expm1(drift)) - clip) < margin] = np.log1p(clip + 2 * margin)
    moved = rng.normal(size=transitions)
    moved[np.abs(np.abs(moved) - value_clip) < margin] = value_clip + 2 * margin
    returns = rng.normal(size=transitions)
    middle = v - (moved - np.clip(moved, -value_clip, value_clip)) / 2
    returns[np.abs(returns - middle) < margin] += 1
    return {
        "action": action,
        "log_probability": log_p[np.arange(transitions), action] - drift,
        "value": v - moved,
        "returns": returns,
        "moments": np.array([rng.normal(), rng.uniform(0.5, 2)]) if rng.random() < 0.5 else None,
    }


@ppo_loss.checks
def check_taken(index, action, moments, actions, **_):
    """Refuse indices and actions out of range, and a deviation that is none."""
    _refuse_outside("index", index, len(action))
    _refuse_outside("action", action, actions)
    if moments is not None and not moments[1] >= 0:
        raise ValueError(
            f"moments[1] must be a standard deviation, got {moments[1]}; leave moments out for a "
            "minibatch of one, and look for NaN in the advantages otherwise"
        )


def _refuse_outside(name, array, end):
    wrong = np.flatnonzero((array < 0) | (array >= end))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] must be in [0, {end}), got {array[wrong[0]]}")


@scalar
def policy_term(ratio, gain, clip):
    """Policy loss of a row, and d loss / d ratio."""
    nearest = min(max(ratio, f32(1) - clip), f32(1) + clip)
    unclipped, clipped = -ratio * gain, -nearest * gain
    if nearest == ratio or unclipped > clipped:
        return unclipped, -gain
    if unclipped == clipped:
        return unclipped, f32(-0.5) * gain
    if clipped > unclipped:
        return clipped, f32(0)
    return NAN, NAN


@scalar
def value_term(v, old, target, value_clip):
    """Value loss of a row, and d loss / d v."""
    error, moved = v - target, v - old
    square = error * error
    nearest = min(max(moved, -value_clip), value_clip)
    if value_clip == f32(0) or nearest == moved:
        return f32(0.5) * square, error
    clipped_error = old + nearest - target
    clipped_square = clipped_error * clipped_error
    if square > clipped_square:
        return f32(0.5) * square, error
    if square == clipped_square:
        return f32(0.5) * square, f32(0.5) * error
    if clipped_square > square:
        return f32(0.5) * clipped_square, f32(0)
    return NAN, NAN


# Functions of arrays are register_jitable: as scalar functions, the simulator could not call them.
@register_jitable
def row_terms(b, y, rollout, actions, weights, grad_y):
    """Write the gradient of row b; return what it adds to each of the SUMS sums."""
    index, action, log_probability, value, advantage, returns, moments = rollout
    clip, value_clip, value_weight, entropy_weight = weights
    n = index[b]
    chosen = action[n]
    gain = advantage[n]
    if moments.shape[0] > 0:
        gain = (gain - moments[0]) / (moments[1] + f32(1e-8))
    # The sampler's own arithmetic: before the first update the ratio is exactly 1.
    largest, total, entropy = softmax(y, b, actions)
    log_total = log_f32(total)
    log_ratio = y[b, chosen] - largest - log_total - log_probability[n]
    ratio = exp_f32(log_ratio)
    policy, slope = policy_term(ratio, gain, clip)
    value_loss, pull = value_term(y[b, actions], value[n], returns[n], value_clip)
    share = f32(1) / f32(y.shape[0])
    # Select, not multiply: a clipped ratio may be infinite.
    push = f32(0) if slope == f32(0) else slope * ratio * share
    for j in range(actions):
        log_p = y[b, j] - largest - log_total
        p = exp_f32(log_p)
        if log_p == -INFINITY:
            grad_y[b, j] = f32(0)
        else:
            taken = f32(1) if j == chosen else f32(0)
            grad_y[b, j] = push * (taken - p) + entropy_weight * share * p * (log_p + entropy)
    grad_y[b, actions] = value_weight * pull * share
    for j in range(actions + 1, y.shape[1]):
        grad_y[b, j] = f32(0)
    loss = policy + value_weight * value_loss - entropy_weight * entropy
    outside = f32(0) if f32(1) - clip <= ratio <= f32(1) + clip else f32(1)
    not_finite = f32(0) if loss - loss == f32(0) else f32(1)
    return policy, value_loss, entropy, ratio - f32(1) - log_ratio, outside, ratio, not_finite


@register_jitable
def finish(sums, rows, value_weight, entropy_weight, statistics):
    """The statistics of the sums over all rows."""
    count = f32(max(rows, 1))
    for k in range(SUMS - 1):
        statistics[k] = sums[k] / count
    statistics[SUMS - 1] = sums[SUMS - 1]
    weighted = value_weight * statistics[1] - entropy_weight * statistics[2]
    statistics[SUMS] = statistics[0] + weighted


@ppo_loss.on_cpu
def _cpu(y, index, action, log_probability, value, advantage, returns, moments, actions, *rest):
    *weights, grad_y, statistics, _ = rest
    moments = absent(advantage, 1) if moments is None else moments
    rollout = index, action, log_probability, value, advantage, returns, moments
    partials = np.zeros((blocks(len(y), ROWS), SUMS), np.float32)
    _cpu_loop(y, rollout, actions, tuple(weights), grad_y, partials)
    finish(partials.sum(axis=0), len(y), *weights[2:], statistics)


@njit(parallel=True)
def _cpu_loop(y, rollout, actions, weights, grad_y, partials):
    # A task is ROWS rows whatever the number of threads, so the bits do not depend on it.
    for task in prange(partials.shape[0]):
        for b in range(task * ROWS, min((task + 1) * ROWS, y.shape[0])):
            terms = row_terms(b, y, rollout, actions, weights, grad_y)
            for k in range(SUMS):
                partials[task, k] += terms[k]


@launch.kernel(threads=ROWS)
def ppo_loss_kernel(
    y,
    index,
    action,
    log_probability,
    value,
    advantage,
    returns,
    moments,
    actions,
    clip,
    value_clip,
    value_weight,
    entropy_weight,
    grad_y,
    partials,
):
    # A thread owns one row. A warp's rows lie one after another, so the lines its first logits
    # come in hold the rest; the rollout is gathered, which is what spares a launch and a copy.
    # The sums of a block go down one tree together: a barrier a level, not one a level and sum.
    sums = cuda.shared.array((SUMS, ROWS), f32)
    lane = cuda.threadIdx.x
    b = cuda.grid(1)
    for k in range(SUMS):
        sums[k, lane] = f32(0)
    if b < y.shape[0]:
        rollout = index, action, log_probability, value, advantage, returns, moments
        weights = clip, value_clip, value_weight, entropy_weight
        terms = row_terms(b, y, rollout, actions, weights, grad_y)
        policy, value_loss, entropy, kl, outside, ratio, not_finite = terms
        sums[0, lane] = policy
        sums[1, lane] = value_loss
        sums[2, lane] = entropy
        sums[3, lane] = kl
        sums[4, lane] = outside
        sums[5, lane] = ratio
        sums[6, lane] = not_finite
    half = ROWS // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            for k in range(SUMS):
                sums[k, lane] += sums[k, lane + half]
        half //= 2
    cuda.syncthreads()
    if lane < SUMS:
        partials[lane, cuda.blockIdx.x] = sums[lane, 0]


@launch.kernel(threads=SUMS * WARP)
def ppo_loss_statistics_kernel(rows, value_weight, entropy_weight, statistics, partials):
    # One block; warp k owns sum k, its lanes every 32nd partial sum, which lie side by side.
    shared = cuda.shared.array((SUMS, WARP), f32)
    totals = cuda.shared.array(SUMS, f32)
    lane, k = cuda.threadIdx.x, cuda.threadIdx.y
    total = f32(0)
    for block in range(lane, partials.shape[1], WARP):
        total += partials[k, block]
    shared[k, lane] = total
    half = WARP // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            shared[k, lane] += shared[k, lane + half]
        half //= 2
    if lane == 0:
        totals[k] = shared[k, 0]
    cuda.syncthreads()
    if lane == 0 and k == 0:
        finish(totals, rows, value_weight, entropy_weight, statistics)


@ppo_loss.on_cuda
def _launch(y, index, action, log_probability, value, advantage, returns, moments, *rest):
    *params, grad_y, statistics, partials, stream = rest
    moments = absent(advantage, 1) if moments is None else moments
    rollout = index, action, log_probability, value, advantage, returns, moments
    ppo_loss_kernel[blocks(len(y), ROWS), ROWS, stream](y, *rollout, *params, grad_y, partials)
    ppo_loss_statistics_kernel[1, (WARP, SUMS), stream](
        np.int32(len(y)), *params[3:], statistics, partials
    )
