"""The double-buffered loader: every batch constant and right, whatever is late."""

import itertools
import threading
import time
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from lowgpu.background import FeedError
from lowgpu.copiers import Copiers
from lowgpu.hardware import DeviceError
from lowgpu.loader import DoubleBufferedLoader
from tests.late_device import COMPUTE, EAGER, LAZY, SLOW_CONSUMER, SLOW_LINK, LateDevice

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
BATCHES = 10_000


def numbered(count, pause=0.0):
    """Batch i is filled with i, in arrays that are the same every time."""
    batch = {"x": np.empty((4, 3), np.float32), "y": np.empty(4, np.int32)}
    for i in range(count):
        for array in batch.values():
            array[...] = i
        if pause and i % 50 == 0:
            time.sleep(pause)
        yield batch


def wrong(device, count, ahead=True, debug=False, pause=0.0):
    """The batches, of `count`, that were not constant and right when the device came to use them."""
    seen = []

    def use(batch, i):
        def work():
            seen.append((i, all((array == i).all() for array in batch.values())))

        return work

    loader = DoubleBufferedLoader(
        numbered(count, pause), kind="cpu", copies=device, stream=COMPUTE, ahead=ahead, debug=debug
    )
    for i, batch in enumerate(loader):
        device.work(use(batch, i))
    device.finish()
    assert [i for i, _ in seen] == list(range(count))
    return [i for i, right in seen if not right]


@pytest.mark.parametrize(
    "device, pause",
    [
        (LateDevice(SLOW_CONSUMER), 0),
        (LateDevice(SLOW_LINK), 0),
        (LateDevice(EAGER), 1e-3),
        (LateDevice(seed=1), 0),
    ],
    ids=["slow consumer", "slow link", "slow producer", "random"],
)
def test_ten_thousand_batches_are_constant_and_right(device, pause):
    """Case F8, and the kinds behind it."""
    assert wrong(device, BATCHES, pause=pause) == []


@pytest.mark.parametrize(
    "forget, eager",
    [("copied", SLOW_LINK), ("released", SLOW_CONSUMER), ("refilled", LAZY)],
)
def test_a_wait_that_is_left_out_is_seen(forget, eager):
    assert wrong(LateDevice(eager, forget=forget), 100, ahead=False)
    assert not wrong(LateDevice(eager), 100, ahead=False)


@pytest.mark.parametrize("ahead", [True, False])
def test_poison_never_reaches_a_consumer_that_stops_in_time(ahead):
    for device in LateDevice(SLOW_CONSUMER), LateDevice(SLOW_LINK), LateDevice(seed=2):
        assert wrong(device, 500, ahead, debug=True) == []


@pytest.mark.parametrize("device", [None, LateDevice(LAZY)])
def test_debug_fills_what_was_released_with_nan_and_all_ones(device):
    source = [(np.ones(3, t), np.ones(2, np.int32)) for t in [ml_dtypes.bfloat16] * 3]
    loader = DoubleBufferedLoader(source, kind="cpu", debug=True, copies=device)
    kept = list(loader)
    for floats, integers in kept:
        assert np.isnan(floats.astype(np.float32)).all()
        assert (integers == -1).all()


def test_without_debug_a_batch_stays_until_its_buffer_is_filled_again():
    last = [batch for batch in DoubleBufferedLoader([np.ones(3), np.full(3, 2.0)], kind="cpu")]
    assert [batch.tolist() for batch in last] == [[1] * 3, [2] * 3]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("device", [None, LateDevice(LAZY)])
