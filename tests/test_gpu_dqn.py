"""DQN on a GPU: repeatable bit for bit, resumed bit for bit, and as on the CPU in float32."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from bench import dqn as bench
from lowgpu.config import DQNConfig, from_dict, merge, preset_of
from lowgpu.dqn import DQN
from lowgpu.dqn_plan import plan_of
from lowgpu.envs import make
from lowgpu.pools import allocate
from lowgpu_kernels.ops.dqn import dqn_rounds_launch

pytestmark = pytest.mark.gpu

SMALL = {"learning_starts": 300, "rounds": 20, "capacity": 1000}
EVERYTHING = {
    "updates": 2,
    "target_every": 0,
    "tau": 0.05,
    "n_steps": 3,
    "double": True,
    "dueling": True,
    "huber": 1.0,
    "prioritized": True,
}


def cartpole(kind="cuda", **changes):
    return DQN(DQNConfig(**{"seed": 3} | SMALL | changes), make("cartpole"), kind=kind)


def market(precision="bfloat16", **changes):
    rng = np.random.default_rng(0)
    rows = 5_000
    table = np.zeros((rows, 56), "f4")
    table[:, :51] = rng.normal(size=(rows, 51))
    price = np.exp(np.cumsum(1e-3 * rng.normal(size=rows))).astype("f4")
    last = np.zeros(rows, "f4")
    last[[999, rows - 1]] = 1
    small = {"envs": 256, "train_every": 256, "capacity": 2**14, "batch": 512, "updates": 4}
    small |= {"learning_starts": 2048, "rounds": 4, "precision": precision}
    config = from_dict(merge(preset_of("market", "dqn", "cuda"), {"dqn": small | changes}))
    return DQN(config.dqn, make("market", episode=50), table, np.stack([price, last]), kind="cuda")


def after(trainer, iterations):
    for _ in range(iterations):
        trainer.advance()
    trainer.drain()
    return trainer.state()[0]


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes(), name


MAKERS = pytest.mark.parametrize(
    "maker",
    [
        cartpole,
        lambda: cartpole(**EVERYTHING),
        lambda: cartpole(precision="bfloat16"),
        market,
        lambda: market(prioritized=True, dueling=True),
        lambda: market(precision="float32"),
    ],
    ids=["plain", "everything", "bfloat16", "market", "prioritized", "float32"],
)


@MAKERS
def test_the_same_seed_gives_the_same_bits(maker):
    first, second = (after(maker(), 10) for _ in range(2))
    assert first["step"][0] > 0
    same(second, first)


@MAKERS
def test_replayed_graphs_do_what_single_calls_do(maker):
    replayed, single = maker(), maker()
    there = after(replayed, 6)
    with single.queue.running():
        for iteration in range(6):
            single._iterate(single._warm_of(iteration))
    same(single.state()[0], there)


@MAKERS
def test_resuming_is_bit_for_bit(maker):
    whole = after(maker(), 10)
    half, other = maker(), maker()
    after(half, 5)
    arrays, document = half.state()
    other.restore(arrays, document)
    same(after(other, 5), whole)


def test_500_updates_from_one_seed_give_the_same_bits_twice():
    first, second = (cartpole(learning_starts=0) for _ in range(2))
    same(after(second, 25), after(first, 25))
    assert first.state()[0]["step"][0] == 500


def test_a_replay_draws_new_numbers():
    trainer, seen = market(), []
    for _ in range(4):
        after(trainer, 1)
        seen.append(trainer.buffers.kept_mark.get().tobytes())
    assert len(set(seen)) == 4


def test_the_cpu_and_the_gpu_take_the_same_actions_for_200_steps():
    on_cpu, on_gpu = (after(cartpole(kind), 1) for kind in ("cpu", "cuda"))
    np.testing.assert_array_equal(on_gpu["kept_mark"][:200], on_cpu["kept_mark"][:200])


@pytest.mark.parametrize("changes", [{}, {"prioritized": True}], ids=["uniform", "prioritized"])
def test_a_thousand_iterations_keep_device_memory_where_it_is(changes):
    import cupy

    trainer = market(**changes)
    after(trainer, 1)
    before = cupy.cuda.runtime.memGetInfo()[0]
    after(trainer, 1000)
    assert cupy.cuda.runtime.memGetInfo()[0] == before


def test_the_plan_is_what_is_allocated():
    import cupy

    settings = dataclasses.replace(market().config, capacity=2**22)
    plan = plan_of(settings, make("market"), 5_000, "cuda")
    free, _ = cupy.cuda.runtime.memGetInfo()
    arrays = allocate(plan, "cuda")
    taken = free - cupy.cuda.runtime.memGetInfo()[0]
    assert arrays.slab.nbytes == plan.nbytes
    assert taken <= max(1.1 * plan.nbytes, 4 << 20)


ROUNDS = pytest.mark.parametrize(
    "envs, batch, updates", [(256, 230, 1), (100, 129, 3), (4096, 8192, 2), (20_000, 20_000, 1)]
)


def rounds_of(envs, batch, updates, rounds, calls):
    training = bench.Training.on_gpu(envs, batch, updates, rounds)
    for _ in range(calls):
        training.iterations()
    training.wait()
    return {n: a.get() for n, a in training.buffers.items()}


@ROUNDS
def test_rounds_of_one_launch_are_launches_of_a_round_and_the_ops_in_turn(envs, batch, updates):
    shape = envs, batch, updates
    whole = rounds_of(*shape, rounds=6, calls=1)
    assert whole["step"][0] == 6 * updates and not whole["head"][2]
    same(rounds_of(*shape, rounds=6, calls=1), whole)
    same(rounds_of(*shape, rounds=1, calls=6), whole)
    with mock.patch.object(dqn_rounds_launch, "_grid_of", lambda _: None):
        apart = rounds_of(*shape, rounds=6, calls=1)
    same(apart, whole)
