"""What bench/replay.py measures does the work it says, on the CPU."""

import numpy as np

from bench.replay import replaying


def test_a_round_draws_gathers_observes_and_updates():
    work = replaying(np, 1024, 64, 128, bars=500)
    (index, drawn, least), rows, (x,) = work()
    assert (np.diff(index) >= 0).all() and len(np.unique(index)) > 64
    assert (drawn >= least.min()).all() and x.shape == (128, 56)
    assert np.isfinite(x.astype(np.float32)).all() and x.astype(np.float32)[:, :51].any(1).all()
    weight = rows[-1]
    np.testing.assert_allclose(weight, (least.min() / drawn) ** np.float32(0.4), rtol=1e-5)
    before = index.copy(), drawn.copy()
    (again, drawn_again, _), *_ = work()
    assert (again != before[0]).any(), "the clock stood still"
    same = np.isin(again, before[0])
    assert same.any() and not np.isin(drawn_again[same], before[1]).all(), "no priority changed"
