"""Figures of a policy, worked out by hand on curves short enough for that."""

import numpy as np
import pytest

from lowgpu import evaluate
from lowgpu.evaluate import YEAR_SECONDS, Segments, as_text, equity_curve, figures_of, market

QUARTER = int(YEAR_SECONDS / 4)


def test_returns_compound_and_costs_are_paid_on_what_changes():
    # +1, held, -1: costs of 1, 0 and 2 units at 1 %.
    equity = equity_curve([1, 1, -1], [100, 110, 99, 108.9], 0.01)
    returns = [0.10 - 0.01, -0.10, -0.10 - 0.02]
    assert equity == pytest.approx([1, 1.09, 1.09 * 0.9, 1.09 * 0.9 * 0.88], rel=1e-12)
    assert equity[1:] / equity[:-1] - 1 == pytest.approx(returns)


def test_a_position_earns_the_move_after_it():
    assert equity_curve([1, 0], [100, 110, 121], 0) == pytest.approx([1, 1.1, 1.1])
    assert equity_curve([0, 1], [100, 110, 121], 0) == pytest.approx([1, 1, 1.1])


def test_doing_nothing_earns_nothing():
    equity = equity_curve([0, 0, 0], [100, 50, 200, 1], 0.5)
    assert (equity == 1).all()
    figures = figures_of(equity, [0, 0, 0], 0, 3, 1.0)
    assert figures == {
        "total_return": 0,
        "annualised_return": 0,
        "sharpe": None,
        "max_drawdown": 0,
        "turnover": 0,
        "trades": 0,
        "time_in_market": 0,
        "ruined": False,
    }


def test_the_figures_of_a_curve_of_two_years():
    # Returns +10 %, -50 %, +100 %, 0 over two years: mean 0.15, sum of squares about it 1.17.
    equity = np.cumprod([1, 1.1, 0.5, 2, 1])
    figures = figures_of(equity, [1, 0, 2, 1], 3, 4, 2.0)
    assert figures["total_return"] == pytest.approx(0.1)
    assert figures["annualised_return"] == pytest.approx(1.1**0.5 - 1)
    assert figures["sharpe"] == pytest.approx(np.sqrt(2) * 0.15 / np.sqrt(1.17 / 3))
    assert figures["max_drawdown"] == pytest.approx(-0.5)
    assert figures["turnover"] == pytest.approx(2.0)
    assert figures["trades"] == 3
    assert figures["time_in_market"] == 0.75
    assert not figures["ruined"]


def test_equal_returns_have_no_sharpe_ratio():
    assert figures_of(1.01 ** np.arange(50), np.ones(49), 49, 49, 1.0)["sharpe"] is None


@pytest.mark.parametrize("price", [[100, 200, 50], [100, 250, 400]], ids=["to 0", "below 0"])
def test_equity_that_reaches_0_is_ruined_and_stays_there(price):
    equity = equity_curve([-1, 1], price, 0)
    assert equity.tolist() == [1, 0, 0]
    figures = figures_of(equity, [1, 2], 2, 2, 0.5)
    assert figures["ruined"]
    assert (figures["total_return"], figures["annualised_return"]) == (-1, -1)
    assert figures["max_drawdown"] == -1
    assert all(value is None or np.isfinite(value) for value in figures.values())


def test_what_annualises_past_every_number_is_left_out():
    assert figures_of([1, 2], [1], 1, 1, 1e-6)["annualised_return"] is None


def two_symbols():
    """Four quarters of one symbol, and another that is listed for the last three dates."""
    return Segments(
        symbols=("OLD", "NEW"),
        starts=np.array([0, 5]),
        lengths=np.array([5, 3]),
        price=np.array([100, 110, 110, 121, 121, 10, 5, 10], "f4"),
        date=np.array([0, 1, 2, 3, 4, 2, 3, 4], "i8") * QUARTER,
    )


def test_a_portfolio_is_the_mean_of_its_parts_and_a_part_waits_for_its_first_bar():
    positions = [np.array([1.0, 0, 1, 0]), np.array([0.0, 1])]
    report, date, curves = market(positions, two_symbols(), 0.0)
    assert date.tolist() == [0, QUARTER, 2 * QUARTER, 3 * QUARTER, 4 * QUARTER]
    assert curves["policy"] == pytest.approx([1, 1.05, 1.05, 1.105, (1.21 + 2) / 2])
    assert curves["buy_and_hold"] == pytest.approx([1, 1.05, 1.05, (1.21 + 0.5) / 2, 1.105])
    assert (curves["flat"] == 1).all()
    assert report["portfolio"]["policy"]["total_return"] == pytest.approx(0.605)
    assert report["portfolio"]["policy"]["trades"] == 4 + 1
    assert report["portfolio"]["policy"]["time_in_market"] == pytest.approx(3 / 6)
    assert report["portfolio"]["policy"]["turnover"] == pytest.approx(5 / 2)
    assert report["symbols"]["NEW"]["buy_and_hold"]["max_drawdown"] == pytest.approx(-0.5)
    assert report["bars_per_year"] == pytest.approx(4)
    assert report["bars"] == 8


def test_the_table_shows_every_figure_of_every_strategy():
    report, _, _ = market([np.ones(4), np.ones(2)], two_symbols(), 0.0)
    text = as_text(report)
    for word in (
        "policy",
        "buy and hold",
        "flat",
        "sharpe",
        "max drawdown",
        "OLD",
        "NEW",
        "10.50%",
    ):
        assert word in text


def _cross(positions_of_row, segments, episode):
    """Positions of a network that was made to follow the first column of the table."""
    from lowgpu_kernels.ops.mlp.network import policy_network

    env = _env(episode)
    network = policy_network(env.width, env.actions, (8,))
    parameters = np.zeros(network.parameters, "f4")
    (_, into, _), (_, head, bias) = network.views(parameters)
    # Hidden units hold max(x, 0) and max(-x, 0); the logits are 1 for flat, 2|x| for its side.
    into[0, 0], into[1, 0] = 1, -1
    head[2, 0], head[0, 1], bias[1] = 2, 2, 1
    table = np.zeros((len(positions_of_row), env.width), "f4")
    table[:, 0] = positions_of_row
    last = np.zeros(len(table), "f4")
    last[segments.starts + segments.lengths - 1] = 1
    series = np.stack([segments.price, last])
    return evaluate.greedy_positions(env, network, parameters, table, series, segments, episode)


def _env(episode):
    from lowgpu.envs import make

    return make("market", episode=episode, start="first")


@pytest.mark.parametrize("episode", [2, 3, 100])
def test_a_policy_plays_every_bar_of_every_symbol_once(episode):
    wanted = np.random.default_rng(2).integers(-1, 2, 12)
    segments = Segments(
        symbols=("A", "B", "C"),
        starts=np.array([0, 7, 9]),
        lengths=np.array([7, 2, 3]),
        price=np.linspace(1, 2, 12).astype("f4"),
        date=np.arange(12),
    )
    played = _cross(wanted, segments, episode)
    assert [p.tolist() for p in played] == [
        wanted[0:6].tolist(),
        wanted[7:8].tolist(),
        wanted[9:11].tolist(),
    ]
