"""What page-locked memory, double buffering and prefetching are worth: `python -m bench.feed`.

Every comparison does the same work on the same numbers, its arms in turn. A gain is the median over
rounds of peer / ours, with the 95 % interval that resampling the rounds gives. It needs a GPU.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.timing import Row, device_facts, interleaved, report, save
from lowgpu import hardware
from lowgpu.envs import make
from lowgpu.loader import DoubleBufferedLoader
from lowgpu.pinned import PinnedPool
from lowgpu.pools import shown
from lowgpu.prefetch import EpochPrefetcher, EpochWindows
from lowgpu.stream_table import StreamedTable
from lowgpu.streams import GpuCopies, copies_of
from lowgpu.table_file import save_table
from lowgpu_kernels.arrays import library_of

RESULTS = Path(__file__).parent / "results"
SMALL = 12, 1 << 10, 1 << 16, 1 << 20  # bytes; 12 are a portfolio's position, return and time
BULK = 256 << 20
BATCH = 16 << 20, 64  # float32 of a batch, and batches a call: 64 MiB each
SIDE = 2048  # of the square matrices whose product stands for training
WINDOW = 1 << 20  # rows of a window of the market's table
RESAMPLES = 4000


def interval(ours, peer):
    """Median gain, and the ends of its 95 % interval, from rounds that ran in pairs.

    Args:
        ours, peer: Samples of as many rounds.
    """
    gains = np.divide(peer.seconds, ours.seconds)
    drawn = np.random.default_rng(0).choice(gains, (RESAMPLES, len(gains)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(gains)), float(low), float(high)


class Work:
    """Matrix products that stand for training: they take about as long as they are asked to.

    Args:
        arrays: cupy, or numpy for a test.
        side: of the matrices.
    """

    def __init__(self, arrays, side=SIDE):
        self.arrays, self.products = arrays, 1
        self._factor = arrays.full((side, side), 1 / side, np.float32)
        self._value = arrays.ones((side, side), np.float32)
        self._out = arrays.empty_like(self._value)

    def take(self, seconds):
        """Choose how many products take this long."""
        self.products = 20
        self.run(), self.finish()
        begun = time.perf_counter()
        self.run(), self.finish()
        one = (time.perf_counter() - begun) / self.products
        self.products = max(1, round(seconds / one))

    def run(self, batch=None):
        """Queue the products, after reading the batch."""
        if batch is not None:
            self._value[0, 0] = batch.reshape(-1)[-1]
        for _ in range(self.products):
            self.arrays.matmul(self._value, self._factor, out=self._out)

    def finish(self):
        if self.arrays is not np:
            self.arrays.cuda.get_current_stream().synchronize()


def link(arrays, kind, nbytes, rounds=20):
    """Rows: from an array of the host to the device and done, page-locked against pageable."""
    values, target = np.ones(nbytes, np.uint8), arrays.empty(nbytes, np.uint8)
    place = _place(target)
    with PinnedPool(nbytes, 2, kind=kind) as pool, pool.take() as staged:
        copies = pool.copies
        staged.memory[...] = values

        def through_the_pool():
            pool.upload(values, place)
            copies.drain()

        def page_locked():
            copies.copy_in(staged.memory, place)
            copies.drain()

        def pageable():
            copies.copy_in(values, place)
            copies.drain()

        ours = {"through the pool": through_the_pool, "already page-locked": page_locked}
        repeats = max(1, min(100, (1 << 22) // nbytes))
        taken = interleaved({**ours, "pageable": pageable}, rounds=rounds, repeats=repeats)
        refused = "" if pool.pinned else "; page-locked memory was refused"
    peer, rows = taken["pageable"], []
    for name in ours:
        rate, its_rate = (nbytes / side.median / 1e9 for side in (taken[name], peer))
        note = f"{rate:.3g} GB/s, pageable {its_rate:.3g}; gain {gain(taken[name], peer)}{refused}"
        rows.append(Row(f"host to device, {shown(nbytes)}, {name}", taken[name], peer, note=note))
    return rows


def double_buffering(arrays, kind, batch=BATCH, rounds=12, side=SIDE):
    """Rows: batches in host memory that take as long to bring as to train on."""
    length, count = batch
    hosts = [np.full(length, i, np.float32) for i in range(4)]

    source = [hosts[i % 4] for i in range(count)]
    work, target = Work(arrays, side), arrays.empty(length, np.float32)
    place = _place(target)
    pool, copies = PinnedPool(target.nbytes, 2, kind=kind), copies_of(kind)
    loader = DoubleBufferedLoader(source, kind=kind)
    begun = time.perf_counter()
    for host in source:
        pool.upload(host, place)
    pool.copies.drain()
    work.take((time.perf_counter() - begun) / count)

    def ours():
        for given in loader:
            work.run(given)
        work.finish()

    def pageable():
        for host in source:
            copies.copy_in(host, place, 0)
            work.run(target)
        work.finish()

    def one_stream():
        for host in source:
            pool.upload(host, place, 0)
            work.run(target)
        work.finish()

    peers = {"pageable, one stream": pageable, "page-locked, one stream": one_stream}
    taken = interleaved({"ours": ours, **peers}, rounds=rounds, warmup=1)
    what = f"{count} batches of {shown(4 * length)}, two buffers"
    pool.close()
    return [_against(what, taken, peer) for peer in peers]


def prefetching(bars, arrays, length, epochs=6, rounds=6, side=SIDE):
    """Rows: an epoch's features take as long to compute as it takes to train on them."""
    windows, work = EpochWindows(bars, length, seed=1), Work(arrays, side)
    begun = time.perf_counter()
    for epoch in range(2):
        windows(epoch)
    work.take((time.perf_counter() - begun) / 2)

    def training(ahead):
        def arm():
            for epoch in EpochPrefetcher(windows, epochs, ahead=ahead):
                work.run(arrays.asarray(epoch.table.features))
                work.finish()

        return arm

    arms = {"ours": training(1), "inline": training(0)}
    taken = interleaved(arms, rounds=rounds, warmup=1)
    return [_against(f"{epochs} epochs of {length} bars, prefetched", taken, "inline")]


