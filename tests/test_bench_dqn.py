"""What bench/dqn.py measures does the work it says, on the CPU."""

import numpy as np

from bench import dqn, versus
from bench.peers import workload


def small(rounds=1):
    return dqn.Training(np, 32, 16, updates=2, rounds=rounds, capacity=256, bars=2000)


def test_an_iteration_steps_every_environment_into_the_ring_and_makes_its_updates():
    training = small()
    b = training.buffers
    before = {n: b[n].copy() for n in ("ints", "kept_ints", "parameters", "target")}
    training.iterations()
    np.testing.assert_array_equal(b["ints"][:, 0], before["ints"][:, 0] + 1)
    np.testing.assert_array_equal(b["kept_ints"][0], before["ints"])
    np.testing.assert_array_equal(b["kept_ints"][1:], before["kept_ints"][1:])
    assert b["head"].tolist() == [1, 8, 0] and b["clock"] == 1 and b["step"] == 2
    moved = np.abs(b["parameters"] - before["parameters"]).max()
    followed = np.abs(b["target"] - before["target"]).max()
    assert 0 < followed <= 2 * workload.DQN["tau"] * moved
    gradient, *_, statistics, norm = training._rounds["out"]
    assert len(norm) == 2 and (norm > 0).all()
    assert (statistics[:, 3] == 0).all() and gradient.any()


def test_iterations_of_one_call_are_calls_of_one_iteration():
    together, apart = small(3), small()
    together.iterations()
    for _ in range(3):
        apart.iterations()
    for name, array in together.buffers.items():
        assert array.tobytes() == apart.buffers[name].tobytes(), name


def test_another_iteration_draws_other_batches_and_every_row_is_the_rings():
    training = small()
    drawn = []
    for _ in range(2):
        training.learn()
        drawn.append(training._index["out"][0].copy())
        _, ints, action, *_ = training._minibatches
        slot, env = np.divmod(drawn[-1].reshape(2, 16), 32)
        np.testing.assert_array_equal(ints, training.buffers["kept_ints"][slot, env])
        np.testing.assert_array_equal(action, training.buffers["kept_mark"][slot, env] >> 2)
    assert (drawn[0] != drawn[1]).any() and len(np.unique(drawn)) > 32


def test_an_update_alone_works_on_the_batches_gathered_last():
    training = small()
    training.learn()
    index = training._index["out"][0].copy()
    training.update()
    assert training.buffers["step"] == 4
    np.testing.assert_array_equal(training._index["out"][0], index)


def test_every_shape_of_the_numbers_is_there_with_its_peers_and_its_bar():
    wanted = {"dqn": (4, 8), "dqn-1": (5, 1), "dqn-230": (6, 1)}
    for name, (bar, updates) in wanted.items():
        found = versus.COMPARISONS[name]()
        assert found.bar_ratio == bar and found.calls == 50 * updates
        assert len(found.rivals) == 4 and 0 < found.floor_seconds < 10e-6
    assert versus.COMPARISONS["dqn-update"]().bar_seconds == 27e-6
