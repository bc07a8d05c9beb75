"""Environments by name."""

from lowgpu.envs.cartpole import cartpole
from lowgpu.envs.check import EnvError, check_env
from lowgpu.envs.market import market

__all__ = ["ENVS", "EnvError", "cartpole", "check_env", "make", "market"]

ENVS = {"cartpole": cartpole, "market": market}


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
