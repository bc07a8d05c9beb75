"""What a policy is worth: greedy play over held-out bars, or over whole episodes.

Evaluation is done on the CPU in float32, from the float32 parameters, wherever the policy was
trained: the same checkpoint gives the same figures everywhere.
"""

from dataclasses import dataclass

import numpy as np

from lowgpu_kernels import experience, reset
from lowgpu_kernels.dims import U64

YEAR_SECONDS = 365.25 * 86_400
FIGURES = (
    "total_return",
    "annualised_return",
    "sharpe",
    "max_drawdown",
    "turnover",
    "trades",
    "time_in_market",
    "ruined",
)
STRATEGIES = ("policy", "buy_and_hold", "flat")

# The action of the largest logit or action value: `experience` takes networks of either.
GREEDY = {"epsilon_start": 0.0, "epsilon_end": 0.0, "precision": "float32"}

# The clock of evaluation's draws: no training reaches it, so no draw is shared.
CLOCK = 2**62


def equity_curve(position, price, cost):
    """Equity of a strategy that holds `position[t]` from the close of bar t to that of bar t + 1.

        return[t] = position[t] * (price[t+1] / price[t] - 1) - cost * |position[t] - position[t-1]|
        equity[0] = 1, equity[t+1] = equity[t] * (1 + return[t])

    Before the first bar the position is 0. What is held at the end stays open and costs nothing
    more. Equity that reaches 0 or less is 0 from there on: the strategy is ruined.

    Args:
        position: share of the equity that is invested, in [-1, 1], one fewer than the bars.
        price: closes, above 0.
        cost: share of the traded value, in [0, 1].

    Returns:
        float64, as many as the bars.
    """
    position, price = np.asarray(position, np.float64), np.asarray(price, np.float64)
    change = np.abs(np.diff(position, prepend=0.0))
    growth = 1 + position * (price[1:] / price[:-1] - 1) - cost * change
    equity = np.concatenate([[1.0], np.cumprod(growth)])
    ruined = np.flatnonzero(growth <= 0)
    if len(ruined):
        equity[ruined[0] + 1 :] = 0
    return equity


def figures_of(equity, position_changes, bars_held, bars, years):
    """The figures of one strategy.

        total_return       equity[-1] / equity[0] - 1
        annualised_return  (equity[-1] / equity[0]) ** (1 / years) - 1
        sharpe             sqrt(bars per year) * mean(r) / std(r, ddof=1), r = per-bar returns up to
                           ruin, bars per year = len(r) / years; None where std is 0
        max_drawdown       the least equity[t] / max(equity[:t+1]) - 1, at most 0
        turnover           sum of |change of position| / years
        trades             changes of position
        time_in_market     share of bars on which the position is not 0
        ruined             whether equity reached 0; total and annualised return are then -1

    Args:
        equity: from 1 on, one point a bar.
        position_changes: |new - old| of every bar.
        bars_held, bars: bars with a position, and all of them.
        years: from the first bar to the last, in years of 365.25 days.

    Source: Sharpe 1994, "The Sharpe Ratio", ex post form with a riskless rate of 0; Magdon-Ismail &
    Atiya 2004, "Maximum Drawdown".
    """
    equity = np.asarray(equity, np.float64)
    changes = np.asarray(position_changes, np.float64)
    alive = equity[: np.argmax(equity <= 0) + 1] if (equity <= 0).any() else equity
    returns = alive[1:] / alive[:-1] - 1
    deviation = returns.std(ddof=1) if len(returns) > 1 else 0.0
    # Equal returns leave a deviation of rounding errors, which is no risk to divide by.
    varies = deviation > 1e-12 * np.abs(returns).max(initial=0)
    growth = equity[-1] / equity[0]
    with np.errstate(over="ignore"):  # minutes of data that double annualise to infinity
        annualised = np.float64(growth) ** (1 / years) - 1
    return {
        "total_return": float(growth - 1),
        "annualised_return": _finite(annualised),
        "sharpe": _finite(np.sqrt(len(returns) / years) * returns.mean() / deviation)
        if varies
        else None,
        "max_drawdown": float((equity / np.maximum.accumulate(equity)).min() - 1),
        "turnover": float(changes.sum() / years),
        "trades": int(np.count_nonzero(changes)),
        "time_in_market": float(bars_held / bars),
        "ruined": bool((equity <= 0).any()),
    }


