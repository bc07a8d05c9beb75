"""PPO updates: from states and parameters to changed parameters, all minibatches in one call."""

import numpy as np

from lowgpu_kernels.device import i32
from lowgpu_kernels.dims import (
    F32,
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
    N,
    Outputs,
    P,
    R,
    S,
    Static,
)
from lowgpu_kernels.env import Env
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.mlp_backward import mlp_backward
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.mlp.rounding import SUM, assert_within
from lowgpu_kernels.ops.optim.adam import BELOW_ONE, adam
from lowgpu_kernels.ops.ppo.deviations import loss_deviations, update_deviations
from lowgpu_kernels.ops.ppo.ppo_loss import check_taken, draw_taken, ppo_loss
from lowgpu_kernels.ops.ppo.spec_network import backward, forward, observed
from lowgpu_kernels.ops.ppo.update_launch import WORK, launch_updates, work_of
from lowgpu_kernels.ops.rollout.observe import observe
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes
from lowgpu_kernels.ops.rollout.rollout import pairs, require_policy


def examples():
    """The rollout's pairs, and the first env with the market's hidden layers."""
    wide = pairs()[0]["env"]
    return *pairs(), {"env": wide, "network": policy_network(wide.width, wide.actions)}


def _work(name):
    return lambda sizes, params: work_of(sizes, params)[name]


@op(
    # Worked out element by element in deviations.py; this is the share of the largest.
    error=lambda network, **_: 64 * network.inputs,
    changes=("parameters", "m", "v", "step"),
    sizes=lambda params, sizes: _sizes(params, sizes),
    scratch={name: (dtype, _work(name)) for name, dtype in WORK.items()},
    bench=("N=131072 M=1 B=2048 R=1000000", "N=1048576 M=8 B=8192 R=1000000"),
    flops=lambda M, B, P, **_: 6 * M * B * P,
    examples=examples,
)
def ppo_update(
    parameters: F32[P],
    m: F32[P],
    v: F32[P],
    step: I32[1],
    state_floats: F32[N, F],
    state_ints: I32[N, G],
    table: REAL[R, I] | None,
    series: F32[S, R] | None,
    index: I32[M, B],
    action: I32[N],
    log_probability: F32[N],
    value: F32[N],
    advantage: F32[N],
    returns: F32[N],
    moments: F32[M, 2] | None = None,
    *,
    env: Static(Env, lambda: [p["env"] for p in examples()]),
    network: Static(Network, lambda: [p["network"] for p in examples()]),
    lr: Float(0, above=True),
    clip: Float(0, 10, above=True) = 0.2,
    value_clip: Float(0) = 0.2,
    value_weight: Float(0) = 0.5,
    entropy_weight: Float(0) = 0.01,
    beta1: Float(0, BELOW_ONE) = 0.9,
    beta2: Float(0, BELOW_ONE) = 0.999,
    eps: Float(0, above=True) = 1e-8,
    max_norm: Float(0) = 0.0,
    decay_updates: Int(0) = 0,
    decay_every: Int(1) = 1,
    precision: Choice("float32", "bfloat16") = "float32",
    accumulate: Int(1, 1024) = 1,
) -> Outputs(gradient=F32[P], statistics=F32[M, 8], norm=F32[M]):
    """Updates of a policy's parameters, one for each minibatch of a rollout: clipped PPO loss and Adam.

    For each row of index and of moments, one after another:

        x          = observe(state_floats, state_ints, table, series, index)
        y          = mlp_forward(x, parameters)
        grad_y     = ppo_loss(y, index, action, log_probability, value, advantage, returns, moments)
        gradient   = mlp_backward(x, hidden, grad_y, parameters)
        norm       = adam(parameters, gradient, m, v, step)

    with what those ops compute, rounded where they round: in bfloat16 weights, observations,
    activations and gradients by them are rounded as factors of products, sums are float32. On a GPU
    nothing of a row goes through device memory, and in bfloat16 the gradient of each tile of 16 to
    64 rows is rounded once more, by at most 2^-9 of itself, before tiles are added up in float32.
    The same call gives the same bits; rows of a tile follow from the device. Where the GPU's
    warpgroups multiply (sm_90a) and a block holds the network, all updates are one launch, and an
    SM that has several tiles of a minibatch adds them up in bfloat16, each sum rounded the same.

    Changes: parameters, m, v, step; nothing where the norm is not finite.

    Args:
        parameters: of the network, flat; the float32 master copy.
        m, v: Adam's running means of the gradient and of its square, zeros at first.
        step: updates done so far.
        state_floats, state_ints: states of the rollout, one a transition.
        table: rows of env.width columns in the precision; left out where the env has none.
        series: what the env's functions read; left out where env.series is empty.
        index: transition of each row of each minibatch, in [0, N); one minibatch or more.
        action: action taken, in [0, env.actions).
        log_probability: its natural logarithm under the policy that took it.
        value: V(s) of the network that took it, same unit as returns.
        advantage: not normalised, same unit as returns.
        returns: what the value is trained on.
        moments: mean and standard deviation of each minibatch's advantages, to normalise them with.
        env: the environment.
        network: reads env.width columns; its heads hold env.actions logits, then a value.
        lr: learning rate, in parameter units a step, above 0.
        clip: how far the ratio may leave 1 before its gradient stops, in (0, 10].
        value_clip: how far V may leave `value` before its gradient stops; 0 switches this off.
        value_weight: weight of the value loss, 0 or more.
        entropy_weight: weight of the entropy, 0 or more.
        beta1: decay of m per step, in [0, 0.999999].
        beta2: decay of v per step, in [0, 0.999999].
        eps: added to the root of v, in gradient units, above 0.
        max_norm: largest norm a gradient is let through with; 0 is no clipping.
        decay_updates: updates after which the linear schedule reaches 0; 0 is a constant rate.
        decay_every: updates between two changes of the rate.
        precision: "float32" computes exactly; "bfloat16" on tensor cores, accumulating in float32.
        accumulate: parts of a minibatch whose gradients are added up one after another, for less
            working memory: that of a part, and never less than eight tiles'. The bits are those of
            one part. It changes nothing where all updates are one launch, or on the CPU.

    Returns:
        gradient: of the last minibatch's loss by the parameters, before clipping; gaps zero.
        statistics: of each minibatch, in the order of ppo_loss's STATISTICS.
        norm: of each minibatch's gradient.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: a network that is not the env's; shapes that disagree; table or series missing,
            or given and not read; rows of an empty rollout; on the CPU, an index or an action out
            of range; on a GPU, a network whose activations do not fit its shared memory.

    Source: Schulman et al. 2017 (arXiv:1707.06347); Kingma & Ba 2015 (arXiv:1412.6980).
    """
    states = state_floats, state_ints, table, series
    taken = action, log_probability, value, advantage, returns
    statistics, norms = [], []
    for k, rows in enumerate(index):
        gradient, of_minibatch = _gradient(
            parameters,
            (*states, rows),
            (*taken, None if moments is None else moments[k]),
            env=env,
            network=network,
            precision=precision,
            clip=clip,
            value_clip=value_clip,
            value_weight=value_weight,
            entropy_weight=entropy_weight,
        )
        norm = adam.spec(
            parameters,
            gradient,
            m,
            v,
            step,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            max_norm=max_norm,
            decay_updates=decay_updates,
            decay_every=decay_every,
        )
        statistics.append(of_minibatch)
        norms.append(norm[0])
    return gradient, np.array(statistics), np.array(norms)