def streaming(arrays, kind, folder, rows=WINDOW, windows=24, rounds=8, side=SIDE):
    """Rows: windows of a table on disk against one that stays, with as much work on each."""
    env = make("market")
    rng = np.random.default_rng(0)
    features = rng.standard_normal((3 * rows, env.table_columns), np.float32)
    series = np.stack([np.ones(3 * rows, np.float32), np.zeros(3 * rows, np.float32)])
    series[1, -1] = 1
    save_table(folder, env, features, series, precision="bfloat16")
    work = Work(arrays, side)
    with StreamedTable(folder, env, rows, precision="bfloat16", kind=kind) as stream:
        resident = arrays.zeros_like(stream.next_window().series)
        begun = time.perf_counter()
        for _ in range(6):
            stream.next_window()
        # A trainer that takes half as long again as the feed should not notice it.
        work.take(1.5 * (time.perf_counter() - begun) / 6)

        def streamed():
            for _ in range(windows):
                work.run(stream.next_window().series)
            work.finish()

        def stays():
            for _ in range(windows):
                work.run(resident)
            work.finish()

        taken = interleaved({"ours": streamed, "resident": stays}, rounds=rounds, warmup=1)
    what = f"{windows} windows of {rows} rows from memory-mapped files"
    return [_against(what, taken, "resident", bar=0.95)]


def _against(what, taken, peer, bar=None):
    ours, peers = taken["ours"], taken[peer]
    note = f"against {peer}: throughput {gain(ours, peers)}"
    return Row(what, ours, peers, bar_ratio=bar, note=note)


