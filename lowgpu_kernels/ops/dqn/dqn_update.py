"""DQN updates: from sampled windows and parameters to changed parameters, all minibatches in one call."""

import functools

import numpy as np

from lowgpu_kernels.device import f32, i32, njit
from lowgpu_kernels.device.maths import NAN
from lowgpu_kernels.dims import (
    F32,
    FLAG,
    I32,
    REAL,
    B,
    Choice,
    F,
    Float,
    G,
    I,
    Int,
    M,
    Outputs,
    P,
    R,
    S,
    Static,
)
from lowgpu_kernels.env import Env
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.dqn.action_values import best_action, duels, require_values, value_offset
from lowgpu_kernels.ops.dqn.dqn_launch import WORK, launch_updates, work_of
from lowgpu_kernels.ops.dqn.dqn_verify import verify_update
from lowgpu_kernels.ops.dqn.experience import pairs
from lowgpu_kernels.ops.loss.huber import huber_gradient_of, huber_loss_of
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.mlp_backward import mlp_backward
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.optim.adam import BELOW_ONE, adam
from lowgpu_kernels.ops.ppo.spec_network import backward, forward, observed
from lowgpu_kernels.ops.rollout.observe import observe
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes

STATISTICS = "loss", "value", "goal", "non_finite_rows"


def examples():
    """Experience's pairs, and the first env with the market's hidden layers."""
    wide = pairs()[0]["env"]
    return *pairs(), {"env": wide, "network": Network(wide.width, ((256, 128, 64, wide.actions),))}


def _work(name):
    return lambda sizes, params: work_of(sizes, params)[name]


