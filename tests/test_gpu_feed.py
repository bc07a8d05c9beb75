"""The feed on a GPU: streams that are behind, buffers that are used again, memory that stays."""

import threading
import warnings

import numpy as np
import pytest

from lowgpu import pinned
from lowgpu.envs import make
from lowgpu.loader import DoubleBufferedLoader
from lowgpu.pinned import PinnedPool
from lowgpu.pools import page_locked
from lowgpu.stream_table import StreamedTable, window_plan
from lowgpu.streams import GpuCopies, queue_of
from lowgpu.table_file import save_table
from lowgpu_kernels.arrays import Buffer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_thread_is_left")]
BATCHES = 1000


def numbered(count, length=1 << 16):
    """Batch i is filled with i, in the same arrays every time."""
    batch = {"x": np.empty((length, 4), np.float32), "y": np.empty(length, np.int32)}
    for i in range(count):
        for array in batch.values():
            array[...] = i
        yield batch


class Slow:
    """Work that keeps a stream of `library` busy for a while."""

    def __init__(self, ones):
        self.a = ones((1024, 1024))

    def __call__(self, times):
        for _ in range(times):
            self.a = self.a @ self.a


class SlowLink(GpuCopies):
    """Copies that stay behind: each waits for work on its own stream."""

    def __init__(self):
        super().__init__()
        with self.stream:
            self._slow = Slow(self._cupy.ones)

    def copy_in(self, source, target, stream=None):
        with self.stream:
            self._slow(3)
        super().copy_in(source, target, stream)


@pytest.mark.parametrize("slow", ["consumer", "link", "nothing"])
@pytest.mark.parametrize("debug", [False, True])
def test_a_thousand_batches_are_constant_and_right(slow, debug):
    """Case F8."""
    import cupy

    stream, copies = cupy.cuda.Stream(non_blocking=True), SlowLink() if slow == "link" else None
    loader = DoubleBufferedLoader(numbered(BATCHES), stream=stream, copies=copies, debug=debug)
    with stream:
        wrong, work = cupy.zeros((), np.int64), Slow(cupy.ones)
        for i, batch in enumerate(loader):
            if slow == "consumer":
                work(3)
            for array in batch.values():
                # NaN is not i either.
                wrong += (array != i).sum()
        assert i == BATCHES - 1 and int(wrong) == 0


def test_a_thousand_batches_reach_a_side_stream_of_torch():
    """Case F7: the consumer's current stream is neither the default nor ours."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work = Slow(lambda shape: torch.ones(shape, device="cuda"))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i, batch in enumerate(DoubleBufferedLoader(numbered(BATCHES), library="torch")):
            work(1 + 9 * (i % 10 == 0))
            assert batch["x"].device.type == "cuda" and batch["y"].dtype == torch.int32
            wrong += (batch["x"] != i).sum() + (batch["y"] != i).sum()
    side.synchronize()
    assert int(wrong) == 0


@pytest.mark.parametrize("name", ["bool", "bfloat16", "uint8", "int64", "float16"])
def test_torch_gets_the_element_types_it_knows(name):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    batches = [torch.ones((3, 5), dtype=getattr(torch, name)) * i for i in (0, 1)]
    for i, batch in enumerate(DoubleBufferedLoader(batches, library="torch")):
        assert batch.is_cuda and torch.equal(batch.cpu(), batches[i])


def test_what_is_used_too_long_reads_as_nan_in_debug():
    import cupy

    loader = DoubleBufferedLoader(numbered(3), debug=True)
    kept = list(loader)
    assert cupy.isnan(kept[-1]["x"]).all() and (kept[-1]["y"] == -1).all()


def test_pageable_memory_gives_the_same_batches_with_one_warning(monkeypatch):
    """Case S5."""

    def refused(shape, dtype):
        warnings.warn("no page-locked memory (refused)", stacklevel=2)

    monkeypatch.setattr(pinned, "page_locked", refused)
    with pytest.warns(UserWarning, match="no page-locked memory") as said:
        loader = DoubleBufferedLoader(numbered(50))
    assert len(said) == 1
    for i, batch in enumerate(loader):
        assert (batch["x"] == i).all() and (batch["y"] == i).all()
    assert i == 49


def test_page_locked_memory_is_page_locked():
    import cupy

    array = page_locked((4096,), np.uint8)
    assert cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == 1  # host, registered


def test_a_portfolio_of_every_step_goes_through_a_pool_of_two_blocks():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, PinnedPool(12, 2) as pool:
        arrived = cupy.full((BATCHES, 3), np.nan, np.float32)
        work = Slow(cupy.ones)
        for i in range(BATCHES):
            if i % 100 == 0:
                work(10)
            row = arrived[i]
            place = Buffer(row.data.ptr, row.shape, row.dtype)
            pool.upload(np.full(3, i, np.float32), place, stream.ptr)
        assert (arrived == cupy.arange(BATCHES)[:, None]).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_leaving_early_leaves_no_thread_and_no_copy(error):
    import cupy

    copies = SlowLink()
    loader = DoubleBufferedLoader(list(np.ones((30, 1000), np.float32)), copies=copies)
    for _ in range(3):
        try:
            for i, _ in enumerate(loader):
                if i == 4:
                    if error is None:
                        break
                    raise error
        except KeyboardInterrupt:
            pass
        assert copies.stream.done
        assert not [t for t in threading.enumerate() if t.name == "lowgpu-loader"]
    assert sum(int(cupy.count_nonzero(batch)) for batch in loader) == 30_000


def test_a_thousand_batches_take_no_more_memory_than_two():
    import cupy

    loader = DoubleBufferedLoader([np.ones(1 << 18, np.float32)] * 100)
    free = []
    for _ in range(10):
        for batch in loader:
            batch += 1
        cupy.cuda.get_current_stream().synchronize()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert free[1:] == free[1:2] * 9


def market(rows=20_000):
    env = make("market", episode=50)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, 51)).astype(np.float32)
    series = np.stack([np.exp(rng.normal(size=rows)), np.zeros(rows)]).astype(np.float32)
    series[1, -1] = 1
    return env, features, series


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_graphs_on_two_buffers_see_the_bits_of_a_resident_table(precision, tmp_path):
    """What a trainer does: a graph a buffer, and the next window between two of them."""
    import cupy

    env, features, series = market()
    save_table(tmp_path, env, features, series, precision=precision)
    resident = np.load(tmp_path / "table.npy")  # bfloat16 as its bits
    bits = resident.dtype
    plan, queue = window_plan(env, 4096, precision), queue_of("cuda")
    slots = [{n: cupy.zeros(d.shape, d.dtype) for n, d in plan.declared.items()} for _ in "ab"]
    taken = [cupy.zeros(slots[0]["table"].shape, bits), cupy.zeros((2, 4096), np.float32)]

    def copying(slot):
        def work():
            taken[0][...] = slot["table"].view(bits)
            taken[1][...] = slot["series"]

        return work

    graphs = [queue.repeatable(copying(slot), {}) for slot in slots]
    feed = {"slots": slots, "stream": queue.stream, "debug": True}
    with StreamedTable(tmp_path, env, 4096, precision=precision, seed=3, **feed) as stream:
        for _ in range(40):
            window = stream.next_window()
            graphs[window.slot]()
            values = queue.read({"table": taken[0], "series": taken[1]})
            rows = slice(window.start, window.start + 4096)
            wanted = series[:, rows].copy()
            wanted[1, -1] = 1
            assert values["table"].tobytes() == resident[rows].tobytes()
            assert values["series"].tobytes() == wanted.tobytes()