def _finite(value):
    return float(value) if np.isfinite(value) else None


@dataclass(frozen=True)
class Segments:
    """Symbols one after the other in a table.

    Attributes:
        symbols: names.
        starts, lengths: first row and number of rows of each.
        price: float32, of each row.
        date: seconds since 1970-01-01 UTC, of each row.
    """

    symbols: tuple
    starts: np.ndarray
    lengths: np.ndarray
    price: np.ndarray
    date: np.ndarray

    def rows(self, s):
        """The rows of symbol s."""
        return slice(int(self.starts[s]), int(self.starts[s] + self.lengths[s]))


def greedy_positions(env, network, parameters, table, series, segments, episode):
    """The position that a greedy policy takes on every bar of every symbol but the last.

    Every symbol is one environment that starts flat on its first bar and runs to its last. The
    step within the episode, which the policy sees, starts anew every episode - 1 bars; the position
    and its entry price are kept.

    Args:
        env: a market Env that starts an episode at row 0.
        network, parameters: the policy, float32.
        table, series: of the env, float32.
        segments: where each symbol lies in them.
        episode: bars of an episode.

    Returns:
        A float64 array a symbol, one fewer than its bars.
    """
    count = len(segments.symbols)
    floats = np.zeros((count, len(env.floats)), np.float32)
    ints = np.zeros((count, len(env.ints)), np.int32)
    clock = _clock()
    with_series = dict(env=env, seed=0)
    reset(floats, ints, series, clock, **with_series)
    row, step = env.ints.index("row"), env.ints.index("step")
    ints[:, row] = segments.starts
    most = int(segments.lengths.max()) - 1
    position = np.zeros((most, count))
    for first in range(0, most, episode - 1):
        # Short of a whole episode, so no limit ends it. A symbol that has run out is reset by
        # the op and goes on at row 0, where nobody looks.
        steps = min(episode - 1, most - first)
        ints[:, step] = 0
        data = parameters, floats, ints, clock, table, series
        played = experience(*data, network=network, steps=steps, **GREEDY, **with_series)
        position[first : first + steps] = played.action - 1.0
    return [position[: length - 1, s] for s, length in enumerate(segments.lengths)]


def market(positions, segments, cost):
    """Compare a policy with buy-and-hold and with doing nothing, by symbol and as a portfolio.

    The portfolio gives every symbol an equal part of the capital at the start and never
    rebalances: its equity at a date is the mean over symbols of their equity then, which is 1
    before a symbol's first bar and stays after its last. Years are counted from the dates.

    Args:
        positions: of the policy, an array a symbol.
        segments: the bars they were taken on.
        cost: share of the traded value.

    Returns:
        (report, date, curves): the report for JSON; dates and the equity curves of the portfolio
        for a plot.
    """
    symbols, played = {}, {name: [] for name in STRATEGIES}
    for s, symbol in enumerate(segments.symbols):
        rows = segments.rows(s)
        price, years = segments.price[rows], _years(segments.date[rows])
        ways = (positions[s], np.ones(len(price) - 1), np.zeros(len(price) - 1))
        symbols[symbol] = {}
        for name, position in zip(STRATEGIES, ways):
            equity = equity_curve(position, price, cost)
            changes = np.abs(np.diff(position, prepend=0.0))
            held = np.count_nonzero(position)
            symbols[symbol][name] = figures_of(equity, changes, held, len(position), years)
            played[name].append((equity, changes, held))
    date = np.unique(segments.date)
    portfolio, curves = {}, {}
    for name, parts in played.items():
        together = [
            _on_dates(equity, segments.date[segments.rows(s)], date)
            for s, (equity, _, _) in enumerate(parts)
        ]
        curves[name] = np.mean(together, axis=0)
        portfolio[name] = figures_of(
            curves[name],
            np.concatenate([changes for _, changes, _ in parts]),
            sum(held for _, _, held in parts),
            sum(len(changes) for _, changes, _ in parts),
            _years(date),
        )
        portfolio[name]["turnover"] /= len(parts)
    bars = sum(int(n) for n in segments.lengths)
    report = {
        "env": "market",
        "bars": bars,
        "from": str(date[0].astype("datetime64[s]")),
        "to": str(date[-1].astype("datetime64[s]")),
        "bars_per_year": (len(date) - 1) / _years(date),
        "portfolio": portfolio,
        "symbols": symbols,
    }
    return report, date, curves


