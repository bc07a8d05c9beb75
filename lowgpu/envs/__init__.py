"""Environments by name."""

from lowgpu.envs.acrobot import acrobot
from lowgpu.envs.cartpole import cartpole
from lowgpu.envs.check import EnvError, check_env
from lowgpu.envs.market import market
from lowgpu.envs.mountain_car import mountain_car

__all__ = [
    "ENVS",
    "EnvError",
    "acrobot",
    "cartpole",
    "check_env",
    "make",
    "market",
    "mountain_car",
]

ENVS = {
    "acrobot": acrobot,
    "cartpole": cartpole,
    "market": market,
    "mountain_car": mountain_car,
}


def make(name, **options):
    """The environment of this name, with its options.

    Args:
        name: a key of ENVS.
        options: keyword arguments of that environment's function.

    Returns:
        An Env; equal arguments give the same one.

    Raises:
        TypeError: an option the environment does not have.
        ValueError: a name that is not known, or an option out of range.
    """
    if name not in ENVS:
        raise ValueError(f"name must be one of {', '.join(sorted(ENVS))}, got {name!r}")
    return ENVS[name](**options)