def test_threads_that_share_an_array_copy_every_row_once(count, device, monkeypatch):
    monkeypatch.setattr("lowgpu.copiers.LARGE", 1)
    source = [
        (np.arange(i, i + 15).reshape(5, 3), np.full((), i), np.full((5, 0), i), np.full((5, 1), i))
        for i in range(9)
    ]
    for ahead in True, False:
        feed = {"kind": "cpu", "copiers": count, "copies": device, "ahead": ahead}
        for i, batch in enumerate(DoubleBufferedLoader(source, **feed)):
            if device is not None:
                device.finish()
            for came, wanted in zip(batch, source[i], strict=True):
                assert came.tolist() == wanted.tolist()
        padded = [np.full((6, 2), 3), np.full((4, 2), 3)]
        *_, last = DoubleBufferedLoader(padded, last="pad", **feed)
        if device is None:
            assert last.tolist() == [[3, 3]] * 4 + [[0, 0]] * 2


def test_closing_ends_the_threads_that_share_an_array(monkeypatch):
    monkeypatch.setattr("lowgpu.copiers.LARGE", 1)
    copiers, target = Copiers(3), np.empty(9)
    copiers.place(np.arange(9.0), target)
    assert [t for t in threading.enumerate() if t.name.startswith("lowgpu-copier")]
    copiers.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lowgpu-copier")]
    assert target.tolist() == list(range(9))


def test_arrays_that_are_not_large_start_no_threads():
    for _ in DoubleBufferedLoader([np.zeros(1000)] * 4, kind="cpu", copiers=4):
        assert not [t for t in threading.enumerate() if t.name.startswith("lowgpu-copier")]


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"x": np.full((2, 3), i), "flag": np.full(5, i % 2 == 0)},
        lambda i: (np.full(2, i), np.full((1, 1), i, np.uint8)),
        lambda i: Pair(np.full(2, i), np.float64(i) * np.ones(())),
        lambda i: [np.full(7, i, np.float16)],
        lambda i: np.arange(12).reshape(3, 4).T * i,
    ],
)
def test_batches_come_out_as_they_went_in(make, ahead):
    loader = DoubleBufferedLoader([make(i) for i in range(5)], kind="cpu", ahead=ahead)
    for i, batch in enumerate(loader):
        wanted = make(i)
        assert type(batch) is type(wanted)
        flat, right = (
            list(b.values()) if isinstance(b, dict) else [b] if isinstance(b, np.ndarray) else b
            for b in (batch, wanted)
        )
        for came, want in zip(flat, right, strict=True):
            assert came.dtype == want.dtype and came.shape == want.shape
            assert came.tobytes() == want.tobytes()
    assert i == 4


def test_two_buffers_take_turns_and_are_the_only_ones():
    loader = DoubleBufferedLoader(numbered(9), kind="cpu")
    seen = [(loader.slot, batch["x"].ctypes.data) for batch in loader]
    assert [slot for slot, _ in seen] == [0, 1] * 4 + [0]
    assert len(set(seen)) == 2


def test_the_callers_buffers_are_filled_and_given_out():
    slots = [(np.full(3, np.nan), np.full(2, -1)) for _ in range(2)]
    loader = DoubleBufferedLoader(
        ((np.full(3, float(i)), np.full(2, i)) for i in range(4)), kind="cpu", slots=slots
    )
    for i, batch in enumerate(loader):
        assert batch[0] is slots[i % 2][0] and batch[1] is slots[i % 2][1]
        assert batch[0].tolist() == [i] * 3