@op(
    # What verifies allows is worked out element by element; this is the share of the largest.
    error=lambda network, **_: 64 * network.inputs,
    changes=("parameters", "target", "m", "v", "step"),
    sizes=lambda params, sizes: _sizes(params, sizes),
    scratch={name: (dtype, _work(name)) for name, dtype in WORK.items()},
    bench=("M=1 B=8192 R=1000000", "M=8 B=8192 R=1000000"),
    flops=lambda M, B, P, **_: 10 * M * B * P,
    examples=examples,
)
def dqn_update(
    parameters: F32[P],
    target: F32[P],
    m: F32[P],
    v: F32[P],
    step: I32[1],
    state_floats: F32[M, B, F],
    state_ints: I32[M, B, G],
    action: I32[M, B],
    reward: F32[M, B],
    discount: F32[M, B],
    next_floats: F32[M, B, F],
    next_ints: I32[M, B, G],
    weight: F32[M, B] | None = None,
    table: REAL[R, I] | None = None,
    series: F32[S, R] | None = None,
    *,
    env: Static(Env, lambda: [p["env"] for p in examples()]),
    network: Static(Network, lambda: [p["network"] for p in examples()]),
    lr: Float(0, above=True),
    double: FLAG = True,
    delta: Float(0) = 1.0,
    tau: Float(0, 1, above=True) = 0.005,
    target_every: Int(1) = 1,
    beta1: Float(0, BELOW_ONE) = 0.9,
    beta2: Float(0, BELOW_ONE) = 0.999,
    eps: Float(0, above=True) = 1e-8,
    max_norm: Float(0) = 0.0,
    precision: Choice("float32", "bfloat16") = "float32",
    accumulate: Int(1, 1024) = 1,
) -> Outputs(gradient=F32[P], error=F32[M, B], statistics=F32[M, 4], norm=F32[M]):
    """Updates of action values, one for each minibatch of windows: (double) DQN's loss and Adam.

    For each minibatch, one after another, with Q by `parameters` and Q' by `target`:

        best     = argmax_a Q(next, a), or argmax_a Q'(next, a) where not double
        goal     = reward + discount * Q'(next, best)             reward where discount is 0
        error    = Q(state, action) - goal
        loss     = mean(weight * huber(error, delta))             error^2 / 2 where delta is 0
        norm     = adam(parameters, gradient of the loss, m, v, step)
        target  += tau * (parameters - target)                    after every target_every-th step

    A network with one output more than env.actions gives advantages A and then a value V, of which
    Q(a) = V + A(a) - mean(A).

    Rounded as `ppo_update` rounds: in bfloat16 weights, observations, activations and gradients by
    them are rounded as factors of products, sums are float32. On a GPU and in bfloat16 the gradient
    of each tile of 16 to 64 rows is rounded once more, by at most 2^-9 of itself. The same call
    gives the same bits; rows of a tile follow from the device. Where the GPU's warpgroups multiply
    (sm_90a) and a block holds the network, all updates are one launch, and an SM that has several
    tiles of a minibatch adds them up in bfloat16, each sum rounded the same; else each is three.

    Changes: parameters, target, m, v, step; nothing where the loss of a row is not finite, as the norm
        then is not either.

    Args:
        parameters: of the network, flat; the float32 master copy.
        target: those the goals are worked out with.
        m, v: Adam's running means of the gradient and of its square, zeros at first.
        step: updates done so far; target_every counts by it.
        state_floats, state_ints: the state each action was taken in.
        action: in [0, env.actions).
        reward: of the window, discounted, without the bootstrap, as `replay_gather` gives it.
        discount: what the value of the next state counts for, in [0, 1].
        next_floats, next_ints: the state to bootstrap from.
        weight: of each row in the loss, 0 or more; all 1 when left out.
        table: rows of env.width columns in the precision; left out where the env has none.
        series: what the env's functions read; left out where env.series is empty.
        env: the environment.
        network: reads env.width columns; its heads hold action values, or advantages and a value.
        lr: learning rate, in parameter units a step, above 0.
        double: choose the next action by the parameters rather than by the target.
        delta: error where the loss turns linear, in the reward's unit; 0 for a loss that never does.
        tau: share of the way that the target goes, in (0, 1]; 1 copies the parameters.
        target_every: updates between two moves of the target.
        beta1: decay of m per step, in [0, 0.999999].
        beta2: decay of v per step, in [0, 0.999999].
        eps: added to the root of v, in gradient units, above 0.
        max_norm: largest norm a gradient is let through with; 0 is no clipping.
        precision: "float32" computes exactly; "bfloat16" on tensor cores, accumulating in float32.
        accumulate: parts of a minibatch whose gradients are added up one after another, as in
            `ppo_update`: less working memory, the same bits.

    Returns:
        gradient: of the last minibatch's loss by the parameters, before clipping; gaps zero.
        error: of each row, in the reward's unit; its size is what `priority_update` takes.
        statistics: of each minibatch: loss, mean of Q(state, action), mean of the goal, and rows
            whose loss is not finite.
        norm: of each minibatch's gradient.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: a network that is not the env's; shapes that disagree; table or series missing,
            or given and not read; on the CPU, an action out of range; on a GPU, a network whose
            activations do not fit its shared memory.

    Source: Mnih et al. 2015 (doi:10.1038/nature14236); van Hasselt et al. 2016, eq. 4
    (arXiv:1509.06461); Wang et al. 2016, eq. 9 (arXiv:1511.06581); soft moves of the target,
    Lillicrap et al. 2016 (arXiv:1509.02971); Kingma & Ba 2015 (arXiv:1412.6980).
    """
    about, errors, statistics, norms = (env, precision), [], [], []
    for k in range(len(action)):
        rows = np.arange(len(action[k]))
        x = observed(state_floats[k], state_ints[k], table, series, None, *about)
        x_next = observed(next_floats[k], next_ints[k], table, series, None, *about)
        sources, y = forward(x, parameters, network, precision)
        online, held = (
            spec_values(forward(x_next, p, network, precision)[1], env, network)
            for p in (parameters, target)
        )
        best = (online if double else held).argmax(1) if len(rows) else rows
        goal = reward[k] + discount[k] * held[rows, best]
        goal = np.where(discount[k] == 0, reward[k], goal)
        value = spec_values(y, env, network)[rows, action[k]]
        error, share = value - goal, 1 / max(len(rows), 1)
        scale = np.ones(len(rows)) if weight is None else weight[k]
        size = np.abs(error)
        loss = scale * error**2 / 2
        by_value = scale * error * share
        if delta > 0:
            loss = np.where(size <= delta, loss, scale * delta * (size - delta / 2))
            by_value = scale * np.clip(error, -delta, delta) * share
        by_value = np.where(np.isfinite(loss), by_value, np.nan)
        grad_y = np.zeros_like(y)
        grad_y[rows, action[k]] = by_value
        if duels(env, network):
            grad_y[:, : env.actions] -= by_value[:, None] / env.actions
            grad_y[:, env.actions] = by_value
        gradient = backward(sources, grad_y, parameters, network, precision)
        rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "max_norm": max_norm}
        norm = adam.spec(parameters, gradient, m, v, step, **rates)
        if np.isfinite(norm[0]) and step[0] % target_every == 0:
            target[:] = target + tau * (parameters - target)
        means = [part.sum() * share for part in (loss, value, goal)]
        errors.append(error)
        statistics.append([*means, (~np.isfinite(loss)).sum()])
        norms.append(norm[0])
    return gradient, np.array(errors), np.array(statistics), np.array(norms)


def spec_values(y, env, network):
    """Action values [B, A] of output rows."""
    values = y[:, : env.actions]
    if duels(env, network):
        values = values + y[:, env.actions :][:, :1] - values.mean(1, keepdims=True)
    return values


def _sizes(params, sizes):
    env, network = params["env"], params["network"]
    require_values(env, network)
    known = {I: env.width, P: network.parameters, M: max(sizes[M], 1)}
    return env_sizes(env, sizes) | known


