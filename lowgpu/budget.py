"""How much of a machine to use: batch sizes and widths, and what happens when memory runs out."""

import dataclasses
import gc
import statistics
import time
from dataclasses import dataclass

from lowgpu import hardware
from lowgpu.config import DEEPEST, WIDEST, ConfigError, PPOConfig
from lowgpu.dqn import DQN
from lowgpu.dqn_plan import plan_of as dqn_plan_of
from lowgpu.pools import SHARE, MemoryPlanError, OutOfMemory, one_error, shown
from lowgpu.ppo import PPO
from lowgpu.ppo_plan import plan_of

SMALLEST, LARGEST = 64, 8192  # samples in a batch of the tier policy
EXACT = 256  # up to here a batch may be any number; above it is a power of two
MB = 2**20
# The rule's constants are chosen to give the published table of batch sizes: DQN 230 and PPO 64 with
# 4 GB, 2048 and 512 with 24, 4096 and 1024 with 48, 8192 and 2048 with 80. Any overhead in
# [1848, 2794) MB does, with the cost of a sample that then gives 230. They are not measured: a
# market transition takes well under a kilobyte.
OVERHEAD_MB = 2048
MB_PER_SAMPLE = {"dqn": 8.9, "ppo": 35.6}
# GPUs are sold with these, in GB of 2^30 bytes; drivers and error correction keep up to a tenth.
SOLD_GB = 2, 3, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 180, 192
KEPT = 0.1

NEAR = 0.9  # of the best throughput that the knee has; untuned
HALVINGS = 3
MOST_PARTS = 1024  # of a minibatch, that an update's `accumulate` takes
ROUNDS, ITERATIONS = 3, 4  # of a trial, after a first iteration that compiles
WIDTH = 8  # hidden widths are multiples of it
# Loaded kernels, a graph and the streams of a trainer. Untuned: an estimate, not yet measured.
KERNELS_NBYTES = 32 * MB


def nominal_mb(total_nbytes):
    """Megabytes (2^20) that a GPU was sold with, from the bytes that its runtime reports."""
    for gigabytes in SOLD_GB:
        if (1 - KEPT) * gigabytes * 1024 <= total_nbytes / MB <= gigabytes * 1024:
            return gigabytes * 1024
    return total_nbytes / MB


def tier_batch(total_nbytes, algo):
    """The batch size of a GPU by its memory alone.

        clamp((memory - overhead) / memory of a sample, 64, 8192)

    rounded down to a whole number, above 256 to a power of two.

    Args:
        total_nbytes: the GPU's memory in bytes, used or not.
        algo: "dqn" or "ppo".

    Returns:
        Samples in a batch.

    Raises:
        ValueError: another algo.
    """
    if algo not in MB_PER_SAMPLE:
        raise ValueError(f"algo must be one of {', '.join(MB_PER_SAMPLE)}, got {algo!r}")
    samples = (nominal_mb(total_nbytes) - OVERHEAD_MB) / MB_PER_SAMPLE[algo]
    samples = int(min(max(samples, SMALLEST), LARGEST))
    return samples if samples <= EXACT else 1 << samples.bit_length() - 1


@dataclass(frozen=True)
class Trial:
    """What a batch size did.

    Attributes:
        throughputs: samples a second, once a round; the median counts.
        peak_nbytes: the most bytes taken beside what was there before.
    """

    throughputs: tuple
    peak_nbytes: int


@dataclass(frozen=True)
class Knee:
    """The batch size that was found.

    Attributes:
        size: the smallest whose throughput is within a tenth of the best.
        throughputs: {size: samples a second} of those that fit.
        refused: why the first that does not fit was left out, and all above it; None if all fit.
    """

    size: int
    throughputs: dict
    refused: str | None

    def __str__(self):
        lines = [f"{size:>10} {rate:>14,.0f} samples/s" for size, rate in self.throughputs.items()]
        return "\n".join([*lines, *([self.refused] if self.refused else [])])


