"""Settings by environment, trainer and device, under what a user gives."""

_PPO_MARKET = {"gamma": 0.99, "lr": 3e-4, "activation": "relu", "shared": True}
_DQN_MARKET = {"lr": 1e-4, "double": True, "huber": 1.0, "target_every": 0, "tau": 0.005}

# PPO's, by environment and device. CartPole's are CleanRL's ppo.py on both devices; the market has
# a small and a large size.
PRESETS = {
    ("cartpole", "cpu"): {"cartpole": {"limit_terminates": True}},
    ("cartpole", "cuda"): {"cartpole": {"limit_terminates": True}},
    ("market", "cpu"): {
        "ppo": _PPO_MARKET
        | {"total_steps": 500_000, "envs": 16, "rollout_steps": 128, "hidden": [64, 64]}
    },
    ("market", "cuda"): {
        "ppo": _PPO_MARKET
        | {
            "total_steps": 50_000_000,
            "envs": 4096,
            "rollout_steps": 64,
            "minibatches": 32,
            "hidden": [256, 128, 64],
            "precision": "bfloat16",
        }
    },
}

# DQN's. The defaults are CleanRL's dqn.py, which CartPole and Acrobot take as they are on both
# devices; it bootstraps where a limit ends an episode.
DQN_PRESETS = {
    ("market", "cpu"): {
        "dqn": _DQN_MARKET
        | {
            "envs": 16,
            "capacity": 131_072,
            "learning_starts": 8192,
            "train_every": 64,
            "rounds": 32,
            "epsilon_steps": 100_000,
            "hidden": [64, 64],
        }
    },
    ("market", "cuda"): {
        "dqn": _DQN_MARKET
        | {
            "total_steps": 50_000_000,
            "envs": 4096,
            "capacity": 2**20,
            "batch": 8192,
            "learning_starts": 2**17,
            "train_every": 4096,
            "updates": 8,
            "rounds": 16,
            "epsilon_steps": 5_000_000,
            "hidden": [256, 128, 64],
            "precision": "bfloat16",
        }
    },
}


def preset_of(env, algo, kind):
    """The settings that a run starts from, as nested dictionaries; {} where there are none.

    Args:
        env, algo: as a Config names them.
        kind: "cpu" or "cuda".
    """
    return {"ppo": PRESETS, "dqn": DQN_PRESETS}.get(algo, {}).get((env, kind), {})
