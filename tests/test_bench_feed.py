"""What bench/feed.py measures does the work it says, on the CPU."""

import numpy as np
import pytest

from bench import feed
from bench.timing import Sample
from lowgpu.data import sample
from lowgpu.hardware import DeviceError


def test_every_comparison_has_both_sides_and_an_interval(tmp_path):
    rows = [
        *feed.link(np, "cpu", 12, rounds=3),
        *feed.double_buffering(np, "cpu", batch=(4096, 4), rounds=3, side=8),
        *feed.streaming(np, "cpu", tmp_path, rows=512, windows=4, rounds=3, side=8),
    ]
    assert len(rows) == 5
    for row in rows:
        assert row.ratio > 0 and len(row.ours.seconds) == len(row.peer.seconds) == 3
        assert "x [" in row.note


@pytest.mark.filterwarnings("ignore:features")
def test_prefetching_is_compared_with_the_same_epochs_inline():
    (row,) = feed.prefetching(sample(), np, 400, epochs=2, rounds=2, side=64)
    assert row.ratio > 0 and "against inline" in row.note


def test_the_interval_holds_the_gain_and_narrows_where_rounds_agree():
    steady = Sample((1.0,) * 12), Sample((2.0,) * 12)
    assert feed.interval(*steady) == (2, 2, 2)
    noisy = Sample((1.0, 1.1, 0.9, 1.2) * 3), Sample((2.0, 1.9, 2.2, 2.1) * 3)
    gain, low, high = feed.interval(*noisy)
    assert low < gain < high and low > 1


def test_the_overlap_is_the_time_that_both_lanes_share():
    lanes = {"copies": [(0, 2), (3, 5)], "work": [(1, 4), (6, 7)]}
    assert feed.shared_milliseconds(lanes) == 2


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    feed.picture(tmp_path / "a.png", {"copies": [(0, 2), (3, 5)], "work": [(1, 4)]})
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_gpu_it_ends_with_one_sentence(monkeypatch):
    def refuse(asked):
        raise DeviceError(f"device {asked} cannot be used")

    monkeypatch.setattr(feed.hardware, "choose", refuse)
    with pytest.raises(SystemExit, match=r"bench\.feed measures a GPU: device cuda cannot be used"):
        feed.main()