def _years(date):
    return float(date[-1] - date[0]) / YEAR_SECONDS


def _on_dates(equity, own, date):
    at = np.searchsorted(own, date, side="right") - 1
    return np.where(at < 0, 1.0, equity[np.maximum(at, 0)])


def episodes(env, network, parameters, count, most_steps, seed):
    """The returns of whole greedy episodes.

    Args:
        env: an Env without data whose episodes end within `most_steps`.
        network, parameters: the policy, float32.
        count: episodes, each from a start of its own.
        most_steps: steps in which every episode ends.
        seed: of the starts.

    Returns:
        The report for JSON: count, mean, standard deviation, least and largest return.
    """
    floats = np.zeros((count, len(env.floats)), np.float32)
    ints = np.zeros((count, len(env.ints)), np.int32)
    clock = _clock()
    reset(floats, ints, None, clock, env=env, seed=seed)
    about = dict(env=env, network=network, steps=most_steps, seed=seed)
    played = experience(parameters, floats, ints, clock, None, None, **about, **GREEDY)
    ended = played.terminated | played.truncated
    assert ended.any(axis=0).all(), "an episode did not end within its limit"
    before_end = np.cumsum(ended, axis=0) - ended == 0
    returns = np.where(before_end, played.reward, 0).sum(axis=0, dtype=np.float64)
    return {
        "env": env.name,
        "episodes": count,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "min_return": float(returns.min()),
        "max_return": float(returns.max()),
    }


def _clock():
    return np.full(1, CLOCK, U64.dtypes[0])


def as_text(report):
    """A report of `market` or `episodes` as a table for people."""
    if "portfolio" not in report:
        return (
            f"{report['env']}: mean return {report['mean_return']:.1f} over {report['episodes']} "
            f"greedy episodes (deviation {report['std_return']:.1f}, "
            f"least {report['min_return']:.1f}, largest {report['max_return']:.1f})\n"
        )
    lines = [
        f"Held-out bars {report['from']} to {report['to']} UTC: {report['bars']:,} bars of "
        f"{len(report['symbols'])} symbols, {report['bars_per_year']:.1f} bars a year by their dates.",
        "Equal parts of the capital in every symbol at the start, no rebalancing.",
        "",
        f"{'portfolio':20}" + "".join(f"{name.replace('_', ' '):>16}" for name in STRATEGIES),
    ]
    for figure in FIGURES:
        row = (_shown(figure, report["portfolio"][name][figure]) for name in STRATEGIES)
        lines.append(f"{figure.replace('_', ' '):20}" + "".join(f"{text:>16}" for text in row))
    lines += [
        "",
        f"{'total return':20}" + "".join(f"{n.replace('_', ' '):>16}" for n in STRATEGIES),
    ]
    for symbol, ways in report["symbols"].items():
        row = (_shown("total_return", ways[name]["total_return"]) for name in STRATEGIES)
        lines.append(f"{symbol:20}" + "".join(f"{text:>16}" for text in row))
    return "\n".join(lines) + "\n"


def _shown(figure, value):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if figure in ("sharpe", "turnover"):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2%}"
