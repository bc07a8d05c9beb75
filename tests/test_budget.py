"""Batch sizes for a machine, memory planned before it is taken, and what happens when it runs out."""

import dataclasses
import json
import subprocess
import sys
import tomllib
import weakref
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lowgpu import budget, checkpoint, outlook, pools
from lowgpu.__main__ import app
from lowgpu.budget import Knee, Trial, halved, hidden_widths, knee, max_hidden_dim_base, tier_batch
from lowgpu.config import PRESETS, ConfigError, DQNConfig, PPOConfig, from_dict, preset_of
from lowgpu.dqn import DQN
from lowgpu.dqn_plan import plan_of as dqn_plan_of
from lowgpu.envs import make
from lowgpu.hardware import Hardware, choose
from lowgpu.machine import HardwareBudget
from lowgpu.pools import Declared, MemoryPlanError, OutOfMemory, Plan, allocate, one_error
from lowgpu.ppo import PPO
from lowgpu.ppo_plan import plan_of
from lowgpu.runs import Task
from lowgpu_kernels import launch
from tests.cards import BY_NAME, CARDS, CONTEXT_NBYTES, Machine

USABLE = [card for card in CARDS if card.capability >= (8, 0)]
MARKET = from_dict(PRESETS["market", "cuda"]).ppo
MARKET_DQN = from_dict(preset_of("market", "dqn", "cuda")).dqn
SMALL = PPOConfig(total_steps=10_000, envs=8, rollout_steps=64, epochs=1, hidden=(8,))
SMALL_DQN = DQNConfig(hidden=(8,), learning_starts=0, rounds=4, envs=2, capacity=1000)
POLE = Task(make("cartpole"))
MB = 2**20


@pytest.fixture(autouse=True)
def one_thread_and_every_gpu_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def table_of(plan_nbytes=1000):
    return Plan({"table": Declared((plan_nbytes,), np.uint8, "", "fewer bars")})


# The tier policy.


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_tier_of_a_card(card):
    assert tier_batch(card.total_nbytes, "dqn") == card.dqn
    assert tier_batch(card.total_nbytes, "ppo") == card.ppo


@pytest.mark.parametrize(
    "gigabytes, dqn, ppo",
    [(4, 230, 64), (24, 2048, 512), (48, 4096, 1024), (80, 8192, 2048), (1, 64, 64)],
)
def test_the_tier_table_is_the_published_one(gigabytes, dqn, ppo):
    assert tier_batch(gigabytes << 30, "dqn") == dqn
    assert tier_batch(gigabytes << 30, "ppo") == ppo


@pytest.mark.parametrize("overhead, right", [(1840, 0), (1855, 1), (2785, 1), (2800, 0)])
def test_the_overheads_that_give_the_table_are_those_that_the_source_names(
    monkeypatch, overhead, right
):
    monkeypatch.setattr(budget, "OVERHEAD_MB", overhead)
    monkeypatch.setattr(budget, "MB_PER_SAMPLE", {"dqn": (4096 - overhead) / 230.001})
    sizes = [tier_batch(gigabytes << 30, "dqn") for gigabytes in (4, 24, 48, 80)]
    assert (sizes == [230, 2048, 4096, 8192]) == right


@given(st.integers(0, 400_000), st.integers(0, 400_000), st.sampled_from(["dqn", "ppo"]))
@example(92160, 95000, "dqn")
def test_more_memory_never_gives_a_smaller_batch(less, more, algo):
    less, more = sorted((less, more))
    small, large = tier_batch(less * MB, algo), tier_batch(more * MB, algo)
    assert 64 <= small <= large <= 8192
    assert all(size <= 256 or size.bit_count() == 1 for size in (small, large))


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="algo must be one of dqn, ppo, got 'sac'"):
        tier_batch(8 << 30, "sac")


# The measured policy.


def measuring(curve, fails=(), peak=lambda size: 0):
    """A measurement by a made-up curve, and the sizes it was asked for."""
    asked = []

    def measure(size):
        asked.append(size)
        if size in fails:
            raise OutOfMemory("memory ran out", table_of())
        rates = curve(size)
        return Trial(tuple(rates) if isinstance(rates, list) else (rates,) * 3, peak(size))

    return measure, asked


SIZES = [64 << k for k in range(8)]  # to 8192


def saturating(size):
    """Half of the top speed at 256; 90 % of what 8192 has is 0.8727, reached at 1758."""
    return size / (size + 256)