def _gradient(parameters, states, taken, *, env, network, precision, **weights):
    """Gradient and statistics of the spec."""
    x = observed(*states, env, precision)
    sources, y = forward(x, parameters, network, precision)
    grad_y, statistics = ppo_loss.spec(y, states[-1], *taken, actions=env.actions, **weights)
    return backward(sources, grad_y, parameters, network, precision), statistics


STATES = "state_floats", "state_ints", "table", "series", "index"
TAKEN = "action", "log_probability", "value", "advantage", "returns", "moments"
LOSS = "clip", "value_clip", "value_weight", "entropy_weight"
ADAM = "lr", "beta1", "beta2", "eps", "max_norm", "decay_updates", "decay_every"


def _sizes(params, sizes):
    env, network = params["env"], params["network"]
    require_policy(env, network)
    # Rows can only be taken from a rollout that has some.
    known = {I: env.width, P: network.parameters, N: max(sizes[N], min(sizes[B], 1))}
    known[M] = max(sizes[M], 1)
    return env_sizes(env, sizes) | known


@ppo_update.draws
def _draw(rng, sizes, params):
    env, network, precision = params["env"], params["network"], params["precision"]
    transitions, rows = sizes[N], sizes[R]
    drawn = {
        "parameters": draw_parameters(rng, network),
        "m": 0.1 * rng.normal(size=sizes[P]),
        "v": 0.1 * rng.normal(size=sizes[P]) ** 2,
        "step": rng.integers(0, 70, 1),
        "state_floats": rng.normal(size=(transitions, sizes[F])).astype("f4"),
        "state_ints": rng.integers(rows, size=(transitions, sizes[G])),
        "table": rng.normal(size=(rows, env.width)).astype(precision)
        if env.table_columns
        else None,
        "index": rng.integers(0, max(transitions, 1), (sizes[M], sizes[B])),
        **draw_series(rng, sizes, env),
    }
    wide = [drawn[n] for n in ("state_floats", "state_ints", "table", "series")]
    wide[2] = None if wide[2] is None else wide[2].astype(np.float64)
    x = observed(*wide, np.arange(transitions), env, precision)
    _, y = forward(x, drawn["parameters"].astype(np.float64), network, precision)
    margin = 1e-3 if precision == "float32" else 0.05  # y itself is rounded before the loss
    taken = draw_taken(rng, y[:, : env.actions], y[:, env.actions], params, margin)
    if taken["moments"] is not None:
        taken["moments"] = taken["moments"] * rng.uniform(0.9, 1.1, (sizes[M], 1))
    return drawn | taken


