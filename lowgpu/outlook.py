"""What a run would take of a machine before it starts: its plan, its peak, and what else would fit."""

import bisect
import dataclasses
from dataclasses import dataclass

import numpy as np

from lowgpu.budget import (
    MB,
    MB_PER_SAMPLE,
    beside_nbytes,
    hidden_widths,
    max_hidden_dim_base,
    sample_nbytes,
    tier_batch,
)
from lowgpu.config import ConfigError, from_dict, merge, preset_of
from lowgpu.envs import make
from lowgpu.pools import SHARE, shown
from lowgpu.runs import TRAINERS

BARS = 1_000_000  # that the outlook plans for
# A context took 555 MiB on an RTX PRO 6000 (188 SMs) and 107 MiB on an RTX 4060 Ti (34 SMs): 3.0
# and 3.1 MiB an SM. Source: ggml-org/llama.cpp pull request 23604.
CONTEXT_NBYTES_PER_SM = 3 * MB
MOST_TRANSITIONS = 2**31 - 1  # that a replay tells apart


@dataclass(frozen=True)
class Peak:
    """The most memory that a run takes of a GPU, in bytes.

    Attributes:
        buffers_nbytes: the plan's.
        kernels_nbytes: loaded kernels, the graph and streams.
        context_nbytes: the CUDA context; what the runtime says is free is without it.
    """

    buffers_nbytes: int
    kernels_nbytes: int
    context_nbytes: int

    @property
    def nbytes(self):
        return self.buffers_nbytes + self.kernels_nbytes + self.context_nbytes


def predicted_peak(plan, machine):
    """The Peak of a run.

    Args:
        plan: its Plan.
        machine: a HardwareBudget.
    """
    context = 0
    if machine.gpu:
        context = machine.context_nbytes or CONTEXT_NBYTES_PER_SM * machine.gpu.sms
    return Peak(plan.nbytes, beside_nbytes(machine.chosen.kind), context)


def outlook(machine, algo="ppo"):
    """What the market's preset would take of a machine with a million bars, as plain values.

    Args:
        machine: a HardwareBudget.
        algo: the trainer, "ppo" or "dqn".

    Returns:
        A dictionary: `buffers` of the plan and the sums of them; bytes of a `sample`, which is a
        transition of PPO's rollout or of DQN's replay; what else would fit, None where free memory is
        not known; batches by the `tier` rule, empty on a CPU.

    Raises:
        ConfigError: another algo.
    """
    if algo not in TRAINERS:
        raise ConfigError(f"algo must be one of {', '.join(TRAINERS)}, got {algo!r}")
    chosen, env = machine.chosen, make("market")
    settings = merge(preset_of("market", algo, chosen.kind), {"algo": algo})
    config = from_dict(settings).trainer

    def plan_for(**changes):
        changed = dataclasses.replace(config, **changes)
        return TRAINERS[algo].plan_of(changed, env, BARS, chosen.kind)

    def fits(**changes):
        needed = plan_for(**changes).nbytes + beside_nbytes(chosen.kind)
        return needed <= SHARE * chosen.free_nbytes

    plan, known = plan_for(), chosen.free_nbytes is not None
    base = max_hidden_dim_base(lambda base: fits(hidden=hidden_widths(base))) if known else None
    tiers = {}
    if chosen.kind == "cuda":
        tiers = {name: tier_batch(chosen.total_nbytes, name) for name in MB_PER_SAMPLE}
    return {
        "algo": algo,
        "bars": BARS,
        "buffers": [
            {
                "name": name,
                "nbytes": buffer.nbytes,
                "dtype": np.dtype(buffer.dtype).name,
                "shape": list(buffer.shape),
                "meaning": buffer.meaning,
            }
            for name, buffer in plan.declared.items()
        ],
        "buffers_nbytes": plan.nbytes,
        "peak_nbytes": predicted_peak(plan, machine).nbytes,
        "widest_hidden": None if base is None else hidden_widths(base),
        "tier_batch": tiers,
        **(_replay if algo == "dqn" else _rollout)(config, plan_for, fits if known else None),
    }