@pytest.mark.parametrize(
    "curve, size",
    [
        (saturating, 2048),
        (lambda size: 100.0, 64),  # nothing is gained
        (lambda size: size, 8192),  # everything is
        (lambda size: min(size, 700), 1024),  # a plateau: 512 is 73 % of it
        (lambda size: min(size, 512**2 / size), 512),  # falls off again
        (lambda size: 1 / size, 64),
        # One round of three that went wrong does not count.
        (lambda size: [min(size, 1000), 9e9, min(size, 1000)], 1024),
        (lambda size: [min(size, 1000), 1e-9, min(size, 1000)], 1024),
    ],
)
def test_the_knee_of_a_curve(curve, size):
    measure, asked = measuring(curve)
    assert knee(SIZES, measure).size == size
    assert asked == SIZES


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_five_percent_moves_the_knee_by_one_doubling_at_most(seed):
    rng = np.random.default_rng(seed)
    measure, _ = measuring(lambda s: [saturating(s) * rng.normal(1, 0.05) for _ in range(3)])
    assert knee(SIZES, measure).size in (1024, 2048, 4096)


@given(st.dictionaries(st.integers(1, 10**6), st.floats(1e-3, 1e12), min_size=1))
def test_the_knee_is_the_first_size_within_a_tenth_of_the_best(curve):
    found = knee(curve, measuring(curve.get)[0])
    best = max(curve.values())
    assert curve[found.size] >= 0.9 * best
    assert all(rate < 0.9 * best for size, rate in curve.items() if size < found.size)
    assert found.throughputs == curve and found.refused is None


def test_a_size_that_runs_out_of_memory_ends_the_search():
    measure, asked = measuring(lambda size: size, fails=[1024])
    found = knee(SIZES, measure)
    assert found == Knee(
        512, {64: 64, 128: 128, 256: 256, 512: 512}, "1024 does not fit: memory ran out"
    )
    assert asked == [64, 128, 256, 512, 1024]  # 2048 and more were not tried
    assert str(found).splitlines()[-1] == found.refused


def test_a_size_that_took_more_than_is_free_does_not_fit_though_nothing_failed():
    # 3.46 GiB free and a peak of 4.87 GiB, which Windows lends from the host.
    usable = 0.9 * 3.46 * 2**30
    peak = lambda size: int(4.87 * 2**30) if size >= 512 else 2**30
    measure, asked = measuring(lambda size: size, peak=peak)
    found = knee(SIZES, measure, usable)
    assert found.size == 256 and asked[-1] == 512
    assert found.refused == "512 does not fit: it took 5.2 GB, and 3.3 GB may be used"
    assert knee(SIZES, measure, 5.3e9).size == 8192


def test_where_nothing_fits_there_is_one_error_with_the_plan():
    with pytest.raises(OutOfMemory, match="no batch size fits: 64 does not fit") as refused:
        knee(SIZES, measuring(saturating, fails=[64])[0])
    assert refused.value.plan.nbytes == 1024


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_throughput_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=r"above 0, got .* at 64"):
        knee(SIZES, measuring(lambda size: rate)[0])
    with pytest.raises(ValueError, match="at least one batch size"):
        knee([], None)


PLANS = {"ppo": (plan_of, MARKET), "dqn": (dqn_plan_of, MARKET_DQN)}


# Memory that runs out.


@pytest.mark.parametrize("fits, size", [(1000, 1000), (999, 500), (130, 125), (125, 125)])
def test_a_size_is_halved_until_it_fits(fits, size):
    def attempt(size):
        if size > fits:
            raise OutOfMemory("memory ran out", table_of())
        return f"did {size}"

    assert halved(1000, attempt) == (size, f"did {size}")


@pytest.mark.parametrize(
    "size, smallest, attempted",
    [
        (1024, 1, [1024, 512, 256, 128]),
        (24, 1, [24, 12, 6, 3]),
        (6, 1, [6, 3]),
        (100, 50, [100, 50]),
    ],
)
def test_a_size_is_halved_three_times_at_most(size, smallest, attempted):
    seen = []

    def attempt(size):
        seen.append(size)
        raise OutOfMemory("memory ran out", table_of())

    with pytest.raises(OutOfMemory, match=f"after {len(attempted) - 1} halvings") as refused:
        halved(size, attempt, smallest)
    assert seen == attempted
    assert refused.value.plan.nbytes == 1024
    assert refused.value.__context__ is None  # which would hold the arrays of the attempt


