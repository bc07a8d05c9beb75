"""The features: their values, that they never look ahead, and that they are finite and unitless."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import talib
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lowgpu.data import features as features_module
from lowgpu.data import sample
from lowgpu.data.bars import PRICES, Bars, BarsError
from lowgpu.data.features import FEATURES, WARMUP, Normalizer, features
from lowgpu.data.segment import Segment

NAMES = [feature.name for feature in FEATURES]
CALENDAR = ["day_sin", "day_cos", "week_sin", "week_cos", "year_sin", "year_cos"]
MONDAY = int(np.datetime64("2019-01-07T00:00:00", "s").astype(np.int64))
QUIET = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def bars_of(close, volume=None, open=None, high=None, low=None, date=None, symbol="x"):
    close = np.asarray(close, np.float64)
    open = close if open is None else np.asarray(open, np.float64)
    return Bars(
        symbol=(symbol,),
        offsets=np.array([0, len(close)]),
        date=MONDAY + 86_400 * np.arange(len(close))
        if date is None
        else np.asarray(date, np.int64),
        open=open,
        high=np.maximum(open, close) if high is None else np.asarray(high, np.float64),
        low=np.minimum(open, close) if low is None else np.asarray(low, np.float64),
        close=close,
        volume=np.zeros(len(close)) if volume is None else np.asarray(volume, np.float64),
        line=np.arange(2, len(close) + 2),
    )


def joined(*parts):
    """Several bars as the segments of one."""
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("date", *PRICES, "volume", "line")
    }
    offsets = np.cumsum([0] + [len(part) for part in parts])
    return Bars(tuple(name for part in parts for name in part.symbol), offsets, **arrays)


def first(bars, rows):
    """The first rows of bars of one segment."""
    cut = {name: getattr(bars, name)[:rows] for name in ("date", *PRICES, "volume", "line")}
    return replace(bars, offsets=np.array([0, rows]), **cut)


def random_bars(seed, rows, symbol="x"):
    """A walk with spells in which the price stands still, volume is absent, or both jump."""
    rng = np.random.default_rng(seed)
    move = rng.standard_normal(rows) * rng.choice([1e-4, 1e-2, 0.1])
    volume = rng.lognormal(10, 1, rows)
    for _ in range(3):
        start, length = rng.integers(rows), rng.integers(1, 100)
        move[start : start + length] *= rng.choice([0, 1, 30])
        start, length = rng.integers(rows), rng.integers(1, 100)
        volume[start : start + length] *= rng.choice([0, 1, 1e6])
    close = rng.lognormal(2, 3) * np.exp(np.clip(np.cumsum(move), -12, 12))
    open = np.concatenate([close[:1], close[:-1]])
    open = np.where(rng.random(rows) < 0.3, close, open)
    wick = 1 + 0.01 * rng.random((2, rows)) * (rng.random(rows) < 0.8)
    return bars_of(
        close,
        np.minimum(volume, 1e14),
        open,
        np.maximum(open, close) * wick[0],
        np.minimum(open, close) / wick[1],
        MONDAY + np.cumsum(rng.choice([60, 60, 3600, 86_400], rows)),
        symbol,
    )


def test_there_are_51_features_and_their_names_differ():
    assert len(FEATURES) == len(set(NAMES)) == 51
    assert all(feature.formula and 0 <= feature.lookback <= WARMUP for feature in FEATURES)


def test_a_close_that_alternates_between_1_and_2_has_the_values_worked_by_hand():
    # Highs, lows and opens equal the close; a rising bar trades 3 and a falling one 1.
    rows = 120
    close, volume = np.tile([1.0, 2.0], rows // 2), np.tile([1.0, 3.0], rows // 2)
    table = features(bars_of(close, volume))
    row = dict(zip(NAMES, table.features[-1].astype(float)))
    assert table.price[-1] == 2
    worked = {
        # Every return is ±ln 2 and the mean of 60 is 0, so the volatility is ln 2.
        "return_1": 1,
        "return_2": 0,
        "return_5": 1 / np.sqrt(5),
        "return_10": 0,
        "return_60": 0,
        "return_before": -1,
        "gap": 1,
        "body": 0,
        "upper_shadow": 0,
        "lower_shadow": 0,
        "close_place": 0,
        # The true range and its average are 1.
        "true_range": 0,
        "sma_10": 0.5,
        "sma_20": 0.5,
        "sma_50": 0.25,
        "channel_14": 1,
        "channel_60": 1,
        # The mean deviation of 20 prices is 0.5: 0.5 / (0.015 × 0.5) / 100.
        "cci_20": 1 / 1.5,
        "close_z_20": 1,
        "efficiency_20": 0,
        "natr_14": 10,
        "volatility_20_60": 0,
        # Five returns +−+−+: mean 0.2 and deviation √0.96, times ln 2.
        "volatility_5_60": (np.sqrt(0.96) - 1) / (np.sqrt(0.96) + 1),
        "range_volatility_20": -1,
        "skew_60": 0,
        "autocorrelation_60": -59 / 60,
        # Mean volume 2; of the last five, 3 1 3 1 3, 2.2.
        "volume_1_20": 1 / 5,
        "volume_5_20": 0.2 / 4.2,
        "volume_z_20": 1,
        # Seven rises carry 2 × 3 each, seven falls 1 × 1.
        "money_flow_14": (42 - 7) / (42 + 7),
        "signed_volume_20": 0.5,
        "accumulation_20": 0,
        # 10 × (2 × 3 + 1 × 1) / 40 = 1.75, and the close is 2.
        "vwap_20": 0.25,
        "elapsed_20": 0,
    }
    for name, value in worked.items():
        assert row[name] == pytest.approx(value, abs=2e-6), name


def test_the_shape_of_a_bar_has_the_values_worked_by_hand():
    rows = WARMUP + 2
    flat = np.full(rows, 10.0)
    table = features(bars_of(flat + 1, open=flat, high=flat + 2, low=flat - 2))
    row = dict(zip(NAMES, table.features[-1].astype(float)))
    assert row["upper_shadow"] == 0.25 and row["lower_shadow"] == 0.5 and row["close_place"] == 0.5
    # The true range is 4 in every bar and the close stands still.
    assert row["true_range"] == row["return_1"] == row["body"] == row["sma_20"] == 0
    assert row["natr_14"] == pytest.approx(20 * 4 / 11, rel=2**-23)


@pytest.mark.parametrize(
    "date, day, week, year",
    [
        # Thursday the first of January; noon; a year of 366 days on its circle.
        ("1970-01-01T00:00:00", 0, 3 / 7, 0),
        ("2020-01-06T12:00:00", 1 / 2, 0, 5 / 366),
        ("2019-12-29T06:00:00", 1 / 4, 6 / 7, 362 / 366),
        ("1969-12-31T18:00:00", 3 / 4, 2 / 7, 364 / 366),
        ("2020-12-31T23:59:59", 86_399 / 86_400, 3 / 7, 365 / 366),
    ],
)
def test_the_calendar_places_a_date_on_circles_of_day_week_and_year(date, day, week, year):
    rows = WARMUP + 2
    end = int(np.datetime64(date, "s").astype(np.int64))
    table = features(bars_of(np.ones(rows), date=end - 86_400 * np.arange(rows)[::-1]))
    turns = 2 * np.pi * np.repeat([day, week, year], 2)
    expected = np.where(np.arange(6) % 2 == 0, np.sin(turns), np.cos(turns))
    np.testing.assert_allclose(table.features[-1, -6:], expected, rtol=0, atol=2e-7)


def test_times_128_seconds_apart_have_calendar_features_of_their_own():
    # Case G12: in float32 these times are one number.
    rows = WARMUP + 4
    seconds = 1_516_800_000 + np.array([0, 1, 60, 90])
    date = np.concatenate([seconds[0] - 60 * np.arange(1, WARMUP + 1)[::-1], seconds])
    table = features(bars_of(np.ones(rows), date=date))
    assert table.date.tolist() == seconds.tolist() and table.date.dtype == np.int64
    assert len(set(table.features[:, NAMES.index("day_sin")].tolist())) == 4


@given(seed=st.integers(0, 2**32), row=st.integers(0, 200))
@settings(max_examples=40, **QUIET)
def test_windowed_features_equal_their_formula_written_out_for_one_row(seed, row):
    bars = random_bars(seed, 300)
    at = WARMUP + row
    values = dict(zip(NAMES, features(bars).features[row].astype(float)))
    past = {name: getattr(bars, name)[: at + 1] for name in ("date", *PRICES, "volume")}
    r = np.diff(np.log(past["close"]))
    c, v = past["close"], past["volume"]
    still = 1e-9

    def over(a, b, least=0.0):
        return a / b if b > least else 0.0

    def contrast(a, b, least=0.0):
        return over(a - b, a + b, least)

    sigma = r[-60:].std()
    expected = {
        "return_1": over(r[-1], sigma, still),
        "return_20": over(r[-20:].sum(), sigma * np.sqrt(20), still),
        "return_before": over(r[-2], sigma, still),
        "gap": over(np.log(past["open"][-1] / c[-2]), sigma, still),
        "body": over(np.log(c[-1] / past["open"][-1]), sigma, still),
        "efficiency_20": over(c[-1] - c[-21], np.abs(np.diff(c[-21:])).sum(), still * c[-1]),
        "close_z_20": over(c[-1] - c[-20:].mean(), c[-20:].std(), still * c[-1]),
        "volume_1_20": contrast(v[-1], v[-20:].mean()),
        "volume_5_20": contrast(v[-5:].mean(), v[-20:].mean()),
        "volume_z_20": over(v[-1] - v[-20:].mean(), v[-20:].std(), still * v[-20:].mean()),
        "volatility_5_60": contrast(r[-5:].std(), sigma, still),
        "signed_volume_20": over((np.sign(r[-20:]) * v[-20:]).sum(), v[-20:].sum()),
    }
    deviation = r[-60:] - r[-60:].mean()
    if sigma > 1e-6:
        expected["skew_60"] = (deviation**3).mean() / sigma**3
        expected["autocorrelation_60"] = (deviation[1:] * deviation[:-1]).sum() / (60 * sigma**2)
    span = np.log(past["high"] / past["low"])[-20:]
    parkinson = np.sqrt((span**2).mean() / (4 * np.log(2)))
    expected["range_volatility_20"] = contrast(parkinson, r[-20:].std(), still)
    for name, value in expected.items():
        # float32 keeps 2^-24 of a value; the sums of both sides differ by far less.
        assert values[name] == pytest.approx(np.clip(value, -10, 10), rel=1e-6, abs=1e-6), name


def test_indicators_equal_those_of_ta_lib_where_prices_move():
    rng = np.random.default_rng(0)
    close = 50 * np.exp(np.cumsum(0.02 * rng.standard_normal(1000)))
    open = close * np.exp(0.01 * rng.standard_normal(1000))
    high, low = np.maximum(open, close) * 1.01, np.minimum(open, close) * 0.99
    volume = rng.lognormal(10, 1, 1000)
    mine = dict(zip(NAMES, features(bars_of(close, volume, open, high, low)).features.T))
    atr = talib.ATR(high, low, close, 14)
    upper, middle, lower = talib.BBANDS(close, 20, 2, 2)
    fastk, _ = talib.STOCHF(high, low, close, 14)
    theirs = {
        "rsi_7": talib.RSI(close, 7) / 50 - 1,
        "rsi_14": talib.RSI(close, 14) / 50 - 1,
        "channel_14": fastk / 50 - 1,
        "close_z_20": 2 * (close - middle) / ((upper - lower) / 2),
        "money_flow_14": talib.MFI(high, low, close, volume, 14) / 50 - 1,
        "sma_20": (close - middle) / atr,
        "macd": talib.MACD(close, 12, 26, 9)[0] / atr,
        "cci_20": talib.CCI(high, low, close, 20) / 100,
        "adx_14": talib.ADX(high, low, close, 14) / 50,
        "natr_14": talib.NATR(high, low, close, 14) / 5,
        "slope_20": 10 * talib.LINEARREG_SLOPE(close, 20) / atr,
        "parabolic": (close - talib.SAR(high, low, 0.02, 0.2)) / atr,
        "aroon_25": talib.AROONOSC(high, low, 25) / 100,
    }
    for name, values in theirs.items():
        # TA-Lib's Bollinger deviation takes a difference of squares, hence the wider margin.
        expected = np.clip(values[WARMUP:], -10, 10)
        np.testing.assert_allclose(mine[name], expected, rtol=1e-5, atol=2e-5, err_msg=name)


@given(seed=st.integers(0, 2**32), cut=st.integers(WARMUP + 2, 699))
@settings(max_examples=60, **QUIET)
@example(seed=0, cut=WARMUP + 2)
@example(seed=1, cut=699)
def test_no_feature_looks_ahead_the_rows_of_a_shorter_history_are_the_same_bits(seed, cut):
    bars = random_bars(seed, 700)
    whole, part = features(bars), features(first(bars, cut))
    rows = cut - WARMUP
    assert len(part) == rows
    assert part.features.tobytes() == whole.features[:rows].tobytes()
    assert part.price.tobytes() == whole.price[:rows].tobytes()
    assert part.date.tolist() == whole.date[:rows].tolist()
    assert part.last.tolist() == [0] * (rows - 1) + [1]


@pytest.mark.parametrize("decades", [12, -12])
def test_no_feature_looks_ahead_when_the_price_changes_its_order_of_magnitude(decades):
    # TA-Lib compares with absolute thresholds, so a scale taken from later prices would show.
    move = np.random.default_rng(0).standard_normal(300)
    bars = bars_of(10 ** (np.linspace(0, decades, 300) + 0.01 * move), np.full(300, 5.0))
    whole = features(bars)
    for cut in (70, 150, 299):
        part = features(first(bars, cut))
        assert part.features.tobytes() == whole.features[: cut - WARMUP].tobytes()


@pytest.mark.parametrize("cut", [63, 64, 65, 1000, 1021, 2047, 3269])
def test_no_feature_of_the_sample_looks_ahead(cut):
    bars = sample()
    rows = bars.rows(0)
    share = bars_of(*(getattr(bars, n)[rows] for n in ("close", "volume", "open", "high", "low")))
    whole, part = features(share), features(first(share, cut))
    assert part.features.tobytes() == whole.features[: cut - WARMUP].tobytes()


def test_the_look_ahead_test_sees_a_feature_that_looks_one_bar_ahead(monkeypatch):
    ahead = replace(FEATURES[0], compute=lambda s: np.append(s.returns[1:], s.returns[-1]))
    monkeypatch.setattr(features_module, "FEATURES", (ahead, *FEATURES[1:]))
    bars = random_bars(0, 200)
    whole, part = features(bars), features(first(bars, 150))
    assert part.features.tobytes() != whole.features[: 150 - WARMUP].tobytes()


@given(
    seed=st.integers(0, 2**32), rows=st.lists(st.integers(WARMUP + 2, 150), min_size=2, max_size=4)
)
@settings(max_examples=20, **QUIET)
def test_a_segment_has_the_same_features_alone_and_among_others(seed, rows):
    alone = [random_bars(seed + i, n, f"s{i}") for i, n in enumerate(rows)]
    table = features(joined(*alone))
    assert table.symbol == tuple(f"s{i}" for i in range(len(rows)))
    for i, bars in enumerate(alone):
        mine, theirs = table.segment == i, features(bars)
        assert table.features[mine].tobytes() == theirs.features.tobytes()
        assert table.last[mine].tolist() == theirs.last.tolist()
        assert table.price[mine].tolist() == theirs.price.tolist()


def test_each_segment_loses_its_warm_up_and_ends_with_a_flag():
    bars = joined(random_bars(1, WARMUP + 2, "a"), random_bars(2, WARMUP + 3, "b"))
    table = features(bars)
    assert table.row.tolist() == [60, 61, 122, 123, 124]
    assert table.segment.tolist() == [0, 0, 1, 1, 1]
    assert table.last.tolist() == [0, 1, 0, 0, 1]
    assert table.date.tolist() == bars.date[table.row].tolist()
    assert table.price.tolist() == bars.close[table.row].astype(np.float32).tolist()
    assert len(table) == 5 and table.features.shape == (5, 51)
    kinds = [getattr(table, name).dtype for name in ("features", "price", "last", "segment")]
    assert kinds == [np.float32, np.float32, np.float32, np.int32]
    assert table.features.flags.c_contiguous


def test_a_segment_with_fewer_than_two_bars_after_the_warm_up_is_refused():
    bars = joined(random_bars(1, 100, "long"), random_bars(2, WARMUP + 1, "short"))
    with pytest.raises(BarsError, match="short has 61 bars, and 62 are wanted"):
        features(bars)
    with pytest.raises(TypeError, match="bars: wanted Bars, got ndarray"):
        features(np.ones(100))


def test_every_feature_is_defined_from_its_look_back_on_and_not_before():
    segment = Segment(random_bars(3, 150), slice(0, 150))
    for feature in FEATURES:
        values = feature.compute(segment)
        assert values.shape == (150,)
        undefined = np.flatnonzero(~np.isfinite(values))
        assert undefined.tolist() == list(range(feature.lookback)), feature.name


@given(
    price=st.floats(1e-18, 1e18),
    volume=st.one_of(st.just(0.0), st.floats(0, 1e24)),
    step=st.integers(1, 10**7),
)
@settings(max_examples=60, **QUIET)
@example(price=0.1, volume=0.1, step=60)
@example(price=33.33, volume=1e24, step=86_400)
@example(price=1e-18, volume=5e-324, step=1)
def test_a_price_that_never_moves_makes_every_feature_zero_but_the_calendar(price, volume, step):
    rows = 200
    bars = bars_of(np.full(rows, price), np.full(rows, volume), date=step * np.arange(rows))
    table = features(bars)
    assert np.all(table.features[:, [name not in CALENDAR for name in NAMES]] == 0)
    assert np.isfinite(table.features).all()


def test_a_price_that_moves_by_rounding_alone_counts_as_one_that_does_not_move():
    rng = np.random.default_rng(0)
    close, open = 33.33 * (1 + 2.0**-52 * rng.integers(-9, 9, (2, 300)))
    table = features(bars_of(close, np.full(300, 7.7), open))
    moving = [name for name, any in zip(NAMES, table.features.any(axis=0)) if any]
    assert set(moving) <= set(CALENDAR)


def test_a_price_that_stops_moving_for_years_ends_with_every_feature_zero():
    bars = random_bars(5, 300)
    close = np.concatenate([bars.close, np.full(1000, bars.close[-1])])
    table = features(bars_of(close, np.concatenate([bars.volume, np.zeros(1000)])))
    moving = [name for name, value in zip(NAMES, table.features[-1]) if value != 0]
    assert set(moving) <= set(CALENDAR)
    assert np.isfinite(table.features).all()


def test_days_without_volume_leave_all_features_finite():
    # Case G8: two days of no trade among years of it; a relative change would be infinite.
    rows = 700
    bars = random_bars(6, rows)
    volume = np.random.default_rng(0).lognormal(20, 1, rows)
    volume[[300, 555]] = 0
    with np.errstate(all="raise"):
        table = features(replace(bars, volume=volume))
    assert np.isfinite(table.features).all()
    at = table.row.tolist().index(300)
    assert table.features[at, NAMES.index("volume_1_20")] == -1


@pytest.mark.parametrize("rows", [100, 8111])
def test_years_without_volume_make_the_volume_features_zero_and_warn_once(rows):
    # Case G9.
    bars = replace(random_bars(7, rows), volume=np.zeros(rows))
    table = features(bars)
    volume = NAMES.index("volume_1_20"), NAMES.index("vwap_20") + 1
    assert np.all(table.features[:, slice(*volume)] == 0)
    with pytest.warns(
        UserWarning, match="volume_z_20.* are constant, and normalized to 0"
    ) as caught:
        normalizer = Normalizer.fit(table.features)
    assert len(caught) == 1
    out = normalizer.apply(table.features)
    assert np.isfinite(out).all() and np.all(out[:, slice(*volume)] == 0)


LOG = st.floats(-18, 18)


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=60, **QUIET)
def test_every_legal_bar_gives_finite_features_within_the_clip(data, seed):
    rng = np.random.default_rng(seed)
    rows = data.draw(st.integers(WARMUP + 2, 130))
    level, spread = data.draw(LOG), data.draw(st.sampled_from([0, 1e-15, 1e-6, 1, 40]))
    prices = 10 ** np.clip(level + spread * rng.standard_normal((4, rows)), -18, 18)
    prices = np.clip(prices, 1e-18, 1e18)
    prices[:, rng.random(rows) < data.draw(st.sampled_from([0, 0.5]))] = prices[0, 0]
    volume = 10 ** rng.uniform(-300, 24, rows) * (rng.random(rows) < 0.7)
    bars = bars_of(
        prices[0],
        np.minimum(volume, 1e24),
        prices[1],
        prices.max(axis=0),
        prices.min(axis=0),
        np.cumsum(rng.integers(1, 10 ** rng.integers(1, 8), rows)),
    )
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        table = features(bars)
    assert np.isfinite(table.features).all() and np.abs(table.features).max() <= 10
    assert np.all(table.price > 0) and np.isfinite(table.price).all()


@given(seed=st.integers(0, 2**32), price=st.integers(-15, 15), volume=st.integers(-30, 30))
@settings(max_examples=30, **QUIET)
def test_features_do_not_depend_on_the_unit_of_price_or_volume(seed, price, volume):
    # A power of two scales without rounding, so the bits must be the same.
    bars = random_bars(seed, 200)
    scaled = {name: np.ldexp(getattr(bars, name), price) for name in PRICES}
    other = replace(bars, volume=np.ldexp(bars.volume, volume), **scaled)
    assert features(other).features.tobytes() == features(bars).features.tobytes()


def test_features_of_the_sample_are_finite_and_of_order_one():
    table = features(sample())
    assert table.features.shape == (12_154 - 5 * WARMUP, 51)
    assert np.isfinite(table.features).all()
    assert table.features.std(axis=0).max() < 3
    assert np.mean(np.abs(table.features) == 10) < 1e-3


def test_the_normalizer_subtracts_the_mean_and_divides_by_the_deviation():
    train = np.array([[1, 2], [3, 6], [5, 4]], np.float32)
    normalizer = Normalizer.fit(train)
    assert normalizer.mean.tolist() == [3, 4]
    np.testing.assert_allclose(normalizer.std, np.sqrt([8 / 3, 8 / 3]), rtol=2**-23)
    out = normalizer.apply(np.array([[3, 4], [5, 2]], np.float32))
    np.testing.assert_allclose(out, [[0, 0], [np.sqrt(1.5), -np.sqrt(1.5)]], rtol=2**-22)
    assert out.dtype == np.float32


def test_the_normalizer_clips_what_the_training_rows_did_not_foresee():
    normalizer = Normalizer.fit(np.array([[0], [2]], np.float32))
    assert normalizer.apply(np.array([[1e30], [-1e30]], np.float32)).tolist() == [[10], [-10]]


@pytest.mark.parametrize("rows", [1, 31, 16_384, 20_011])
def test_a_constant_column_is_normalized_to_zero_with_one_warning(rows):
    train = np.random.default_rng(0).standard_normal((rows, 3)).astype(np.float32)
    train[:, 1] = 0.1
    with pytest.warns(UserWarning, match="return_2.* constant, and normalized to 0") as caught:
        normalizer = Normalizer.fit(train)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert normalizer.std[1] == 0
    assert np.all(normalizer.apply(np.float32([[1, 7, 1], [2, -7, 2]]))[:, 1] == 0)
    if rows > 1:
        moved = normalizer.apply(train)[:, [0, 2]]
        # A mean of n float32 values near 1, rounded to float32.
        np.testing.assert_allclose(moved.mean(axis=0, dtype=np.float64), 0, atol=2**-23)
        np.testing.assert_allclose(moved.std(axis=0, dtype=np.float64), 1, rtol=2**-20)


def test_the_normalizer_returns_from_its_dict_with_the_same_bits():
    train = np.random.default_rng(1).standard_normal((100, 51)).astype(np.float32)
    normalizer = Normalizer.fit(train)
    arrays = normalizer.to_dict()
    assert {name: array.dtype for name, array in arrays.items()} == dict.fromkeys(
        ("mean", "std"), np.dtype(np.float32)
    )
    again = Normalizer.from_dict(arrays)
    arrays["mean"][:] = 9
    assert again.apply(train).tobytes() == normalizer.apply(train).tobytes()


def test_the_normalizer_refuses_what_it_cannot_use():
    good = np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match="features: wanted finite values, got others in return_2 "):
        Normalizer.fit(np.array([[1, np.nan]], np.float32))
    with pytest.raises(ValueError, match="wanted at least one row"):
        Normalizer.fit(good[:0])
    with pytest.raises(TypeError, match="features: wanted a NumPy array of float32, got float64"):
        Normalizer.fit(good.astype(np.float64))
    with pytest.raises(ValueError, match=r"wanted shape \[N, F\], got \(3,\)"):
        Normalizer.fit(good[:, 0])
    one = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="features: wanted 2 columns, got 1"):
        Normalizer(one, one).apply(good[:, :1])
    with pytest.raises(ValueError, match="std: wanted values >= 0, got -1"):
        Normalizer(one, -one)
    with pytest.raises(ValueError, match="mean: wanted finite values, got nan at 0"):
        Normalizer(one * np.float32(np.nan), one)
    with pytest.raises(ValueError, match="std: wanted shape"):
        Normalizer(one, np.ones(3, np.float32))
    with pytest.raises(TypeError, match="mean: wanted a NumPy array of float32, got list"):
        Normalizer([1.0], one)
    with pytest.raises(ValueError, match=r"arrays: wanted the names mean and std, got \['mean'\]"):
        Normalizer.from_dict({"mean": one})


def test_features_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features(random_bars(8, 300))
