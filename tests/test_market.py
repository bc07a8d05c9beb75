"""The market env: when a trade is filled, what it earns, how an episode ends."""

import numpy as np
import pytest

from lowgpu.envs import market
from lowgpu_kernels import env_step, observe, reset
from lowgpu_kernels.device import f32

SHORT, FLAT, LONG = 0, 1, 2


def walk(rows, segments=1, seed=0):
    """Prices and ends of segments, float32 [2, rows]."""
    rng = np.random.default_rng(seed)
    last = np.zeros(rows)
    last[np.linspace(0, rows, segments + 1)[1:].astype(int) - 1] = 1
    return np.stack([np.exp(np.cumsum(1e-3 * rng.normal(size=rows))), last]).astype("f4")


def table(rows, seed=0):
    values = np.zeros((rows, 56), "f4")
    values[:, :51] = np.random.default_rng(seed).normal(size=(rows, 51))
    return values


class Episodes:
    """States of some environments, stepped with the ops."""

    def __init__(self, env, series, envs=1, seed=0):
        self.env, self.series, self.seed = env, series, seed
        self.floats, self.ints = np.full((envs, 2), np.nan, "f4"), np.full((envs, 2), -9, "i4")
        self.clock = np.zeros(1, "u8")
        reset(self.floats, self.ints, series, self.clock, env=env, seed=seed)

    def step(self, *actions):
        self.clock += np.uint64(1)
        action = np.array(actions, "i4")
        common = dict(env=self.env, seed=self.seed)
        return env_step(self.floats, self.ints, action, self.series, self.clock, **common)

    def observe(self, table):
        return observe(self.floats, self.ints, table, self.series, env=self.env)


def simulate(state, action, price):
    """The step of bench/peers/ppo_jax.py in NumPy float32, without its reset."""
    t, position, entry, k = state
    new = (action - 1).astype("f4")
    move = price[t + 1] / price[t] - f32(1)
    reward = (new * move - f32(1e-4) * np.abs(new - position)) * f32(100)
    entry = np.where(new != position, price[t], entry)
    return (t + 1, new, entry, k + 1), reward, k + 1 >= 512


def simulated_observation(state, features, price):
    t, position, entry, k = state
    unrealised = np.where(position != 0, position * (price[t] / entry - f32(1)), f32(0))
    portfolio = np.stack([position, unrealised, k.astype("f4") / f32(512)], -1)
    return np.concatenate([features[t, :51], portfolio, np.zeros((len(t), 2), "f4")], -1)


def test_it_is_the_workload_that_the_peers_run_bit_for_bit():
    envs, rows = 64, 4000
    series, features = walk(rows), table(rows)
    episodes = Episodes(market(episode_terminates=True), series, envs)
    # The peers start where a whole episode fits.
    start = np.random.default_rng(1).integers(rows - 513, size=envs)
    episodes.ints[:, 0] = start
    state = start, np.zeros(envs, "f4"), np.ones(envs, "f4"), np.zeros(envs, "i4")
    actions = np.random.default_rng(2).integers(3, size=(512, envs)).astype("i4")
    for action in actions:
        x = episodes.observe(features)
        assert x.tobytes() == simulated_observation(state, features, series[0]).tobytes()
        reward, terminated, truncated = episodes.step(*action)
        state, wanted, done = simulate(state, action, series[0])
        assert reward.tobytes() == wanted.tobytes()
        np.testing.assert_array_equal(terminated, done)
        assert not truncated.any()
    assert terminated.all()


def test_a_trade_earns_the_move_after_it_and_not_the_bar_already_seen():
    series = np.array([[100, 110, 121], [0, 0, 1]], "f4")
    episodes = Episodes(market(cost=0, reward_scale=1, start="first"), series)
    reward, _, truncated = episodes.step(LONG)
    np.testing.assert_allclose(reward, 0.10, rtol=1e-6)
    assert not truncated
    reward, _, truncated = episodes.step(SHORT)
    np.testing.assert_allclose(reward, -0.10, rtol=1e-6)
    assert truncated


def test_cost_is_paid_for_the_change_of_position_only():
    series = np.array([[100] * 6, [0, 0, 0, 0, 0, 1]], "f4")
    episodes = Episodes(market(cost=0.25, reward_scale=2, start="first"), series)
    paid = [episodes.step(a).reward[0] for a in (LONG, LONG, SHORT, FLAT, FLAT)]
    np.testing.assert_array_equal(paid, [-0.5, 0, -1, -0.5, 0])