def _rollout(config, plan_for, fits):
    nbytes = sample_nbytes(lambda envs: plan_for(envs=envs), config.envs)
    return {"sample_nbytes": nbytes / config.rollout_steps}


def _replay(config, plan_for, fits):
    """Bytes of a transition, how many are planned, and the most that would fit."""

    def too_many(slots):
        return not fits(capacity=slots * config.envs)

    slots = range(1, MOST_TRANSITIONS // config.envs + 1)
    most = bisect.bisect_left(slots, True, key=too_many) * config.envs if fits else None
    return {
        "sample_nbytes": sample_nbytes(lambda size: plan_for(capacity=size), config.capacity),
        "replay_transitions": config.capacity,
        "most_transitions": most,
    }


def described(report, outlook):
    """`lowgpu info` as text, from the report of machine.py and an outlook."""
    rows = [*_machine(report), *_outlook(report, outlook)]
    text = [f"{name:12}{value}" for name, value in rows if value]
    largest = sorted(outlook["buffers"], key=lambda buffer: -buffer["nbytes"])
    table = [
        f"{b['name']:26} {shown(b['nbytes']):>10}  {b['dtype']}{b['shape']}  {b['meaning']}"
        for b in largest
    ]
    return "\n".join([*text, "", *table])


def _machine(report):
    used, seen = report["used"], report["machine"]
    yield "would use", f"{used['name']} ({used['kind']}): {used['reason']}"
    if used["free_nbytes"] is not None:
        yield "memory", f"{shown(used['free_nbytes'])} free of {shown(used['total_nbytes'])}"
    yield "CPU cores", used["cores"]
    yield "GPU", report["gpu"]
    gpu, board = seen["gpu"], seen["board"]
    if gpu:
        yield "", f"{gpu['uuid']}, CUDA's {gpu['index']} of {len(seen['gpus'])}"
        capability = ".".join(map(str, gpu["capability"]))
        yield "", f"compute capability {capability}, {gpu['sms']} SMs"
        yield "", f"{gpu['shared_per_block'] // 1024} KB shared memory a block"
        yield "", f"{gpu['l2_nbytes'] / MB:g} MB L2 cache"
    if board["bytes_per_second"] is not None:
        yield "", f"{board['bytes_per_second'] / 1e9:,.0f} GB/s"
    if board["sm_clock_hz"] is not None:
        yield "", f"up to {board['sm_clock_hz'] / 1e6:,.0f} MHz"
    if seen["visible"] is not None:
        yield "", f"CUDA_VISIBLE_DEVICES={seen['visible']}"
    for note in seen["notes"]:
        yield "note", note
    yield "driver", f"CUDA {report['driver']}" if report["driver"] else "none"
    yield "", f"driver {board['driver']}" if board["driver"] else ""
    yield "system", report["system"] + (" in Windows (WSL)" if seen["wsl"] else "")
    yield "Python", report["python"]
    for name, known in report["libraries"].items():
        yield name, known or "not installed"


def _outlook(report, outlook):
    nbytes = shown(outlook["buffers_nbytes"])
    yield "market", f"{nbytes} of buffers for {outlook['algo']} with {outlook['bars']:,} bars"
    a_sample, dqn = f"{outlook['sample_nbytes']:.0f} B a transition", outlook["algo"] == "dqn"
    if dqn:
        yield "", f"{a_sample} of the replay, which holds {outlook['replay_transitions']:,}"
        if outlook["most_transitions"]:
            yield "", f"a replay of up to {outlook['most_transitions']:,} transitions fits"
    else:
        yield "", f"{a_sample} of the rollout"
    if report["machine"]["gpu"]:
        yield "", f"{shown(outlook['peak_nbytes'])} at the peak, with CUDA's context"
    if outlook["widest_hidden"]:
        yield "", f"hidden layers up to {', '.join(map(str, outlook['widest_hidden']))} fit"
    batches = (f"{algo} {size}" for algo, size in outlook["tier_batch"].items())
    yield "tier batch", ", ".join(batches)
