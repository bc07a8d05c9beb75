"""The first parameters of a policy, the same bits for every device."""

import math

import numpy as np

from lowgpu_kernels.ops.mlp.network import Network, policy_network

HEAD_GAIN, VALUE_GAIN = 0.01, 1.0


def network_of(config, env):
    """The policy and value network of a PPOConfig for an Env."""
    return policy_network(
        env.width, env.actions, config.hidden, activation=config.activation, shared=config.shared
    )


def initial_parameters(network, env, seed):
    """Parameters to start from: orthogonal weights, zero biases.

        gain = sqrt(2) in hidden layers, 0.01 for logits, 1 for the value

    Weights of padding columns of the observation are zero. Made by NumPy on the CPU, so a seed
    gives the same bits for every device.

    Args:
        network: a policy network for `env`.
        env: the Env, for its unpadded widths.
        seed: any non-negative integer.

    Returns:
        float32 [P].

    Source: Saxe et al. 2014 (arXiv:1312.6120); gains of CleanRL's ppo.py.
    """
    rng = np.random.default_rng(seed)
    parameters = np.zeros(network.parameters, np.float32)
    outputs = 0  # heads stand side by side: the logits, then the value
    for layer, weight, _ in network.views(parameters):
        fan_in = env.observation if layer.source < 0 else layer.fan_in
        if not layer.head:
            weight[:, :fan_in] = _orthogonal(rng, layer.fan_out, fan_in, math.sqrt(2))
            continue
        logits = max(min(env.actions - outputs, layer.fan_out), 0)
        weight[:logits, :fan_in] = _orthogonal(rng, logits, fan_in, HEAD_GAIN)
        weight[logits:, :fan_in] = _orthogonal(rng, layer.fan_out - logits, fan_in, VALUE_GAIN)
        outputs += layer.fan_out
    return parameters


def values_network_of(config, env):
    """The network of action values of a DQNConfig for an Env.

    One trunk; its head holds a value an action, or as many advantages and then the state's value.
    Hidden widths are rounded up to multiples of 8.
    """
    hidden = (-(-width // 8) * 8 for width in config.hidden)
    head = env.actions + config.dueling
    return Network(env.width, ((*hidden, head),), config.activation)


def initial_values(config, env):
    """Parameters of action values to start from: uniform weights and biases.

        weight, bias ~ U(-1 / sqrt(fan_in), 1 / sqrt(fan_in))

    Units that round a hidden width up to a multiple of 8, and padding columns of the observation,
    have zeros: nothing reaches them, so no update changes them. Made by NumPy on the CPU, so a seed
    gives the same bits for every device.

    Args:
        config: a DQNConfig.
        env: the Env.

    Returns:
        float32 [P].

    Source: PyTorch's torch.nn.Linear, which CleanRL's dqn.py starts from.
    """
    network, rng = values_network_of(config, env), np.random.default_rng(config.seed)
    parameters = np.zeros(network.parameters, np.float32)
    widths = (env.observation, *config.hidden, env.actions + config.dueling)
    for fan_in, fan_out, (_, weight, bias) in zip(
        widths[:-1], widths[1:], network.views(parameters), strict=True
    ):
        most = 1 / math.sqrt(fan_in)
        weight[:fan_out, :fan_in] = rng.uniform(-most, most, (fan_out, fan_in))
        bias[:fan_out] = rng.uniform(-most, most, fan_out)
    return parameters


def _orthogonal(rng, rows, columns, gain):
    if not rows:
        return np.zeros((0, columns))
    normal = rng.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))
    return gain * (q if rows >= columns else q.T)
