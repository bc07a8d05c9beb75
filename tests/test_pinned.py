"""The pool of page-locked blocks: lent again only when the copy from a block has been done."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from lowgpu.pinned import PinnedPool, PoolExhausted
from tests.late_device import COMPUTE, LAZY, SLOW_LINK, LateDevice


def pool(nbytes=64, blocks=2, device=None):
    return PinnedPool(nbytes, blocks, kind="cpu", copies=device or LateDevice())


def sent(device, forget=None):
    """What 200 numbers are at the other end of a link that copies as late as it can."""
    arrived = np.full((200, 4), np.nan, np.float32)
    lent = pool(16, 3, device)
    for i, target in enumerate(arrived):
        lent.upload(np.full(4, i, np.float32), target)
    device.finish()
    return arrived


def test_a_block_is_filled_again_only_after_its_copy_has_been_done():
    assert (sent(LateDevice(LAZY)) == np.arange(200)[:, None]).all()


def test_a_pool_that_does_not_wait_for_the_copy_is_seen_by_the_test_above():
    assert (sent(LateDevice(LAZY, forget="refilled")) != np.arange(200)[:, None]).any()


def test_a_copy_on_the_callers_stream_is_the_one_waited_for():
    device, arrived = LateDevice(LAZY), np.full((20, 1), np.nan, np.float32)
    lent = pool(4, 1, device)
    for i, target in enumerate(arrived):
        lent.upload(np.full(1, i, np.float32), target, stream=COMPUTE)
    device.finish()
    assert arrived[:, 0].tolist() == list(range(20))


def test_blocks_are_reused_and_never_two_takers_at_once():
    lent = pool(64, 3)
    taken = [lent.take() for _ in range(3)]
    addresses = {block.memory.ctypes.data for block in taken}
    assert len(addresses) == 3
    for block in taken:
        block.give_back()
    for _ in range(50):
        with lent.take() as block:
            assert block.memory.ctypes.data in addresses
            assert block.memory.nbytes == 64


def test_a_block_whose_copy_is_done_is_lent_before_one_whose_copy_is_not():
    device = LateDevice(LAZY)
    lent = pool(64, 2, device)
    late, done = lent.take(), lent.take()
    waiting, passed = device.mark(COMPUTE), device.mark()
    device.drain()
    address = done.memory.ctypes.data
    late.give_back(waiting)
    done.give_back(passed)
    assert lent.take().memory.ctypes.data == address
    assert not waiting.done


def test_an_exhausted_pool_says_its_size_and_what_to_do():
    lent = pool(1000, 2)
    held = [lent.take(), lent.take()]
    with pytest.raises(PoolExhausted, match=r"all 2 blocks of 1\.0 kB are held; give blocks back"):
        lent.take()
    held[0].give_back()
    lent.take()


def test_a_taker_with_a_timeout_gets_the_block_that_another_thread_gives_back():
    lent = pool(blocks=1)
    held = lent.take()
    threading.Timer(0.02, held.give_back).start()
    begun = time.monotonic()
    lent.take(timeout=60).give_back()
    assert time.monotonic() - begun < 30
    with lent.take(), pytest.raises(PoolExhausted):
        lent.take(timeout=0.01)


def test_what_does_not_fit_a_block_is_refused_with_both_sizes():
    lent = pool(64)
    with pytest.raises(ValueError, match="nbytes must be at most 64, what a block has, got 65"):
        lent.take(65)
    with pytest.raises(ValueError, match="got 80"):
        lent.upload(np.zeros(20, np.float32), np.zeros(20, np.float32))
    with pytest.raises(TypeError, match="values must be float32 as the target is, got float64"):
        lent.upload(np.zeros(2), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"values must have shape \(3,\), got \(2,\)"):
        lent.upload(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize(
    "error, arguments", [(TypeError, (1.5,)), (ValueError, (0,)), (ValueError, (4, 0))]
)
def test_a_pool_without_bytes_or_blocks_is_refused(error, arguments):
    with pytest.raises(error, match=r"nbytes|blocks"):
        PinnedPool(*arguments, kind="cpu")


def test_a_block_given_back_is_not_used_again():
    block = pool().take()
    block.give_back()
    for misuse in (block.give_back, lambda: block.memory):
        with pytest.raises(RuntimeError, match="was given back"):
            misuse()


def test_a_block_comes_back_when_filling_it_fails():
    lent = pool(blocks=1)
    with pytest.raises(ZeroDivisionError), lent.take():
        1 / 0  # noqa: B018
    lent.take().give_back()


def test_closing_waits_for_the_copies_and_lends_no_more():
    device, target = LateDevice(LAZY), np.full(4, np.nan, np.float32)
    with pool(device=device) as lent:
        lent.upload(np.ones(4, np.float32), target)
        assert np.isnan(target).all()
    assert (target == 1).all()
    with pytest.raises(RuntimeError, match="closed"):
        lent.take()


def test_a_pool_that_is_forgotten_waits_for_its_copies():
    device, target = LateDevice(LAZY), np.full(4, np.nan, np.float32)
    pool(device=device).upload(np.ones(4, np.float32), target)
    assert (target == 1).all()


def test_threads_share_a_pool_without_mixing_their_numbers():
    device, lent = LateDevice(SLOW_LINK), None
    lent = pool(256, 3, device)
    arrived = np.full((4, 250, 64), np.nan, np.float32)

    def send(thread):
        for i, target in enumerate(arrived[thread]):
            with lent.take(timeout=60) as block:
                staged = block.memory.view(np.float32)
                staged[...] = 1000 * thread + i
                device.copy_in(staged, target)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send, range(4)))
    device.finish()
    wanted = 1000 * np.arange(4)[:, None] + np.arange(250)
    assert (arrived == wanted[..., None]).all()


class Refused(Exception):
    """Stands for CuPy's CUDARuntimeError."""


def test_a_pool_where_page_locking_fails_warns_once_and_sends_the_same_numbers(
    monkeypatch, recwarn
):
    """Case S5: page-locked memory is refused beyond 64 KiB."""

    def refuse(nbytes):
        if nbytes > 65536:
            raise Refused("cudaErrorMemoryAllocation")
        return bytearray(nbytes)

    cuda = SimpleNamespace(
        alloc_pinned_memory=refuse, runtime=SimpleNamespace(CUDARuntimeError=Refused)
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    results = []
    for nbytes in (16384, 32768):
        device = LateDevice(LAZY)
        lent = PinnedPool(nbytes, 4, kind="cuda", copies=device)
        assert lent.pinned == (nbytes == 16384)
        arrived = np.full((40, 4096), np.nan, np.float32)
        for i, target in enumerate(arrived):
            lent.upload(np.full(4096, i, np.float32), target)
        device.finish()
        results.append(arrived)
    assert results[0].tobytes() == results[1].tobytes()
    assert (results[1] == np.arange(40)[:, None]).all()
    assert [str(w.message)[:22] for w in recwarn] == ["no page-locked memory "]
