"""The market workload every peer runs: same table, environment, network and PPO and DQN settings.

Table        rows x 51 float32 features ~ N(0, 1), and a price walk:
             price[t + 1] = price[t] * exp(1e-3 * N(0, 1)).
State        per env: row t, position in {-1, 0, 1}, entry price, step in the episode.
Observation  54 = 51 market features of row t, then position, unrealised return since entry and
             step / EPISODE; zero-padded to 56.
Action       0 short, 1 flat, 2 long: the target position.
Reward       (position * (price[t + 1] / price[t] - 1) - COST * |change of position|)
             * REWARD_SCALE, with the position just chosen.
Episode      EPISODE steps, then a random row and a flat position. Its end is a termination.
Network      56 -> 256 -> 128 -> 64 with ReLU, one trunk; 3 logits (or action values) and 1 value,
             padded to 8 outputs.
"""

from itertools import pairwise

import numpy as np

FEATURES = 51
PORTFOLIO = 3
STATE = FEATURES + PORTFOLIO
PADDED = 56

HIDDEN = (256, 128, 64)
ACTIONS = 3
OUTPUTS = 8
LAYERS = (PADDED, *HIDDEN, OUTPUTS)
FLOPS_FORWARD = 2 * sum(i * o for i, o in pairwise(LAYERS))

EPISODE = 512
COST = 1e-4
REWARD_SCALE = 100.0

PPO = {
    "gamma": 0.99,
    "lam": 0.95,
    "clip": 0.2,
    "entropy": 0.01,
    "value": 0.5,
    "lr": 3e-4,
    "max_grad_norm": 0.5,
    "adam_eps": 1e-5,
    "epochs": 4,
}
DQN = {
    "gamma": 0.99,
    "lr": 1e-4,
    "tau": 0.005,
    "huber": 1.0,
    "adam_eps": 1e-8,
    "exploration": 0.05,
    "double": True,
}


def table(rows=1_000_000, seed=0):
    """The market table: `features` float32 [rows, 51] and `price` float32 [rows]."""
    random = np.random.default_rng(seed)
    features = random.standard_normal((rows, FEATURES), dtype=np.float32)
    price = np.exp(np.cumsum(1e-3 * random.standard_normal(rows))).astype(np.float32)
    return features, price