def test_another_error_ends_the_halving():
    def attempt(size):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        halved(64, attempt)


def cramped_kind(base, size_of):
    """A trainer on a device where batches above 128 do not fit, found out late."""

    class Cramped(base):
        made = ()

        def __init__(self, config, *rest):
            assert not any(slab() is not None for slab in Cramped.made), "memory is still held"
            super().__init__(config, *rest)
            Cramped.made = (*Cramped.made, weakref.ref(self.buffers.slab))

        def advance(self):
            super().advance()
            if size_of(self.config) > 128:
                raise MemoryError("out of memory")

    return Cramped


def gpu(card="L4", free=20_000_000_000):
    total = BY_NAME[card].total_nbytes
    return Hardware("cuda", card, "asked for", free, total, 2, (8, 9), 58)


CRAMPED = {
    "PPO": (PPO, SMALL, lambda config: config.minibatch, budget.minibatches_for),
    "DQN": (DQN, SMALL_DQN, lambda config: config.batch, budget.batch_for),
}


@pytest.mark.parametrize("name", CRAMPED)
def test_a_process_is_usable_after_memory_ran_out(monkeypatch, name):
    made, config, size_of, choose_batch = CRAMPED[name]
    cramped = cramped_kind(made, size_of)
    monkeypatch.setattr(budget, name, cramped)
    before = made(config, POLE.env)
    before.advance()
    count, text = choose_batch(config, POLE, choose("cpu"))
    assert count in ((4, 8) if name == "PPO" else (64, 128))
    assert "256 does not fit: memory ran out" in text
    assert len(cramped.made) == 3  # 64, 128 and 256
    assert not any(slab() is not None for slab in cramped.made)
    after = made(config, POLE.env)
    after.advance()
    assert after.buffers.parameters.tobytes() == before.buffers.parameters.tobytes()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
        Exception("CUDA_ERROR_OUT_OF_MEMORY: The API call failed"),
    ],
)
def test_memory_that_runs_out_anywhere_is_one_error(error):
    plan = table_of()
    memory = one_error(plan, "a GPU")
    with pytest.raises(OutOfMemory, match="on a GPU beside") as caught, memory:
        raise error
    assert caught.value.plan is plan
    assert "give fewer bars: 1.0 kB depend on it" in str(caught.value)
    assert str(error) in str(caught.value)