def test_unrealised_return_is_since_entry_and_zero_when_flat():
    series = np.array([[100, 110, 132, 66, 66], [0, 0, 0, 0, 1]], "f4")
    episodes = Episodes(market(episode=4, start="first"), series)
    portfolio = [episodes.observe(table(5))[0, 51:54]]
    for action in (LONG, LONG, SHORT, FLAT):
        episodes.step(action)
        portfolio.append(episodes.observe(table(5))[0, 51:54])
    wanted = [[0, 0, 0], [1, 0.1, 0.25], [1, 0.32, 0.5], [-1, 0.5, 0.75], [0, 0, 1]]
    np.testing.assert_allclose(portfolio, wanted, rtol=1e-6, atol=1e-7)


def test_the_end_of_the_data_truncates_and_a_whole_episode_does_as_asked():
    series = np.array([[1] * 4, [0, 0, 0, 1]], "f4")
    for terminates in (False, True):
        env = market(episode=5, episode_terminates=terminates, start="first")
        episodes = Episodes(env, series)
        flags = [episodes.step(FLAT)[1:] for _ in range(3)]
        assert [bool(f[0][0]) for f in flags] == [False] * 3
        assert [bool(f[1][0]) for f in flags] == [False, False, True]
        episodes = Episodes(market(episode=2, episode_terminates=terminates, start="first"), series)
        assert not any(flag[0] for flag in episodes.step(FLAT)[1:])
        _, terminated, truncated = episodes.step(FLAT)
        assert (terminated[0], truncated[0]) == (terminates, not terminates)


def test_a_random_start_is_any_row_that_can_be_stepped_from():
    rows, segments = 40, 5
    series = walk(rows, segments)
    starts = Episodes(market(), series, envs=4000).ints[:, 0]
    assert set(starts) == set(np.flatnonzero(series[1] == 0))


@pytest.mark.parametrize("rows", [2, 3, 2**24, 2**24 + 1, 2**25 - 1, 2**31 - 1])
def test_the_largest_unit_float_starts_before_the_last_row(rows):
    env = market()
    floats, ints, u = np.zeros(2, "f4"), np.zeros(2, "i4"), np.full(4, 1 - 2.0**-24, "f4")

    class Ends:
        def __getitem__(self, at):
            return f32(at - rows == rows - 1)

    env.reset(floats, ints, u, Ends(), np.int64(rows))
    assert 0 <= ints[0] <= rows - 2


def test_no_episode_crosses_to_another_symbol():
    series = walk(200, segments=7)
    episodes = Episodes(market(episode=1000), series, envs=300)
    segment = np.concatenate([[0], np.cumsum(series[1])[:-1]])
    began = segment[episodes.ints[:, 0]]
    live = np.ones(300, bool)
    for _ in range(200):
        before = episodes.floats.copy(), episodes.ints.copy()
        truncated = episodes.step(*[LONG] * 300).truncated
        for array, old in zip((episodes.floats, episodes.ints), before):
            array[~live] = old[~live]  # what has ended stays where it ended
        live &= ~truncated
        assert (segment[episodes.ints[:, 0]] == began).all()
        if not live.any():
            return
    raise AssertionError("an episode never ended")


def test_first_starts_at_row_0_and_runs_to_the_end():
    series = walk(30)
    episodes = Episodes(market(episode=1000, start="first"), series)
    assert episodes.ints[0].tolist() == [0, 0]
    steps = 0
    while not episodes.step(FLAT).truncated[0]:
        steps += 1
    assert steps == 28 and episodes.ints[0].tolist() == [29, 29]


def test_a_lost_account_leaves_rewards_and_observations_finite():
    series = np.array([[100, 1e-30, 50, 50], [0, 0, 0, 1]], "f4")
    episodes = Episodes(market(cost=0, reward_scale=1, start="first"), series)
    assert episodes.step(LONG).reward[0] == -1
    x = episodes.observe(table(4))
    assert np.isfinite(x).all() and x[0, 52] == -1


def test_equal_arguments_give_the_same_env_so_it_compiles_once():
    assert market() is market(1e-4, 100.0, 512, False, "random", 51) is market(cost=1e-4)
    assert market(episode=100) is not market()


@pytest.mark.parametrize("features, width", [(50, 56), (57, 64), (8, 16)])
def test_another_number_of_features_makes_another_width(features, width):
    env, series = market(features=features), walk(20)
    assert (env.observation, env.width) == (features + 3, width)
    rows = np.random.default_rng(0).normal(size=(20, width)).astype("f4")
    episodes = Episodes(env, series, envs=33)
    x = episodes.observe(rows)
    np.testing.assert_array_equal(x[:, :features], rows[episodes.ints[:, 0], :features])
    assert not x[:, features:].any()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(cost=-1),
        dict(cost=float("nan")),
        dict(cost=2),
        dict(reward_scale=0),
        dict(episode=0),
        dict(episode=1.5),
        dict(episode_terminates=1),
        dict(start="last"),
        dict(features=0),
        dict(features=510),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        market(**wrong)