@dqn_update.draws
def _draw(rng, sizes, params):
    env, network, rows = params["env"], params["network"], sizes[R]
    shape = sizes[M], sizes[B]
    return {
        "parameters": draw_parameters(rng, network),
        "target": draw_parameters(rng, network),
        "m": 0.1 * rng.normal(size=sizes[P]),
        "v": 0.1 * rng.normal(size=sizes[P]) ** 2,
        "step": rng.integers(0, 70, 1),
        "state_ints": rng.integers(rows, size=(*shape, sizes[G])),
        "next_ints": rng.integers(rows, size=(*shape, sizes[G])),
        "action": rng.integers(env.actions, size=shape),
        "discount": rng.choice((0.0, 0.99, 0.97), size=shape),
        "weight": rng.uniform(0.1, 1, shape) if rng.random() < 0.5 else None,
        "table": rng.normal(size=(rows, env.width)) if env.table_columns else None,
        **draw_series(rng, sizes, env),
    }


@dqn_update.checks
def _check(action, step, env, **_):
    wrong = np.argwhere((action < 0) | (action >= env.actions))
    if len(wrong):
        k, b = wrong[0]
        raise ValueError(f"action[{k}, {b}] must be in [0, {env.actions}), got {action[k, b]}")
    if step[0] < 0:
        raise ValueError(f"step must be 0 or more, the updates done so far, got {step[0]}")


dqn_update.verifies(functools.partial(verify_update, dqn_update.spec))


@njit
def _loss(y, y_next, chooser, action, reward, discount, weight, actions, duel, delta, *outputs):
    grad_y, error, statistics = outputs
    rows, total, values, goals, wrong = len(action), f32(0), f32(0), f32(0), f32(0)
    share = f32(1) / f32(max(rows, 1))
    for b in range(rows):
        best = best_action(chooser, b, actions)
        goal = reward[b]
        if discount[b] != f32(0):
            held = y_next[b, best] + value_offset(y_next, b, actions, duel)
            goal = goal + discount[b] * held
        value = y[b, action[b]] + value_offset(y, b, actions, duel)
        off, scale = value - goal, weight[b] if len(weight) else f32(1)
        loss = huber_loss_of(off, delta) if delta > f32(0) else f32(0.5) * off * off
        loss = scale * loss
        slope = scale * (huber_gradient_of(off, delta) if delta > f32(0) else off) * share
        # Huber's slope is finite even where the error is not: NaN reaches the norm.
        finite = loss - loss == f32(0)
        slope = slope if finite else NAN
        error[b] = off
        grad_y[b] = f32(0)
        if duel:
            grad_y[b, :actions] = -(slope / f32(actions))
            grad_y[b, actions] = slope
        grad_y[b, action[b]] += slope
        total, values, goals = total + loss, values + value, goals + goal
        wrong += f32(0) if finite else f32(1)
    count = f32(max(rows, 1))
    statistics[:] = total / count, values / count, goals / count, wrong


@njit
def _move(parameters, target, tau):
    for i in range(len(target)):
        # Select, not multiply: a copy is exact.
        far = target[i] + tau * (parameters[i] - target[i])
        target[i] = parameters[i] if tau == f32(1) else far


@dqn_update.on_cpu
def _cpu(parameters, target, m, v, step, *rest):
    state_floats, state_ints, action, reward, discount, next_floats, next_ints, weight = rest[:8]
    table, series, env, network, lr, double, delta, tau, target_every = rest[8:17]
    *moving, precision, _, gradient, error, statistics, norm = rest[17 : 17 + 10]
    rows = action.shape[1]
    x, hidden = (np.empty((rows, n), precision) for n in (env.width, network.hidden))
    y, online, held, grad_y = (np.empty((rows, network.outputs), f32) for _ in range(4))

    def values(floats, ints, learned, into):
        observe.cpu(floats, ints, table, series, None, env, precision, x)
        mlp_forward.cpu(x, learned, network, into, hidden)

    for k in range(len(action)):
        values(next_floats[k], next_ints[k], target, held)
        if double:
            values(next_floats[k], next_ints[k], parameters, online)
        values(state_floats[k], state_ints[k], parameters, y)
        weights = np.empty(0, f32) if weight is None else weight[k]
        given = action[k], reward[k], discount[k], weights
        about = i32(env.actions), duels(env, network), delta
        outputs = grad_y, error[k], statistics[k]
        _loss(y, held, online if double else held, *given, *about, *outputs)
        mlp_backward.cpu(x, hidden, grad_y, parameters, network, gradient, None, None)
        limits = i32(0), i32(1), norm[k : k + 1], None, None
        adam.cpu(parameters, gradient, m, v, step, lr, *moving, *limits)
        if np.isfinite(norm[k]) and step[0] % target_every == 0:
            _move(parameters, target, tau)


dqn_update.on_cuda(launch_updates)
