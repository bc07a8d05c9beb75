"""The other side of every speed claim: the same work in JAX and in PyTorch.

`from bench import peers` is cheap: `peers.ppo_jax` and the rest are imported, and with them `jax`
or `torch`, when first named. A peer's `.warm()` compiles or captures it, one or more calls do the
work, and its sizes are plain attributes.

    JAX      ppo_jax.PPO  dqn_jax.DQN  gae_jax.GAE
             A call runs the work and blocks until the device has finished: use the wall clock.
    PyTorch  gae_torch.GAE  mlp_torch.MLP  updates_torch.PPOUpdate  updates_torch.DQNUpdate
             per_torch.PrioritizedReplay  int8_torch.Gemm  int8_torch.MLP  tft_torch.TFT
             tft_lean_torch.TFT  ceilings_torch.Copy  ceilings_torch.Gemm
             `run()` queues the work on torch's current stream and returns: use the event clock, or
             `block()` after it.

A module's `VARIANTS` names ways to run the same work: keyword arguments for its peers. "original"
is the default, and the form whose figures stand in the table of numbers to beat. The others should
be faster for the reason their docstring gives; whether they are is for a GPU to say. Run them all
and take the fastest as the peer.
"""

import importlib
import os

# XLA would otherwise take three quarters of the device at its first use, and our side and torch
# share the process. It is read when jax first reaches the device, so it is set before any import.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

MODULES = (
    "ceilings_torch",
    "dqn_jax",
    "gae_jax",
    "gae_torch",
    "int8_torch",
    "mlp_torch",
    "per_torch",
    "ppo_jax",
    "tft_lean_torch",
    "tft_torch",
    "updates_torch",
    "workload",
)


def repeated(make, calls=1):
    """A side of a comparison: () -> a callable that does a peer's work and waits for it.

    Args:
        make: () -> a PyTorch peer; it is warmed when the side is made.
        calls: runs of the peer in one call.
    """

    def ready():
        peer = make()
        peer.warm()

        def run():
            for _ in range(calls):
                peer.run()
            peer.block()

        return run

    return ready


def __getattr__(name):
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