@pytest.mark.parametrize(
    "error", [ValueError("no"), OutOfMemory("cudaErrorMemoryAllocation", None), KeyboardInterrupt()]
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, one_error(table_of(), "a GPU"):
        raise error
    assert caught.value is error


def shrinking(config):
    """A plan that half as many gradients at once make smaller, down to a limit."""
    return table_of(max(8192 // config.accumulate, 512))


@pytest.mark.parametrize("fits", [1, 2, 8])
@pytest.mark.parametrize("config", [SMALL, SMALL_DQN])
def test_a_run_whose_memory_runs_out_is_attempted_with_smaller_parts_of_a_minibatch(config, fits):
    seen, said = [], []

    def attempt(config):
        seen.append(config)
        if config.accumulate < fits:
            raise OutOfMemory("memory ran out", table_of())
        return "done"

    assert budget.accumulating(config, shrinking, attempt, said.append) == "done"
    # Everything else stays: the batch is the batch.
    parts = [1 << k for k in range(fits.bit_length())]
    assert seen == [dataclasses.replace(config, accumulate=count) for count in parts]
    assert len(said) == len(seen) - 1
    if said:
        assert f"memory ran out; minibatches are gone through in {fits} parts" in said[-1]


@pytest.mark.parametrize(
    "accumulate, attempted",
    [(1, [1, 2, 4, 8]), (8, [8, 16]), (16, [16]), (1024, [1024])],  # the plan's limit is at 16
)
def test_parts_are_halved_three_times_at_most_and_only_where_that_takes_less(accumulate, attempted):
    seen, config = [], dataclasses.replace(SMALL, accumulate=accumulate)

    def attempt(config):
        seen.append(config.accumulate)
        raise OutOfMemory(f"memory ran out with {config.accumulate}", table_of())

    with pytest.raises(OutOfMemory, match=f"memory ran out with {attempted[-1]}$") as refused:
        budget.accumulating(config, shrinking, attempt, lambda text: None)
    assert seen == attempted and refused.value.__context__ is None


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_plan_of_an_update_in_eight_parts_has_an_eighth_of_its_gradients(algo):
    """Where all updates are one launch there are no vectors of tiles, and nothing changes."""
    planned, config = PLANS[algo]
    large = {"minibatches": 4} if algo == "ppo" else {"batch": 65536}
    for part, precision, share in (("L4", "float32", 8), ("H200", "bfloat16", 1)):
        config = dataclasses.replace(config, precision=precision, **large)
        with launch.recording(launch.KNOWN[part]):
            whole, parts = (
                planned(dataclasses.replace(config, accumulate=n), make("market"), 100, "cuda")
                for n in (1, 8)
            )
        name = {"ppo": "ppo_update", "dqn": "dqn_rounds"}[algo]
        vectors = [p.declared[f"{name}.partials"].shape[0] for p in (whole, parts)]
        assert vectors[1] == vectors[0] // share
        assert (parts.nbytes < whole.nbytes / 4) == (share > 1)


def test_buffers_that_cannot_be_had_are_one_error_on_a_cpu():
    plan = Plan({"a": Declared((2**50,), np.uint8, "")})  # more than an address space has
    with pytest.raises(
        OutOfMemory, match=r"memory ran out on the CPU beside 1125899\.9 GB"
    ) as caught:
        allocate(plan, "cpu")
    assert caught.value.plan is plan
    assert allocate(table_of(), "cpu").table.shape == (1000,)


def test_buffers_that_cannot_be_had_are_one_error_on_a_gpu(monkeypatch):
    def refuse(nbytes):
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    cuda = SimpleNamespace(Memory=refuse, MemoryPointer=None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    with pytest.raises(OutOfMemory, match="on the GPU") as caught:
        allocate(table_of(), "cuda")
    assert isinstance(caught.value, MemoryPlanError)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**7))
def test_a_plan_never_takes_more_than_nine_tenths_of_what_is_free(buffers, beside, free):
    plan = table_of(buffers)
    if plan.nbytes + beside <= 0.9 * free:
        plan.check(free, "a GPU", beside)
        return
    with pytest.raises(MemoryPlanError, match="give fewer bars") as refused:
        plan.check(free, "a GPU", beside)
    assert pools.shown(plan.nbytes + beside - 0.9 * free) in str(refused.value)
    assert ("beside them" in str(refused.value)) == (beside > 0)


def test_a_plan_that_nothing_shrinks_is_refused_too():
    plan = Plan({"a": Declared((10,), np.uint8, "")})
    with pytest.raises(MemoryPlanError, match="are over budget"):
        plan.check(1, "a GPU")


# PPO's minibatch.


def test_the_measured_minibatch_is_one_that_ran():
    minibatches, text = budget.minibatches_for(SMALL, POLE, choose("cpu"))
    sizes = [int(line.split()[0]) for line in text.splitlines() if line.endswith("samples/s")]
    assert sizes == [64, 128, 256, 512]
    assert SMALL.batch // minibatches in sizes
    assert f"ppo.minibatches = {minibatches}" in text


@pytest.mark.parametrize(
    "envs, steps, sizes",
    [
        (4096, 64, [64 << k for k in range(8)]),  # 262144 transitions, minibatches to 8192
        (16, 128, [64, 128, 256, 512, 1024, 2048]),
        (6, 100, [75, 150, 300, 600]),
        (3, 7, [21]),  # less than the smallest batch
        (101, 101, [10201]),  # only itself divides it
    ],
)
def test_minibatches_divide_a_rollout(monkeypatch, envs, steps, sizes):
    tried = []

    def trial(config, task, machine):
        tried.append(config.minibatch)
        return Trial((config.minibatch,), 0)

    monkeypatch.setattr(budget, "_trial", trial)
    config = PPOConfig(envs=envs, rollout_steps=steps, minibatches=1)
    minibatches, _ = budget.minibatches_for(config, POLE, choose("cpu"))
    assert tried == sizes
    assert minibatches == config.batch // sizes[-1]


@pytest.mark.parametrize("card", USABLE, ids=lambda card: card.name)
def test_the_tier_minibatch_is_tried_and_halved(monkeypatch, card):
    tried, fits = [], 8192

    def trial(config, task, machine):
        tried.append(config.minibatch)
        if config.minibatch > fits:
            raise OutOfMemory("memory ran out", table_of())
        return Trial((1.0,), 0)

    monkeypatch.setattr(budget, "_trial", trial)
    minibatch = 128 if card.ppo == 172 or card.ppo == 230 else card.ppo  # 2^18 transitions
    minibatches, text = budget.minibatches_for(MARKET, POLE, gpu(card.name), "tier")
    assert tried == [minibatch] and minibatches * minibatch == MARKET.batch
    assert f"{card.ppo} by the memory of {card.name}" in text
    fits = 0
    with pytest.raises(OutOfMemory):
        budget.minibatches_for(MARKET, POLE, gpu(card.name), "tier")
    assert tried[1:] == [minibatch >> k for k in range(4) if minibatch >> k >= 64]


def test_the_measured_batch_of_dqn_is_one_that_ran_and_learned(monkeypatch):
    monkeypatch.setattr(budget, "LARGEST", 256)
    config = DQNConfig(hidden=(8,), learning_starts=10_000)
    size, text = budget.batch_for(config, POLE, choose("cpu"))
    sizes = [int(line.split()[0]) for line in text.splitlines() if line.endswith("samples/s")]
    assert sizes == [64, 128, 256] and size in sizes
    assert f"dqn.batch = {size}" in text


@pytest.mark.parametrize("card", USABLE, ids=lambda card: card.name)
def test_the_tier_batch_of_dqn_is_tried_and_halved(monkeypatch, card):
    tried, fits = [], 8192

    def trial(config, task, machine):
        tried.append(config.batch)
        if config.batch > fits:
            raise OutOfMemory("memory ran out", table_of())
        return Trial((1.0,), 0)

    monkeypatch.setattr(budget, "_trial", trial)
    size, text = budget.batch_for(DQNConfig(), POLE, gpu(card.name), "tier")
    assert tried == [size] == [card.dqn]  # 230 too: a batch divides nothing
    assert f"{card.dqn} by the memory of {card.name}" in text
    fits = 0
    with pytest.raises(OutOfMemory):
        budget.batch_for(DQNConfig(), POLE, gpu(card.name), "tier")
    halves = [card.dqn >> k for k in range(4)]
    assert tried[1:] == ([230, 115] if card.dqn == 230 else [h for h in halves if h >= 64])


def test_a_policy_that_cannot_be_used_is_refused():
    with pytest.raises(ConfigError, match="measured or tier, got 'best'"):
        budget.minibatches_for(SMALL, POLE, choose("cpu"), "best")
    with pytest.raises(ConfigError, match="the device is cpu"):
        budget.minibatches_for(SMALL, POLE, choose("cpu"), "tier")


def test_a_trial_that_the_plan_refuses_takes_nothing(monkeypatch):
    monkeypatch.setattr(budget, "PPO", None)  # which would be called
    small = dataclasses.replace(choose("cpu"), free_nbytes=1000)
    monkeypatch.setattr("lowgpu.hardware.choose", lambda kind: small)
    with pytest.raises(OutOfMemory, match="no batch size fits: 64 does not fit: the buffers need"):
        budget.minibatches_for(SMALL, POLE, small)


# Widths.


@pytest.mark.parametrize(
    "base, layers, widths",
    [
        (256, 3, (256, 128, 64)),
        (250, 3, (256, 128, 64)),  # 250, 125 and 62.5 are rounded up
        (200, 3, (200, 104, 56)),  # 200, 100 and 50
        (512, 1, (512,)),
        (8, 7, (8,) * 7),
        (9, 2, (16, 8)),
    ],
)
def test_widths_are_halved_and_rounded_up_to_multiples_of_eight(base, layers, widths):
    assert hidden_widths(base, layers) == widths
    assert PPOConfig(hidden=widths).hidden == widths


@pytest.mark.parametrize("base, layers", [(7, 3), (513, 3), (64, 0), (64, 8)])
def test_widths_outside_the_range_are_refused(base, layers):
    with pytest.raises(ValueError, match=rf"got {base} and {layers}"):
        hidden_widths(base, layers)


@given(st.sets(st.sampled_from(range(8, 513, 8))))
def test_the_widest_base_is_the_last_that_fits(fitting):
    assert max_hidden_dim_base(fitting.__contains__) == max(fitting, default=None)


# The plan of a machine.


def test_a_sample_takes_what_its_buffers_take():
    config = dataclasses.replace(MARKET, envs=4096)
    env = make("market")
    state = 4 * (len(env.floats) + len(env.ints))
    # Action, log-probability, value, reward, final value, advantage, return, index: 4 B each; two
    # flags; and once in 64 steps the environment's own state, two sums and a value.
    expected = state + 8 * 4 + 2 + (state + 3 * 4) / 64
    plan_for = lambda envs: plan_of(dataclasses.replace(config, envs=envs), env, 100, "cpu")
    assert budget.sample_nbytes(plan_for, 4096) / 64 == expected


@pytest.mark.parametrize("algo", PLANS)
@pytest.mark.parametrize("card", USABLE, ids=lambda card: card.name)
def test_the_outlook_of_every_card(monkeypatch, card, algo):
    Machine(card).install(monkeypatch)
    machine = HardwareBudget.detect()
    planned, config = PLANS[algo]
    with launch.recording(card.device):
        seen = json.loads(json.dumps(outlook.outlook(machine, algo)))
        plan = planned(config, make("market"), outlook.BARS, "cuda")
    assert seen["buffers_nbytes"] == plan.nbytes > 112_000_000  # the table alone
    assert {b["name"]: b["nbytes"] for b in seen["buffers"]} == {
        name: declared.nbytes for name, declared in plan.declared.items()
    }
    peak = plan.nbytes + budget.KERNELS_NBYTES + CONTEXT_NBYTES
    assert seen["peak_nbytes"] == peak
    assert seen["tier_batch"] == {"dqn": card.dqn, "ppo": card.ppo}
    assert seen["widest_hidden"] == [512, 256, 128]


@pytest.mark.parametrize("name", ["RTX 3050 Ti", "H200"])
def test_the_largest_replay_that_fits_is_known_and_one_step_more_does_not(monkeypatch, name):
    card = BY_NAME[name]
    Machine(card).install(monkeypatch)
    machine = HardwareBudget.detect()
    with launch.recording(card.device):
        seen = outlook.outlook(machine, "dqn")

        def needed(transitions):
            config = dataclasses.replace(MARKET_DQN, capacity=transitions)
            return dqn_plan_of(config, make("market"), outlook.BARS, "cuda").nbytes

        most, usable = seen["most_transitions"], 0.9 * machine.chosen.free_nbytes
        assert needed(most) + budget.KERNELS_NBYTES <= usable
        if name == "H200":  # no index goes further
            assert most == (2**31 - 1) // 4096 * 4096
        else:
            assert needed(most + MARKET_DQN.envs) + budget.KERNELS_NBYTES > usable
            assert most > 80_000_000
    # Two states of 16 bytes, a reward, and a byte of action and flags.
    assert (seen["sample_nbytes"], seen["replay_transitions"]) == (37, 2**20)


def test_an_outlook_of_no_trainer_is_refused():
    with pytest.raises(ConfigError, match="algo must be one of ppo, dqn, got 'sac'"):
        outlook.outlook(HardwareBudget.detect("cpu"), "sac")


def test_a_card_with_little_free_memory_takes_a_narrower_network(monkeypatch):
    card = BY_NAME["RTX 3050 Ti"]
    Machine(card).install(monkeypatch)
    machine = HardwareBudget.detect()

    def needed(base):
        config = dataclasses.replace(MARKET, hidden=hidden_widths(base))
        plan = plan_of(config, make("market"), outlook.BARS, "cuda")
        return plan.nbytes + budget.KERNELS_NBYTES

    with launch.recording(card.device):
        free = int(needed(200) / 0.9) + 1  # which is not enough for 160, with twice the blocks
        chosen = dataclasses.replace(machine.chosen, free_nbytes=free)
        seen = outlook.outlook(dataclasses.replace(machine, chosen=chosen))
        assert needed(200) <= 0.9 * free < min(needed(160), needed(208))
    assert seen["widest_hidden"] == (200, 104, 56)


def test_the_context_is_estimated_by_the_sms_where_it_was_not_seen(monkeypatch):
    Machine(BY_NAME["L4"], fails=["nvmlDeviceGetMemoryInfo"]).install(monkeypatch)
    peak = outlook.predicted_peak(table_of(), HardwareBudget.detect())
    assert peak.context_nbytes == 58 * 3 * MB
    assert peak.nbytes == 1024 + budget.KERNELS_NBYTES + 58 * 3 * MB
    on_cpu = outlook.predicted_peak(table_of(), HardwareBudget.detect("cpu"))
    assert on_cpu.nbytes == 1024


# The command line.


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


TRAIN = ("train", "--env", "cartpole", "--device", "cpu", "--steps", "1000")
DQN_SIZED = tuple(
    f"--set=dqn.{text}"
    for text in ("hidden=[8]", "envs=4", "train_every=8", "rounds=25", "learning_starts=100")
)
SIZED = tuple(f"--set=ppo.{text}" for text in ("envs=8", "rollout_steps=64", "hidden=[8]"))


def test_the_minibatch_chosen_is_in_the_config_of_the_run(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "_trial", lambda config, *_: Trial((config.minibatch,), 0))
    result = cli(*TRAIN, *SIZED, "--batch", "measured", "--run", "r")
    assert result.exit_code == 0, result.stderr
    kept = (tmp_path / "r/config.toml").read_text()
    assert tomllib.loads(kept)["ppo"]["minibatches"] == 1  # 512 of 512 transitions
    assert kept in result.stdout
    assert "minibatch 512: ppo.minibatches = 1" in result.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--batch", "tier"), "the device is cpu"),
        (("--batch", "best"), "measured or tier, got 'best'"),
        (("--batch", "measured", "--resume", "--run", "r"), "leave out --batch"),
    ],
)
def test_a_batch_that_cannot_be_chosen_is_bad_input(cli, arguments, words):
    command = ("train",) if "--resume" in arguments else (*TRAIN, *SIZED)
    result = cli(*command, *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "made, more, remedy",
    [
        (PPO, SIZED, "fewer ppo.envs or ppo.rollout_steps"),
        (DQN, ("--algo", "dqn", "--set", "dqn.hidden=[8]"), "a smaller dqn.capacity"),
    ],
)
def test_memory_that_runs_out_in_training_is_a_sentence(cli, monkeypatch, made, more, remedy):
    def fail(self):
        raise MemoryError("out of memory")

    monkeypatch.setattr(made, "advance", fail)
    result = cli(*TRAIN, *more)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("lowgpu: memory ran out on ")
    assert f"give {remedy}" in result.stderr


