"""Our side and the peers', interleaved on one GPU: `python -m bench.versus [NAME ...]`.

Prints both sides, the ratio, the bar and the floor, and writes every sample as JSON. Of a peer's
variants the fastest counts. Figures in the docs come from that JSON.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import dqn, inference, peers, replay
from bench.peers import workload
from bench.timing import Row, device_facts, interleaved, report, save

COPY_BYTES_PER_SECOND = 4.28e12  # measured: H200, device to device, read + written; NUMBERS
BF16_FLOPS_PER_SECOND = 780e12  # measured: H200, 8192^3 bfloat16 product on random data
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """One line of the table, before it is measured.

    Attributes:
        what: the work.
        ours: () -> a callable that does the work and waits for it.
        rivals: {variant: () -> such a callable}.
        items, unit: what a call gets through.
        bar_ratio, bar_seconds: as in Row.
        floor_seconds: the least the machine allows.
        rounds: samples a side.
        calls: units of work in one call of either side; times are divided by it.
    """

    what: str
    ours: object
    rivals: dict
    items: float | None = None
    unit: str = ""
    bar_ratio: float | None = None
    bar_seconds: float | None = None
    floor_seconds: float | None = None
    rounds: int = 10
    calls: int = 1

    def measure(self):
        """The Row, and a Row for each slower variant of the peer."""
        arms = {"ours": self.ours(), **{n: make() for n, make in self.rivals.items()}}
        samples = interleaved(arms, rounds=self.rounds, warmup=2, clock="wall")
        samples = {name: sample.per(self.calls) for name, sample in samples.items()}
        ours = samples.pop("ours")
        fastest = min(samples, key=lambda n: samples[n].median) if samples else None
        others = ", ".join(f"{n} {samples[n].median * 1e6:.4g} µs" for n in samples if n != fastest)
        note = f"peer: {fastest}" if samples else "no peer"
        note += f"; also {others}" if others else ""
        return Row(
            self.what,
            ours,
            samples.get(fastest),
            floor_seconds=self.floor_seconds,
            bar_ratio=self.bar_ratio,
            bar_seconds=self.bar_seconds,
            items=self.items,
            unit=self.unit,
            note=note,
        )


def trainer(envs, steps, minibatch, rows=1_000_000):
    """Our PPO on the peers' workload: the same table, env, network and settings."""
    from lowgpu.config import PPOConfig
    from lowgpu.ppo import PPO

    settings = workload.PPO
    config = PPOConfig(
        total_steps=1000 * envs * steps,  # lr stays; only its schedule would read this
        envs=envs,
        rollout_steps=steps,
        epochs=settings["epochs"],
        minibatches=envs * steps // minibatch,
        gamma=settings["gamma"],
        lam=settings["lam"],
        clip=settings["clip"],
        value_clip=settings["clip"],
        value_weight=settings["value"],
        entropy_weight=settings["entropy"],
        lr=settings["lr"],
        anneal=False,
        eps=settings["adam_eps"],
        max_norm=settings["max_grad_norm"],
        hidden=workload.HIDDEN,
        activation="relu",
        shared=True,
        precision="bfloat16",
    )
    env, table, series = dqn.market(rows)
    return PPO(config, env, table, series, kind="cuda")


def ppo(envs, steps, minibatch, bar, floor=None, variants=("original", "lean, fast random")):
    """Iterations as a run makes them, either side: several are queued, and the last is waited for."""
    calls = 5

    def ours():
        ppo = trainer(envs, steps, minibatch)

        def iterations():
            for _ in range(calls):
                ppo.advance()
            ppo.drain()

        return iterations

    def rival(name):
        def make():
            peer = peers.ppo_jax.PPO(envs, steps, minibatch, **peers.ppo_jax.VARIANTS[name])
            peer.warm()
            return lambda: peer.run(calls)

        return make

    return Comparison(
        f"PPO {envs} x {steps}, minibatch {minibatch}, whole iterations",
        ours,
        {f"JAX, {name}": rival(name) for name in variants},
        items=envs * steps,
        unit="env-steps",
        bar_ratio=bar,
        floor_seconds=floor and envs * steps / floor,
        calls=calls,
    )