@ppo_update.checks
def _check(index, action, moments, env, step, **_):
    for k, rows in enumerate(index):
        check_taken(rows, action, None if moments is None else moments[k], env.actions)
    if step[0] < 0:
        raise ValueError(f"step must be 0 or more, the updates done so far, got {step[0]}")


@ppo_update.verifies
def _verify(got, inputs, params, _):
    """Hold the first update to the spec, and Adam to what it makes of a lone update's gradient.

    What an update makes of the next is not compared: where v is near zero Adam turns a rounding into
    a whole step. tests/ hold updates of one call to those of many, bit for bit.
    """
    assert_first_update(got, inputs, params)
    assert got["step"][0] == inputs["step"][0] + np.isfinite(got["norm"]).sum()
    if len(inputs["index"]) > 1:
        return
    given = got["gradient"].astype(np.float64)
    wide = [inputs["parameters"], given, inputs["m"], inputs["v"], inputs["step"]]
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a.copy() for a in wide]
    largest = max(1.0, *(np.abs(a).max() for a in wide))
    rates = {n: params[n].item() for n in ADAM}
    norm = adam.spec(*wide, **rates)
    largest = max(largest, *(np.abs(a).max() for a in wide))
    atol = adam.error(P=len(given)) * 2 * SUM * largest
    for name, want in zip(("parameters", "m", "v", "norm"), (wide[0], *wide[2:4], norm)):
        np.testing.assert_allclose(got[name], want, rtol=0, atol=atol, err_msg=name)


def assert_first_update(got, inputs, params):
    """Hold the first update's gradient and statistics to the spec, as far as rounding lets them."""
    wide = {
        n: a if a is None or a.dtype.kind == "i" else a.astype(np.float64)
        for n, a in inputs.items()
    }
    wide |= {n: wide[n] if wide[n] is None else wide[n][0] for n in ("index", "moments")}
    states, taken = ([wide[n] for n in names] for names in (STATES, TAKEN))
    about = {n: params[n] for n in ("env", "network", "precision")}
    weights = {n: params[n].item() for n in LOSS}
    gradient, statistics = _gradient(wide["parameters"], states, taken, **about, **weights)
    x = observed(*states, params["env"], params["precision"])
    _, y = forward(x, wide["parameters"], params["network"], params["precision"])
    grad_y, _ = ppo_loss.spec(y, wide["index"], *taken, actions=params["env"].actions, **weights)

    def through_loss(of_y):
        return loss_deviations(y, of_y, wide, params["env"].actions, **weights)

    of_gradient, of_statistics = update_deviations(
        x, wide["parameters"], params["network"], params["precision"], grad_y, through_loss
    )
    of_statistics += SUM * np.sqrt(1 + len(x)) * (1 + np.abs(statistics))
    assert_within("ppo_update.statistics", got["statistics"][0], statistics, of_statistics)
    if len(inputs["index"]) == 1:
        assert_within("ppo_update.gradient", got["gradient"], gradient, of_gradient)


@ppo_update.on_cpu
def _cpu(parameters, m, v, step, state_floats, state_ints, table, series, index, *rest):
    *taken, moments, env, network, lr, clip, value_clip, value_weight, entropy_weight = rest[:13]
    *moving, precision, _, gradient, statistics, norm = rest[13 : -len(WORK)]
    rows = index.shape[1]
    x, hidden = (np.empty((rows, n), precision) for n in (env.width, network.hidden))
    y, grad_y = (np.empty((rows, network.outputs), np.float32) for _ in range(2))
    weights = clip, value_clip, value_weight, entropy_weight
    for k, of_minibatch in enumerate(index):
        observe.cpu(state_floats, state_ints, table, series, of_minibatch, env, precision, x)
        mlp_forward.cpu(x, parameters, network, y, hidden)
        gains = None if moments is None else moments[k]
        loss = (*taken, gains, i32(env.actions), *weights, grad_y, statistics[k], None)
        ppo_loss.cpu(y, of_minibatch, *loss)
        mlp_backward.cpu(x, hidden, grad_y, parameters, network, gradient, None, None)
        adam.cpu(parameters, gradient, m, v, step, lr, *moving, norm[k : k + 1], None, None)


ppo_update.on_cuda(launch_updates)