@pytest.mark.parametrize("made", [PPO, DQN])
def test_a_run_whose_memory_runs_out_goes_on_from_its_checkpoint_and_ends_the_same(
    cli, monkeypatch, tmp_path, made
):
    more = SIZED if made is PPO else ("--algo", "dqn", *DQN_SIZED)
    assert cli(*TRAIN, *more, "--steps", "4000", "--run", "whole").exit_code == 0

    def planned(config, env, rows, kind, plan_of=made.plan_of):
        """With working memory as a GPU would need it."""
        work = Declared((4096 // config.accumulate,), np.uint8, "working memory")
        return Plan(plan_of(config, env, rows, kind).declared | {"work": work})

    def advance(self, advance=made.advance):
        if self.iteration == 3 and self.config.accumulate < 4:
            raise MemoryError("out of memory")
        done.append(self.iteration)
        return advance(self)

    done = []
    monkeypatch.setattr(made, "plan_of", staticmethod(planned))
    monkeypatch.setattr(made, "advance", advance)
    result = cli(*TRAIN, *more, "--steps", "4000", "--run", "r")
    assert result.exit_code == 0, result.stderr
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: memory ran out")]
    assert [note.split()[-6] for note in notes] == ["2", "4"]
    kept = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert kept[made.NAME]["accumulate"] == 4
    whole, again = (
        checkpoint.load(tmp_path / run / "checkpoint.safetensors") for run in ("whole", "r")
    )
    assert again.document["iteration"] == whole.document["iteration"] > 3
    assert done == list(range(again.document["iteration"]))  # and none twice
    for name, array in whole.arrays.items():
        assert again.arrays[name].tobytes() == array.tobytes(), name
    lines = (tmp_path / "r/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, len(lines) + 1))


def test_info_describes_a_gpu_and_what_fits(cli, monkeypatch):
    card = BY_NAME["A100 80 GB"]
    Machine(card, BY_NAME["Tesla T4"]).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with launch.recording(card.device):
        text = cli("info").stdout
    for words in (
        "would use   NVIDIA A100 80 GB (cuda): a GPU can be used",
        "84.7 GB free of 85.1 GB",
        "GPU-00000000-0000-0000-0000-000000000000, CUDA's 0 of 2",
        "compute capability 8.0, 108 SMs",
        "163 KB shared memory a block",
        "40 MB L2 cache",
        "2,039 GB/s",
        "up to 1,980 MHz",
        "CUDA_VISIBLE_DEVICES=0,1",
        "GPU 1 cannot be used: NVIDIA Tesla T4 has compute capability 7.5, and 8.0 is needed",
        "of buffers for ppo with 1,000,000 bars",
        "B a transition of the rollout",
        "112.0 MB  bfloat16[1000000, 56]  features of every bar",
        "at the peak, with CUDA's context",
        "hidden layers up to 512, 256, 128 fit",
        "tier batch  dqn 8192, ppo 2048",
    ):
        assert words in text


def test_info_of_dqn_has_its_replay_and_all_its_buffers(cli, monkeypatch):
    card = BY_NAME["L4"]
    Machine(card).install(monkeypatch)
    with launch.recording(card.device):
        text = cli("info", "--algo", "dqn").stdout
    for words in (
        "of buffers for dqn with 1,000,000 bars",
        "37 B a transition of the replay, which holds 1,048,576",
        "transitions fits",
        "kept_next_floats",
        "dqn_rounds.partials",
        "tier batch  dqn 2048, ppo 512",
    ):
        assert words in text
    refused = cli("info", "--algo", "sac")
    assert refused.exit_code == 2 and "algo must be one of ppo, dqn" in refused.stderr


def test_info_says_why_a_t4_is_not_used(cli, monkeypatch):
    Machine(BY_NAME["Tesla T4"]).install(monkeypatch)
    text = cli("info").stdout
    assert "(cpu): NVIDIA Tesla T4 has compute capability 7.5, and 8.0 is needed" in text
    assert "tier batch" not in text and "at the peak" not in text


PEAK = """
import json, sys, pynvml
from lowgpu import outlook, runs
from lowgpu.config import from_dict, preset_of
from lowgpu.machine import HardwareBudget
import numpy as np
from lowgpu.envs import make

def taken():
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(machine.gpu.uuid)
    return pynvml.nvmlDeviceGetMemoryInfo(handle).free

machine = HardwareBudget.detect("cuda")
before = machine.board.free_nbytes  # without a context
settings = from_dict({"algo": sys.argv[1], **preset_of("market", sys.argv[1], "cuda")})
rows = 1_000_000
series = np.ones((2, rows), "f4")
series[1, :-1] = 0  # the last row alone ends the data
table, made = np.zeros((rows, 56), "f4"), runs.trainer_of(settings)
trainer = made(settings.trainer, make("market"), table, series, "cuda")
trainer.skip_warm_up()
for _ in range(3):
    trainer.advance()
trainer.drain()
peak = outlook.predicted_peak(trainer.plan, machine)
print(json.dumps({"taken": before - taken(), "predicted": peak.nbytes, "parts": vars(peak)}))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("algo", PLANS)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(algo):
    done = subprocess.run([sys.executable, "-c", PEAK, algo], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["predicted"] == pytest.approx(seen["taken"], rel=0.1), seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", CRAMPED)
def test_a_gpu_is_usable_after_memory_ran_out(name):
    from cupy.cuda import runtime

    made, config, *_ = CRAMPED[name]
    trainer = made(config, POLE.env, kind="cuda")
    trainer.advance()
    trainer.drain()
    free, total = runtime.memGetInfo()
    plan = Plan({"a": Declared((2 * total,), np.uint8, "")})
    with pytest.raises(OutOfMemory, match="cudaErrorMemoryAllocation"):
        allocate(plan, "cuda")
    assert runtime.memGetInfo()[0] == free
    trainer.advance()
    assert trainer.drain().iteration == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", CRAMPED)
def test_trials_give_back_what_they_took_of_a_gpu(name):
    from cupy.cuda import runtime

    _, config, _, choose_batch = CRAMPED[name]
    more = {"PPO": {"envs": 4096}, "DQN": {"envs": 1000, "train_every": 1000, "capacity": 10**6}}
    config = dataclasses.replace(config, **more[name])  # 262144 transitions, 13 MB; 37 MB
    choose_batch(config, POLE, choose("cuda"))  # loads kernels
    free, _ = runtime.memGetInfo()
    count, _ = choose_batch(config, POLE, choose("cuda"))
    size = config.batch // count if name == "PPO" else count
    assert size in [64 << k for k in range(8)]
    assert free - runtime.memGetInfo()[0] < 4 * MB