def graph_of(queue, calls):
    """A callable that replays `calls` calls of queue(stream) from one graph, and waits."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    queue(stream)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(calls):
        queue(stream)
    graph = stream.end_capture()

    def run(memory=queue):  # the arrays the graph works on live as long as this does
        graph.launch(stream)
        stream.synchronize()

    return run


def rollout(envs, steps, bar):
    def ours():
        ppo = trainer(envs, steps, envs * steps // 128)
        b = ppo.buffers
        from lowgpu_kernels import rollout as op

        def queue(stream):
            ppo._call(
                op,
                b.parameters,
                b.floats,
                b.ints,
                b.clock,
                b.table,
                b.series,
                out=ppo._rollout,
                stream=stream,
            )

        return graph_of(queue, 1)

    def theirs():
        peer = peers.ppo_jax.PPO(envs, steps, envs * steps // 128)
        peer.warm()
        return peer.rollout

    return Comparison(
        f"rollout alone, {envs} x {steps}",
        ours,
        {"JAX, original": theirs},
        items=envs * steps,
        unit="env-steps",
        bar_ratio=bar,
        floor_seconds=envs * steps / 7e9,
    )


def update(batch, bar, calls=20):
    """A PPO update: ours of `calls` minibatches in one call beside PyTorch's, a graph each."""

    def ours():
        import lowgpu_kernels as kernels

        ppo = trainer(16384, 64, batch)
        ppo.advance()
        ppo.drain()
        b, (losses, norms) = ppo.buffers, ppo._learned[0]

        def queue(stream):
            with stream:
                ppo._call(
                    kernels.ppo_update,
                    *(b.parameters, b.m, b.v, b.step),
                    *(*ppo._states, b.table, b.series, ppo._minibatches[:calls]),
                    *(*ppo._taken, b.moments[:calls]),
                    out=(b.gradient, losses[:calls], norms[:calls]),
                )

        return graph_of(queue, 1)

    def rival(name):
        settings = peers.updates_torch.VARIANTS[name]
        return peers.repeated(lambda: peers.updates_torch.PPOUpdate(batch, **settings), calls)

    return Comparison(
        f"PPO update, minibatch {batch}",
        ours,
        {f"PyTorch graph, {name}": rival(name) for name in ("original",)},
        bar_ratio=bar,
        floor_seconds=3 * workload.FLOPS_FORWARD * batch / BF16_FLOPS_PER_SECOND,
        calls=calls,
        rounds=20,
    )


def gae(steps, envs, bar_seconds, calls=20):
    def ours():
        import cupy

        from lowgpu_kernels import gae as op

        rng = np.random.default_rng(0)
        reward, value = (
            cupy.asarray(rng.standard_normal((steps, envs), dtype=np.float32)) for _ in range(2)
        )
        last, ended = value[0].copy(), cupy.asarray(rng.random((steps, envs)) < 0.01)
        out = cupy.empty_like(reward), cupy.empty_like(reward), cupy.empty(2, "f4")
        wanted = op.scratch_specs({"T": steps, "E": envs}, {})
        given = {"out": out, "scratch": [cupy.empty(*spec) for spec in wanted.values()]}
        return graph_of(
            lambda stream: op(reward, value, last, ended, **given, stream=stream), calls
        )

    def rival(name):
        def make():
            peer = peers.gae_jax.GAE(steps, envs, **peers.gae_jax.VARIANTS[name])
            peer.warm()
            return lambda: peer.run(calls)

        return make

    traffic = steps * envs * (4 + 4 + 1 + 4 + 4)  # two outputs are written; the peer writes one
    return Comparison(
        f"GAE {steps} x {envs}",
        ours,
        {f"JAX, {name}": rival(name) for name in peers.gae_jax.VARIANTS},
        bar_seconds=bar_seconds or 1.25 * traffic / COPY_BYTES_PER_SECOND,
        floor_seconds=traffic / COPY_BYTES_PER_SECOND,
        calls=calls,
        rounds=20,
    )


COMPARISONS = {
    "ppo": lambda: ppo(16384, 64, 8192, bar=5, floor=546e6),
    "ppo-large": lambda: ppo(16384, 64, 65536, bar=4, floor=546e6),
    "ppo-small": lambda: ppo(2048, 64, 2048, bar=6),
    "rollout": lambda: rollout(16384, 64, bar=4),
    "update": lambda: update(8192, bar=12),
    "gae-wide": lambda: gae(128, 131072, None),
    "gae": lambda: gae(128, 4096, 8e-6),
}
COMPARISONS |= inference.comparisons(Comparison, graph_of)
COMPARISONS |= replay.comparisons(Comparison, graph_of)
COMPARISONS |= dqn.comparisons(Comparison, graph_of)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"of {', '.join(COMPARISONS)}; all by default")
    ] = None,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = RESULTS / "versus.json",
):
    """Measure ours against the peers on this machine's GPU."""
    unknown = [n for n in names or [] if n not in COMPARISONS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(COMPARISONS)}")
    rows = []
    for name in names or COMPARISONS:
        rows.append(COMPARISONS[name]().measure())
        report(rows[-1:])
        save(out, rows, device_facts())
    report(rows)


if __name__ == "__main__":
    typer.run(main)