def knee(sizes, measure, usable_nbytes=None):
    """The smallest batch size whose throughput is within a tenth of the best that fits.

    Sizes are tried from the smallest. The first that does not fit ends the search: larger ones are
    not tried. A size also does not fit when its peak is over what may be used although nothing
    failed, because Windows lends host memory without a word.

    Args:
        sizes: batch sizes.
        measure: size -> Trial; raises MemoryPlanError where the size does not fit.
        usable_nbytes: what may be taken beside what is there now; None for no limit.

    Returns:
        The Knee.

    Raises:
        ValueError: no sizes; a throughput that is not above 0.
        OutOfMemory: not even the smallest fits.
    """
    sizes = sorted(set(sizes))
    if not sizes:
        raise ValueError("sizes must be at least one batch size, got none")
    throughputs, plan, why = {}, None, None
    for size in sizes:
        trial, why, plan = _tried(size, measure)
        if trial and usable_nbytes is not None and trial.peak_nbytes > usable_nbytes:
            taken, limit = shown(trial.peak_nbytes), shown(usable_nbytes)
            why = f"it took {taken}, and {limit} may be used"
        if why:
            why = f"{size} does not fit: {why}"
            break
        throughputs[size] = statistics.median(trial.throughputs)
        if not throughputs[size] > 0:
            raise ValueError(f"a throughput must be above 0, got {throughputs[size]!r} at {size}")
    if not throughputs:
        raise OutOfMemory(f"no batch size fits: {why}", plan)
    best = max(throughputs.values())
    size = next(s for s, rate in throughputs.items() if rate >= NEAR * best)
    return Knee(size, throughputs, why)


def halved(size, attempt, smallest=1):
    """Attempt a size, and half of it whenever memory runs out, three times at most.

    What a failed attempt held is free before the next one begins.

    Args:
        size: to begin with.
        attempt: size -> result; raises MemoryPlanError where the size does not fit.
        smallest: sizes below it are not attempted, nor is half of an odd size.

    Returns:
        (size, result) of the attempt that fitted.

    Raises:
        OutOfMemory: none did.
    """
    halvings = 0
    while True:
        result, why, plan = _tried(size, attempt)
        if why is None:
            return size, result
        if halvings == HALVINGS or size % 2 or size // 2 < smallest:
            raise OutOfMemory(f"nothing fits after {halvings} halvings: {why}", plan)
        halvings, size = halvings + 1, size // 2


def accumulating(config, plan_for, attempt, say):
    """Attempt a run, and again with twice the accumulation whenever memory runs out, at most thrice.

    What is learned stays the same, bit for bit: each time half as many gradients of parts of a
    minibatch are held at once, and added up in the same order. Where that would take no less memory,
    as on a CPU, and where all updates are one launch, the first error stands.

    Args:
        config: of a trainer, with `accumulate`.
        plan_for: config -> Plan.
        attempt: config -> result; raises MemoryPlanError where memory runs out.
        say: a sentence -> shown to people.

    Returns:
        The result of the attempt that fitted.

    Raises:
        OutOfMemory: none did.
    """
    for left in reversed(range(HALVINGS + 1)):
        result, why, plan = _tried(config, attempt)
        if why is None:
            return result
        more = dataclasses.replace(config, accumulate=min(2 * config.accumulate, MOST_PARTS))
        if not left or plan_for(more).nbytes >= plan_for(config).nbytes:
            raise OutOfMemory(why, plan)
        config = more
        say(
            f"{why}; minibatches are gone through in {config.accumulate} parts, with the same result"
        )


def _tried(size, attempt):
    """(result, why it does not fit, plan), with nothing held of an attempt that does not fit."""
    try:
        return attempt(size), None, None
    except MemoryPlanError as error:
        # The sentence and the plan only: the error holds frames, and those hold arrays.
        failed = None, str(error), getattr(error, "plan", None)
    gc.collect()  # a trainer refers to itself
    return failed


def sample_nbytes(plan_for, size):
    """Bytes that one more sample takes, from the plans of a size and of twice the size.

    Args:
        plan_for: size -> Plan.
        size: samples, 1 or more.
    """
    return (plan_for(2 * size).nbytes - plan_for(size).nbytes) / size


def minibatches_for(config, task, machine, policy="measured"):
    """The number of PPO's minibatches that fits the machine; the rollout stays as it is.

    Every choice was run: memory that runs out halves the tier's minibatch, and ends the search of
    the measured.

    Args:
        config: a PPOConfig.
        task: what to train on, with `env`, `table`, `series` and `rows`.
        machine: a Hardware.
        policy: "measured", the knee of throughput on this machine; "tier", by the GPU's memory.

    Returns:
        (minibatches, text): the text says why.

    Raises:
        ConfigError: another policy; "tier" on a CPU.
        OutOfMemory: nothing fits.
    """
    sizes = _minibatch_sizes(config)

    def divides(tier):
        return max([size for size in sizes if size <= tier], default=min(sizes))

    size, text = _size_for(
        sizes, divides, lambda size: _short(config, size), task, machine, policy, "ppo"
    )
    minibatches = config.batch // size
    return minibatches, f"{text}\nminibatch {size}: ppo.minibatches = {minibatches}\n"


