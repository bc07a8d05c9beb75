"""Training on a GPU: repeatable bit for bit, and the same policy as on the CPU in float32."""

import numpy as np
import pytest

from lowgpu.config import PRESETS, from_dict, merge
from lowgpu.envs import make
from lowgpu.ppo import PPO

pytestmark = pytest.mark.gpu


def cartpole(kind, seed=3, precision="float32"):
    settings = merge(PRESETS["cartpole", kind], {"ppo": {"seed": seed, "precision": precision}})
    return PPO(from_dict(settings).ppo, make("cartpole", limit_terminates=True), kind=kind)


def market(envs=256, precision="bfloat16"):
    rng = np.random.default_rng(0)
    rows = 5_000
    table = np.zeros((rows, 56), "f4")
    table[:, :51] = rng.normal(size=(rows, 51))
    price = np.exp(np.cumsum(1e-3 * rng.normal(size=rows))).astype("f4")
    last = np.zeros(rows, "f4")
    last[[999, rows - 1]] = 1
    ppo = {"envs": envs, "rollout_steps": 32, "minibatches": 8, "precision": precision}
    config = from_dict(merge(PRESETS["market", "cuda"], {"ppo": ppo}))
    return PPO(config.ppo, make("market", episode=50), table, np.stack([price, last]), kind="cuda")


def after(trainer, iterations):
    for _ in range(iterations):
        trainer.advance()
    trainer.drain()
    return trainer.state()[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "maker", [lambda p: cartpole("cuda", precision=p), lambda p: market(precision=p)]
)
def test_the_same_seed_gives_the_same_parameters_bit_for_bit(maker, precision):
    first, second = (after(maker(precision), 20) for _ in range(2))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def test_another_seed_gives_other_parameters():
    first, second = (after(cartpole("cuda", seed=s), 2) for s in (1, 2))
    assert not np.array_equal(first["parameters"], second["parameters"])


def test_a_replay_draws_new_numbers():
    trainer = cartpole("cuda")
    seen = []
    for _ in range(4):
        after(trainer, 1)
        seen.append(trainer.buffers.action.get().tobytes())
    assert len(set(seen)) == 4


def test_resuming_is_bit_for_bit():
    whole = after(cartpole("cuda"), 20)
    half = cartpole("cuda")
    after(half, 10)
    arrays, document = half.state()
    other = cartpole("cuda")
    other.restore(arrays, document)
    resumed = after(other, 10)
    for name in whole:
        assert whole[name].tobytes() == resumed[name].tobytes(), name


def test_the_cpu_and_the_gpu_take_the_same_actions_for_200_steps_of_each_env():
    """Two iterations of 128 steps, an update between them: float32 on both."""
    on_cpu, on_gpu = cartpole("cpu"), cartpole("cuda")
    taken = 0
    while taken < 200:
        after(on_cpu, 1), after(on_gpu, 1)
        want, got = on_cpu.buffers.action, on_gpu.buffers.action.get()
        upto = min(len(want), 200 - taken)
        np.testing.assert_array_equal(got[:upto], want[:upto])
        taken += upto


def test_a_thousand_iterations_of_a_graph_keep_device_memory_where_it_is():
    import cupy

    trainer = market()
    after(trainer, 2)
    before = cupy.cuda.runtime.memGetInfo()[0]
    after(trainer, 1000)
    assert cupy.cuda.runtime.memGetInfo()[0] == before
