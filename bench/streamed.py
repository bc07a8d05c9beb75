"""Training on a table that streams against the same training on one that stays: `python -m bench.streamed`.

Both trainers are in one process and take turns. It needs a GPU.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import feed
from bench.timing import Row, device_facts, interleaved, report, save
from lowgpu import hardware
from lowgpu.config import from_dict, merge, preset_of
from lowgpu.data.normalizer import Normalizer
from lowgpu.envs import make
from lowgpu.table_file import open_table, save_table
from lowgpu.tasks import TRAINERS
from lowgpu.windows import Streaming

WINDOW, TABLE = 1 << 20, 3  # rows of a window, and windows of the table
BLOCK = 1 << 16  # rows that differ; the table repeats them
MINUTE = 60
STEPS = 10**10  # of a run: more than a bench lasts
WINDOWS = {"ppo": 8, "dqn": 2}  # a sample: about half a second of PPO, three of DQN. Untuned.
SHARE = 0.95  # of the throughput on a resident table that is to be kept


def bars(rows):
    """Features float32 [rows, 51] and series of one symbol's random walk, as the market reads them."""
    rng = np.random.default_rng(0)
    env = make("market")
    features = rng.standard_normal((min(rows, BLOCK), env.table_columns), np.float32)
    price = np.exp(np.cumsum(1e-4 * rng.standard_normal(rows))).astype(np.float32)
    last = np.zeros(rows, np.float32)
    last[-1] = 1
    return np.resize(features, (rows, env.table_columns)), np.stack([price, last])


def save_bars(folder, rows, precision="bfloat16"):
    """Write `bars` as `lowgpu train --data` takes a table that streams."""
    features, series = bars(rows)
    columns = features.shape[1]
    same = Normalizer(np.zeros(columns, np.float32), np.ones(columns, np.float32))
    date = MINUTE * np.arange(rows, dtype=np.int64)
    save_table(
        folder, make("market"), features, series, normalizer=same, precision=precision, date=date
    )


def settings_of(algo, kind, changes):
    """The market's preset for a GPU with DQN learning from its first round, so that both arms do alike."""
    own = {"total_steps": STEPS} | ({"learning_starts": 0} if algo == "dqn" else {})
    given = merge(preset_of("market", algo, "cuda"), {algo: own | changes}, {"algo": algo})
    return from_dict(given | {"device": kind})


class Pair:
    """A trainer whose table streams and one whose table stays, of the same rows.

    Args:
        algo: "ppo" or "dqn".
        kind: "cuda", or "cpu" for a test.
        folder: to write the table to.
        window: rows of a window.
        changes: of the trainer's settings.
    """

    def __init__(self, algo, kind, folder, window=WINDOW, changes=None):
        settings = settings_of(algo, kind, changes or {})
        trainer, own, env = TRAINERS[algo], settings.trainer, make("market")
        features, series = bars(TABLE * window)
        save_table(folder, env, features, series, precision=own.precision)
        self.every = trainer.window_iterations(own, settings.market.episode)
        streaming = Streaming(open_table(folder, env), window, self.every)
        self.streamed = trainer(own, env, streaming, kind=kind)
        table = np.zeros((len(features), env.width), np.float32)
        table[:, : env.table_columns] = features
        self.resident = trainer(own, env, table, series, kind=kind)
        self.steps = own.iteration_steps

    def arms(self, windows):
        """Functions that train for as many windows, by name."""

        def training(trainer):
            def arm():
                for _ in range(windows * self.every):
                    trainer.advance()
                trainer.drain()

            return arm

        return {"ours": training(self.streamed), "resident": training(self.resident)}


def training(pair, algo, window=WINDOW, windows=None, rounds=8):
    """A Row: env steps a second on a table that streams against one that stays.

    A window is ready when an arm's turn comes, as the feed goes on beside the other; of `windows` a
    sample one is therefore for nothing.
    """
    windows = windows or WINDOWS[algo]
    taken = interleaved(pair.arms(windows), rounds=rounds, warmup=1)
    ours, peer = taken["ours"], taken["resident"]
    rate = windows * pair.every * pair.steps / ours.median
    note = f"{rate:.3g} env steps/s; throughput {feed.gain(ours, peer)} of resident"
    what = f"{algo}, windows of {window} rows, {pair.every} iterations on each"
    return Row(what, ours, peer, bar_ratio=SHARE, note=note)


def timeline(cupy, trainer, windows=3):
    """When copies and iterations ran over a few windows, {lane: [(start, end)]} in milliseconds."""
    copies, spans = feed.TimedCopies(), []
    trainer.close()
    trainer.windows.feed["copies"] = copies
    queue, repeat = trainer.queue, trainer._repeat

    def timed():
        # Without what comes before it: the stream waits for the window there.
        with feed.Timed(cupy, queue.stream, spans):
            repeat()

    zero = cupy.cuda.Event()
    zero.record(queue.stream)
    trainer._repeat = timed
    try:
        for _ in range(windows * trainer.windows.every):
            trainer.advance()
        trainer.drain()
    finally:
        del trainer._repeat
        trainer.close()
        del trainer.windows.feed["copies"]
    return feed.since(cupy, zero, {"copies": copies.spans, "iterations": spans})


def main(
    algos: Annotated[list[str] | None, typer.Option("--algo", help="ppo or dqn; both")] = None,
    window: Annotated[int, typer.Option(min=1024, help="rows of a window")] = WINDOW,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
):
    """Measure on the GPU, print the table, and write the JSON and a picture of each timeline."""
    try:
        hardware.choose("cuda")
    except hardware.DeviceError as error:
        sys.exit(f"bench.streamed measures a GPU: {error}")
    import cupy

    path, rows = out or feed.RESULTS / "streamed.json", []
    for algo in algos or TRAINERS:
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(algo, "cuda", folder, window)
            rows.append(training(pair, algo, window))
            lanes = timeline(cupy, pair.streamed)
        picture = path.with_name(f"{path.stem}_{algo}.png")
        feed.picture(picture, lanes, "milliseconds; colours alternate by copy and by iteration")
        copied = sum(end - start for start, end in lanes["copies"])
        beside = feed.shared_milliseconds(lanes) / copied
        print(f"{algo}: {beside:.0%} of the time of copies was beside iterations")
    report(rows)
    save(path, rows, device_facts())


if __name__ == "__main__":
    typer.run(main)