def batch_for(config, task, machine, policy="measured"):
    """The batch of DQN's updates that fits the machine; their number stays as it is.

    Args:
        config: a DQNConfig.
        task, machine, policy: as for minibatches_for.

    Returns:
        (batch, text): the text says why.

    Raises:
        ConfigError, OutOfMemory: as minibatches_for.
    """
    rounds = min(config.rounds, ITERATIONS)
    steps = config.train_every * rounds * (1 + ROUNDS * ITERATIONS)
    short = dataclasses.replace(config, rounds=rounds, total_steps=steps, learning_starts=0)
    sizes = [SMALLEST << k for k in range((LARGEST // SMALLEST).bit_length())]
    size, text = _size_for(
        sizes,
        lambda tier: tier,
        lambda size: dataclasses.replace(short, batch=size),
        task,
        machine,
        policy,
        "dqn",
    )
    return size, f"{text}\ndqn.batch = {size}\n"


def _size_for(sizes, allowed, config_of, task, machine, policy, algo):
    """The size that a policy chooses by running what `config_of` gives for it, and why.

    Of `sizes` one is measured; `allowed` is the size that the tier's becomes.
    """

    def attempt(size):
        return _trial(config_of(size), task, machine)

    if policy == "measured":
        free = machine.free_nbytes
        found = knee(sizes, attempt, None if free is None else SHARE * free)
        return found.size, str(found)
    if policy != "tier":
        raise ConfigError(f"batch must be measured or tier, got {policy!r}")
    if machine.kind == "cpu":
        raise ConfigError("batch tier goes by a GPU's memory, and the device is cpu: give measured")
    tier = tier_batch(machine.total_nbytes, algo)
    size, _ = halved(allowed(tier), attempt, min(sizes))
    return size, f"{tier} by the memory of {machine.name}"


def _minibatch_sizes(config):
    """Minibatches that divide a rollout, halves of each other, within the policy's limits."""
    sizes = [config.batch]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= SMALLEST:
        sizes.append(sizes[-1] // 2)
    return [size for size in sizes if size <= LARGEST] or sizes[-1:]


def _short(config, size):
    """A PPOConfig with minibatches of a size, as long as a trial."""
    steps = config.batch * (1 + ROUNDS * ITERATIONS)
    return dataclasses.replace(config, minibatches=config.batch // size, total_steps=steps)


def _trial(config, task, machine):
    made, plan_for = (PPO, plan_of) if isinstance(config, PPOConfig) else (DQN, dqn_plan_of)
    plan = plan_for(config, task.env, task.rows, machine.kind)
    free = hardware.choose(machine.kind).free_nbytes
    plan.check(free, machine.name, beside_nbytes(machine.kind))
    throughputs = []
    with one_error(plan, machine.name):
        trainer = made(config, task.env, task.table, task.series, machine.kind)
        trainer.advance()
        trainer.drain()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(ITERATIONS):
                trainer.advance()
            trainer.drain()
            throughputs.append(ITERATIONS * config.samples / (time.perf_counter() - start))
    # Other processes change what is free of a CPU's memory from one moment to the next.
    taken = free - hardware.choose("cuda").free_nbytes if machine.kind == "cuda" else 0
    del trainer
    gc.collect()  # it refers to itself, and the next one needs its memory
    return Trial(tuple(throughputs), max(plan.nbytes, taken))


def hidden_widths(base, layers=3):
    """Widths of a network's hidden layers, each half of the one before.

    Args:
        base: of the first, in [8, 512]; every width is rounded up to a multiple of 8.
        layers: how many, 1 to 7.

    Raises:
        ValueError: base or layers outside its range.
    """
    if not WIDTH <= base <= WIDEST or not 1 <= layers <= DEEPEST:
        raise ValueError(
            f"base must be in [{WIDTH}, {WIDEST}] and layers in [1, {DEEPEST}], "
            f"got {base!r} and {layers!r}"
        )
    return tuple(-int(-base // (WIDTH << k)) * WIDTH for k in range(layers))


def max_hidden_dim_base(fits):
    """The largest base of `hidden_widths`, a multiple of 8 up to 512, that fits; None if none does.

    Every base is asked, as a wider network can need less: its launches have fewer blocks.

    Args:
        fits: base -> whether it fits.
    """
    return next(filter(fits, range(WIDEST, 0, -WIDTH)), None)


def beside_nbytes(kind):
    """What a run on a device of this kind takes of free memory beside its buffers."""
    return KERNELS_NBYTES if kind == "cuda" else 0