def gain(ours, peer):
    """Median gain and its interval as people read them."""
    return "{:.3f}x [{:.3f}, {:.3f}]".format(*interval(ours, peer))


def _place(target):
    """An array as copies are given it."""
    return library_of("target", target).buffer("target", target, 0, True)


class TimedCopies(GpuCopies):
    """GpuCopies that keep when each copy began and ended."""

    def __init__(self):
        super().__init__()
        self.spans = []

    def copy_in(self, source, target, stream=None):
        with Timed(self._cupy, self.stream, self.spans):
            super().copy_in(source, target, stream)


class Timed:
    """A context that adds the two events around what is queued within it to a list."""

    def __init__(self, cupy, stream, spans):
        self._cupy, self._stream, self._spans = cupy, stream, spans

    def __enter__(self):
        self._start = self._cupy.cuda.Event()
        self._start.record(self._stream)

    def __exit__(self, *error):
        end = self._cupy.cuda.Event()
        end.record(self._stream)
        self._spans.append((self._start, end))


def overlap(cupy, batch=BATCH, count=12):
    """When copies and work ran, {lane: [(start, end)]} in milliseconds, measured by events."""
    length, _ = batch
    stream, copies, spans = cupy.cuda.Stream(non_blocking=True), TimedCopies(), []
    hosts = [np.full(length, i, np.float32) for i in range(4)]
    source = [hosts[i % 4] for i in range(count)]
    with stream:
        work = Work(cupy)
        work.take(batch[0] * 4 / 50e9)  # as long as the copy, at about 50 GB/s
        zero = cupy.cuda.Event()
        zero.record(stream)
        for given in DoubleBufferedLoader(source, stream=stream, copies=copies):
            with Timed(cupy, stream, spans):
                work.run(given)
        work.finish()
    return since(cupy, zero, {"copies": copies.spans, "work": spans})


def since(cupy, zero, lanes):
    """Pairs of events, by lane, as milliseconds after the event `zero`."""
    elapsed = cupy.cuda.get_elapsed_time
    return {
        lane: [(elapsed(zero, start), elapsed(zero, end)) for start, end in spans]
        for lane, spans in lanes.items()
    }


def shared_milliseconds(lanes):
    """How long the spans of two lanes ran at once."""
    first, second = lanes.values()
    return sum(
        max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one in first for other in second
    )


def picture(path, lanes, label="milliseconds; colours alternate by batch, so by buffer"):
    """Draw the lanes over time into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, spans in enumerate(lanes.values()):
        for number, (start, end) in enumerate(spans):
            axes.barh(place, end - start, left=start, height=0.7, color=f"C{number % 2}")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel(label)
    figure.savefig(path, dpi=120, format="png")


def main(
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
    bars: Annotated[Path | None, typer.Option(help="CSV to prefetch from; the sample")] = None,
    length: Annotated[int, typer.Option(help="bars of an epoch's window")] = 2000,
):
    """Measure on the GPU, print the table, and write the JSON and the picture of the overlap."""
    try:
        hardware.choose("cuda")
    except hardware.DeviceError as error:
        sys.exit(f"bench.feed measures a GPU: {error}")
    import cupy

    from lowgpu.data import read_csv, sample

    path = out or RESULTS / "feed.json"
    rows = [row for nbytes in (*SMALL, BULK) for row in link(cupy, "cuda", nbytes)]
    rows += double_buffering(cupy, "cuda")
    rows += prefetching(read_csv(bars) if bars else sample(), cupy, length)
    with tempfile.TemporaryDirectory() as folder:
        rows += streaming(cupy, "cuda", folder)
    report(rows)
    save(path, rows, device_facts())
    lanes = overlap(cupy)
    picture(path.with_suffix(".png"), lanes)
    busy = sum(end - start for start, end in lanes["copies"])
    print(f"{shared_milliseconds(lanes) / busy:.0%} of the time of copies was beside work")


if __name__ == "__main__":
    typer.run(main)
