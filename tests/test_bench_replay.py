"""What bench/replay.py measures does the work it says, on the CPU."""

import numpy as np

from bench.replay import replaying


def test_a_round_draws_gathers_observes_and_updates():
    work = replaying(np, 1024, 64, 128, bars=500)
    (index, *_, weight), (x,) = work()
    assert (np.diff(index) >= 0).all() and len(np.unique(index)) > 64
    assert x.shape == (128, 56)
    assert np.isfinite(x.astype(np.float32)).all() and x.astype(np.float32)[:, :51].any(1).all()
    assert weight.max() == 1 and (weight > 0).all() and len(np.unique(weight)) > 64
    before = dict(zip(index.tolist(), weight.tolist()))
    (again, *_, weight), _ = work()
    assert not set(again.tolist()) <= set(before), "the clock stood still"
    changed = [w != before[i] for i, w in zip(again.tolist(), weight.tolist()) if i in before]
    assert sum(changed) > len(changed) // 2, "no priority changed"