@pytest.mark.parametrize(
    "slots, message",
    [
        ([np.zeros(3)], "slots must be 2 batches, got 1"),
        ([np.zeros(3), np.zeros(4)], r"batch of slots\[1\] must be float64\[3\], got float64\[4\]"),
        ([np.zeros(3, "f4")] * 2, r"batch of slots\[0\] must be float64\[3\], got float32\[3\]"),
        ([{"x": np.zeros(3)}] * 2, r"slots\[0\] must hold \['batch'\], got \['x'\]"),
        ([(np.zeros(3), np.zeros(3))] * 2, r"slots\[0\] must hold \['batch'\], got 2 arrays"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        DoubleBufferedLoader([np.zeros(3)], kind="cpu", slots=slots)


def test_an_iterable_is_read_anew_by_every_loop_and_an_iterator_once():
    again = DoubleBufferedLoader([np.zeros(2), np.ones(2)], kind="cpu")
    for _ in range(3):
        assert [batch[0] for batch in again] == [0, 1]
    once = DoubleBufferedLoader(iter([np.zeros(2)]), kind="cpu")
    assert len(list(once)) == 1
    with pytest.raises(RuntimeError, match="give an iterable to read again"):
        next(iter(once))


def test_a_source_without_batches_gives_none():
    assert list(DoubleBufferedLoader([], kind="cpu")) == []


@pytest.mark.parametrize("ahead", [True, False])
def test_a_short_last_batch_is_refused_or_padded_with_zeros(ahead):
    source = [
        np.full((4, 2), 7.0),
        np.full((4, 2), 7.0),
        np.full((4, 2), 7.0),
        np.full((3, 2), 7.0),
    ]
    loader = DoubleBufferedLoader(source, kind="cpu", ahead=ahead)
    with pytest.raises(ValueError, match=r"batch 3 has 3 of 4 rows; .* give last='pad'"):
        list(loader)
    for device in None, LateDevice(LAZY):
        loader = DoubleBufferedLoader(source, kind="cpu", last="pad", ahead=ahead, copies=device)
        for _ in range(2):
            rows = []
            for batch in loader:
                rows.append(loader.rows)
                if device is None and loader.rows:
                    assert batch.tolist() == [[7, 7]] * 3 + [[0, 0]]
            assert rows == [None, None, None, 3]
    with pytest.raises(ValueError, match="batch 2 came after a short one"):
        list(DoubleBufferedLoader([*source[2:], source[0]], kind="cpu", last="pad", ahead=ahead))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    "second, error, message",
    [
        ({"x": np.zeros(3, "f8")}, TypeError, "x of batch 1 must be float32 .* got float64"),
        ({"x": np.zeros((3, 1), "f4")}, ValueError, "batch 1 must have the shapes"),
        ({"x": np.zeros(4, "f4")}, ValueError, "batch 1 must have the shapes"),
        ({"y": np.zeros(3, "f4")}, ValueError, r"batch 1 must hold \['x'\], got \['y'\]"),
        ({"x": [1, 2, 3]}, TypeError, "x must be a NumPy, CuPy, torch or JAX array, got list"),
    ],
)
def test_a_batch_of_another_form_is_refused_with_its_number(second, error, message, ahead):
    loader = DoubleBufferedLoader([{"x": np.zeros(3, "f4")}, second], kind="cpu", ahead=ahead)
    with pytest.raises(error, match=message):
        list(loader)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"kind": "gpu"}, ValueError, "kind must be 'cpu' or 'cuda', got 'gpu'"),
        ({"library": "jax"}, ValueError, "library must be 'numpy' or 'torch' for kind 'cpu'"),
        ({"source": 3}, TypeError, "source must be an iterable of batches, got int"),
        ({"ahead": 1}, ValueError, "ahead must be one of False, True, got 1"),
        ({"copiers": 0}, ValueError, r"copiers must be in \[1, 64\], got 0"),
        ({"last": "drop"}, ValueError, "last must be 'refuse' or 'pad', got 'drop'"),
        ({"stream": "side"}, TypeError, "stream must be a CUDA stream"),
        ({"source": [np.array(["a"], object)]}, TypeError, "numbers in native byte order"),
        ({"source": [{3: np.zeros(1)}]}, TypeError, "names must be strings, got 3"),
        ({"source": [()]}, ValueError, "at least one array, got none"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DoubleBufferedLoader(**{"source": [np.zeros(3)], "kind": "cpu", **arguments})


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_of_the_source_is_raised_where_its_batch_would_come(at, ahead):
    def source():
        yield from itertools.islice(numbered(10), at)
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(FeedError, match=f"batch {at}: OSError: the disk is gone") as raised:
        for batch in DoubleBufferedLoader(source(), kind="cpu", ahead=ahead):
            seen.append(batch["y"][0])
    assert isinstance(raised.value.__cause__, OSError)
    assert seen == list(range(at))


@pytest.mark.parametrize("device", [None, LateDevice(SLOW_LINK), LateDevice(LAZY)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, None])
def test_leaving_early_leaves_no_thread_and_no_copy_and_the_next_loop_is_right(device, error):
    class Again:
        def __iter__(self):
            return numbered(50)

    stream = None if device is None else COMPUTE
    loader = DoubleBufferedLoader(Again(), kind="cpu", copies=device, stream=stream)
    for _ in range(4):
        try:
            for i, _ in enumerate(loader):
                if i == 3:
                    if error is None:
                        break
                    raise error
        except (KeyboardInterrupt, ZeroDivisionError):
            pass
        assert not [t for t in threading.enumerate() if t.name == "lowgpu-loader"]
        assert device is None or not any(device.queues["copy"])
    right = []
    for i, batch in enumerate(loader):
        check = lambda batch=batch, i=i: right.append((batch["x"] == i).all())
        check() if device is None else device.work(check)
    if device is not None:
        device.finish()
    assert len(right) == 50 and all(right)


def test_buffers_by_name_are_filled_by_name():
    slots = [{"b": np.empty(3), "a": np.empty(3)} for _ in range(2)]
    loader = DoubleBufferedLoader([{"a": np.zeros(3), "b": np.ones(3)}], kind="cpu", slots=slots)
    (batch,) = loader
    assert (batch["a"] == 0).all() and (batch["b"] == 1).all()
    assert (slots[0]["b"] == 1).all() and batch["b"] is slots[0]["b"]


def test_without_a_gpu_the_reason_is_said(monkeypatch):
    monkeypatch.setattr("lowgpu.hardware.gpu_unusable", lambda: "CuPy is not installed")
    with pytest.raises(DeviceError, match=r"cuda was asked for .* CuPy is not installed"):
        DoubleBufferedLoader([np.zeros(3)])


class Failing(LateDevice):
    """Its marks on the consumer's stream fail when they are told to, as after a fault of a kernel."""

    fails, lasts = False, False

    def mark(self, stream=None):
        if self.fails and stream == COMPUTE:
            self.fails = self.lasts
            raise RuntimeError("an illegal memory access was encountered")
        return super().mark(stream)


def test_a_fault_of_the_device_ends_the_thread_and_loses_no_block():
    device = Failing(LAZY)
    loader = DoubleBufferedLoader(
        [np.full(3, i) for i in range(20)], kind="cpu", copies=device, stream=COMPUTE
    )
    for _ in range(5):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            for i, _ in enumerate(loader):
                device.fails = i == 2
    assert len(list(loader)) == 20
    batches = iter(loader)
    next(batches)
    device.fails = device.lasts = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loader.close()
    assert not [t for t in threading.enumerate() if t.name == "lowgpu-loader"]


def test_a_kept_iterator_is_ended_by_the_with_block():
    with DoubleBufferedLoader(numbered(100), kind="cpu") as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match=r"gone through already; close\(\) first"):
            next(iter(loader))
    assert not [t for t in threading.enumerate() if t.name == "lowgpu-loader"]


def test_the_source_is_read_at_most_three_batches_ahead():
    read = []

    def source():
        for i in range(20):
            read.append(i)
            yield np.full(2, i)

    for i, _ in enumerate(DoubleBufferedLoader(source(), kind="cpu")):
        time.sleep(2e-3)
        assert len(read) <= i + 4
    assert len(read) == 20


def test_torch_tensors_come_out_where_torch_is_asked_for():
    torch = pytest.importorskip("torch")
    types = torch.bfloat16, torch.bool, torch.int64, torch.float32

    def batch(i):
        return {str(t): torch.full((3, 2), i % 2, dtype=t) for t in types}

    loader = DoubleBufferedLoader((batch(i) for i in range(6)), kind="cpu", library="torch")
    for i, came in enumerate(loader):
        for name, tensor in batch(i).items():
            assert came[name].dtype == tensor.dtype and torch.equal(came[name], tensor)
    assert i == 5
