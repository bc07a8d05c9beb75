"""The bars reader: it reads what is right, and names the line, column and value of what is not."""

import gzip
import os
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lowgpu.data import Bars, BarsError, csv_reader, read_csv, sample

HEADER = "date,open,high,low,close,volume\n"
GOOD = HEADER + "2020-01-01,10,12,8,11,100\n2020-01-02,11,13,9,12,0\n2020-01-03,12,14,10,13,1e2\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="bars.csv"):
        path = tmp_path / name
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def epoch(text):
    return int(np.datetime64(text, "s").astype(np.int64))


def same(a, b):
    return a.symbol == b.symbol and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("offsets", "line", *csv_reader.COLUMNS)
    )


@pytest.mark.parametrize("name", ["spy.csv", "spy.csv.gz"])
def test_a_file_is_read_as_its_numbers_dates_and_lines(write, name):
    bars = read_csv(write(GOOD, name))
    assert bars.symbol == ("spy",)
    assert bars.offsets.tolist() == [0, 3] and bars.rows(0) == slice(0, 3) and len(bars) == 3
    assert bars.date.tolist() == [epoch(f"2020-01-0{day}") for day in (1, 2, 3)]
    assert bars.open.tolist() == [10, 11, 12] and bars.high.tolist() == [12, 13, 14]
    assert bars.low.tolist() == [8, 9, 10] and bars.close.tolist() == [11, 12, 13]
    assert bars.volume.tolist() == [100, 0, 100]
    assert bars.line.tolist() == [2, 3, 4]
    assert bars.date.dtype == bars.line.dtype == bars.offsets.dtype == np.int64
    assert bars.close.dtype == bars.volume.dtype == np.float64


def test_columns_are_found_in_any_order_and_case(write):
    text = "Volume,CLOSE,low,High, Open ,Date\n100,11,8,12,10,2020-01-01\n0,12,9,13,11,2020-01-02\n"
    bars = read_csv(write(text))
    assert bars.open.tolist() == [10, 11] and bars.volume.tolist() == [100, 0]


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("\n", "\r\n"),
        GOOD[:-1],
        GOOD + "\n\r\n\n",
        "\ufeff" + GOOD,
        GOOD.replace("10,12", '"10","12"'),
    ],
    ids=["CRLF", "no last line end", "empty lines at the end", "BOM", "quotes"],
)
def test_line_ends_a_byte_order_mark_and_quotes_change_nothing(write, text):
    assert same(read_csv(write(text)), read_csv(write(GOOD)))


def test_interleaved_symbols_become_segments_in_order_of_first_appearance(write):
    rows = [
        "B,2020-01-01,3",
        "A,2020-01-01,1",
        "B,2020-01-02,4",
        "C,2020-01-01,9",
        "A,2020-01-02,1.2",
    ]
    lines = [f"{s},{d},{p},{p},{p},{p},0\n" for s, d, p in (row.split(",") for row in rows)]
    bars = read_csv(write("symbol," + HEADER + "".join(lines)))
    assert bars.symbol == ("B", "A", "C")
    assert bars.offsets.tolist() == [0, 2, 4, 5]
    assert bars.close.tolist() == [3, 4, 1, 1.2, 9]
    assert bars.line.tolist() == [2, 4, 3, 6, 5]


def test_an_adjusted_close_scales_all_four_prices_and_not_the_volume(write):
    text = "date,open,high,low,close,volume,Adj Close\n2020-01-01,10,12,8,10,7,5\n"
    bars = read_csv(write(text + "2020-01-02,10,12,8,8,9,8\n"))
    assert bars.open.tolist() == [5, 10] and bars.high.tolist() == [6, 12]
    assert bars.low.tolist() == [4, 8] and bars.close.tolist() == [5, 8]
    assert bars.volume.tolist() == [7, 9]


@pytest.mark.parametrize(
    "text, utc",
    [
        ("2020-01-31", "2020-01-31T00:00:00"),
        ("2020-01-31T15:30", "2020-01-31T15:30:00"),
        ("2020-01-31 15:30:01", "2020-01-31T15:30:01"),
        ("2020-01-31T15:30:00.000Z", "2020-01-31T15:30:00"),
        ("2020-01-31T15:30:00+05:30", "2020-01-31T10:00:00"),
        ("1965-12-31T23:59:59-01:00", "1966-01-01T00:59:59"),
    ],
)
def test_a_date_without_an_offset_is_utc_and_an_offset_is_taken_off(write, text, utc):
    assert read_csv(write(f"{HEADER}{text},1,1,1,1,0\n")).date.tolist() == [epoch(utc)]


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the time zone cannot be set here")
def test_the_time_zone_of_the_machine_changes_no_date(write, monkeypatch):
    expected = read_csv(write(GOOD))
    try:
        for zone in ("America/New_York", "Asia/Kolkata"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert same(read_csv(write(GOOD)), expected)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_hour_that_summer_time_repeats_is_two_hours(write):
    rows = "2024-11-03T01:30:00-04:00,1,1,1,1,0\n2024-11-03T01:30:00-05:00,1,1,1,1,0\n"
    bars = read_csv(write(HEADER + rows))
    assert bars.date.tolist() == [epoch("2024-11-03T05:30:00"), epoch("2024-11-03T06:30:00")]


def test_times_one_second_apart_stay_apart(write):
    # Case G12: float32 holds seconds of this size in steps of 128.
    seconds = [1516800000 + s for s in (0, 1, 60, 90)]
    rows = [f"{np.datetime64(s, 's')}Z,1,1,1,1,0\n" for s in seconds]
    assert read_csv(write(HEADER + "".join(rows))).date.tolist() == seconds


ROW = "2020-01-02,11,13,9,12,5"
FAULTS = {
    "an empty file": ("", "the file is empty"),
    "a header only": (HEADER, "a header and no bars"),
    "a header without line end": (HEADER.strip(), "a header and no bars"),
    "a header and empty lines": (HEADER + "\n\n", "a header and no bars"),
    "a missing column": (
        "date,open,high,low,close\n2020-01-01,1,1,1,1\n",
        "line 1: column volume missing from 'date,open,high,low,close'",
    ),
    "two missing columns": ("date,open,high\n", "line 1: columns low, close, volume missing"),
    "no header": ("2020-01-01,1,1,1,1,0\n", "line 1: columns date, open, high, low, close, volume"),
    "semicolons": (
        "date;open;high;low;close;volume\n2020-01-01;1;1;1;1;0\n",
        "line 1: columns date,",
        "fields must be separated by commas",
    ),
    "a duplicate column": (
        "date,open,high,low,close,volume,Close\n",
        "line 1, column close: the header names it twice, as 'close', 'Close'",
    ),
    "a symbol named twice": (
        "date,open,high,low,close,volume,symbol,Ticker\n",
        "line 1, column symbol: the header names it twice",
    ),
    "an adjusted column by another name": (
        "date,open,high,low,close,volume,AdjClose\n",
        "line 1, column 'AdjClose': an adjusted close must be named adj_close",
    ),
    "a non-number": (GOOD.replace("11,13", "11,abc"), "line 3, column high: 'abc' is not a number"),
    "an empty field": (GOOD.replace("11,13", "11,"), "line 3, column high: '' is empty"),
    "a NaN": (GOOD.replace("11,13", "NaN,13"), "line 3, column open: 'NaN' is not a finite number"),
    "an infinity": (GOOD.replace("9,12", "9,-inf"), "line 3, column close: '-inf' is not a finite"),
    "an overflow": (
        GOOD.replace(",12,0", ",12,1e999"),
        "line 3, column volume: inf is not a finite",
    ),
    "a price of zero": (GOOD.replace("9,12", "0,12"), "line 3, column low: 0.0 is not above zero"),
    "a negative price": (
        GOOD.replace("11,13", "-11,13"),
        "line 3, column open: -11.0 is not above",
    ),
    "a price out of range": (
        GOOD.replace("13,9", "1e19,9"),
        "line 3, column high: 1e+19 is outside",
    ),
    "a negative volume": (
        GOOD.replace(",12,0", ",12,-1"),
        "line 3, column volume: -1.0 is negative",
    ),
    "a volume out of range": (
        GOOD.replace(",12,0", ",12,1e25"),
        "line 3, column volume: 1e+25 is a",
    ),
    "a high below the open": (
        GOOD.replace("11,13", "11,10.5"),
        "line 3, column high: 10.5 is below the open of its bar, 11.0",
    ),
    "a high below the close": (
        GOOD.replace("11,13", "11,11.5"),
        "line 3, column high: 11.5 is below the close of its bar, 12.0",
    ),
    "a low above the open": (
        GOOD.replace("13,9", "13,11.5"),
        "line 3, column low: 11.5 is above the open of its bar, 11.0",
    ),
    "a low above the close": (
        GOOD.replace("11,13,9", "13,13,12.5"),
        "line 3, column low: 12.5 is above the close of its bar, 12.0",
    ),
    "a high below the low": (
        HEADER + "2020-01-01,10,10,11,10,0\n",
        "line 2, column high: 10.0 is below the low of its bar, 11.0",
    ),
    "a duplicate timestamp": (
        GOOD + ROW + "\n",
        "line 5, column date: 2020-01-02 of bars is already on line 3",
    ),
    "the same instant with two offsets": (
        HEADER + "2020-01-01T01:00Z,1,1,1,1,0\n2020-01-01T02:00+01:00,1,1,1,1,0\n",
        "line 3, column date: 2020-01-01T01:00:00Z of bars is already on line 2",
    ),
    "rows out of order": (
        GOOD + "2019-12-31T12:00,1,1,1,1,0\n",
        "line 5, column date: 2019-12-31T12:00:00Z of bars comes after 2020-01-03 on line 4",
        "sort the file by date",
    ),
    "a descending file": (
        HEADER + "".join(f"2020-01-0{day},1,1,1,1,0\n" for day in (3, 2, 1)),
        "line 3, column date: bars runs from the newest bar, 2020-01-03, to the oldest, 2020-01-01",
        "sort the file by date, oldest first",
    ),
    "too few fields": (
        GOOD.replace(",12,0", ",12"),
        "line 3: 5 fields where the header has 6, '2020-01-02,11,13,9,12'",
    ),
    "too many fields": (
        GOOD.replace(",12,0", ",12,0,7"),
        "line 3: 7 fields where the header has 6",
    ),
    "a decimal comma": (
        GOOD.replace("11,13", '"4405,95",13'),
        "column open: '4405,95' has a comma",
    ),
    "a decimal comma without quotes": (
        GOOD.replace("11,13", "11,4405,95"),
        "line 3: 7 fields where the header has 6; a number must have no decimal comma",
    ),
    "a thousands comma": (GOOD.replace("11,13", '"1,234.50",13'), "open: '1,234.50' has a comma"),
    "a thousands blank": (GOOD.replace("11,13", "1 234.50,13"), "'1 234.50' has a thousands sep"),
    "a thousands underscore": (GOOD.replace("11,13", "1_234,13"), "'1_234' has a thousands sep"),
    "a blank beside a number": (
        GOOD.replace("11,13", " 11,13"),
        "open: ' 11' has blanks around it",
    ),
    "digits of another script": (
        GOOD.replace("11,13", "١١,13"),
        "column open: '١١' is not a number",
    ),
    "an open quote": (
        GOOD.replace("11,13", '"11,13'),
        "line 3, column open: a quote is not closed before the end of the line",
    ),
    "text after a quote": (
        GOOD.replace("11,13", '"11"1,13'),
        "line 3, column open: the line is not",
    ),
    "an open quote in the header": (HEADER.replace("low", '"low'), "line 1: a quote is not closed"),
    "an empty line between bars": (
        GOOD.replace("2020-01-03", "\n2020-01-03"),
        "line 4: the line is empty, and bars follow",
    ),
    "a carriage return in a line": (
        GOOD.replace("11,13", "11\r,13"),
        "line 3, column open: a carriage return",
    ),
    "a zero byte": (
        GOOD.replace("11,13", "1\x001,13"),
        "line 3, column open: '1\\x001' is not a num",
    ),
    "bytes that are not UTF-8": (
        GOOD.encode().replace(b"11,13", b"11,1\xff3"),
        "line 3, column high: byte 0xff at position 16 is not UTF-8",
    ),
    "a UTF-16 file": (GOOD.encode("utf-16"), "line 1: the file is UTF-16"),
    "a field without end": (
        GOOD.replace("11,13", "11," + "1" * 100_000),
        "line 3, column high: '1111111111111111111111111111111111111111'... runs past byte 8192",
    ),
    "a file without line end": ("x" * 3_000_000, "line 1: 'xxx"),
    "an empty symbol": ("symbol," + HEADER + "," + ROW, "line 2, column symbol: '' is not a name"),
    "a symbol with a blank": (
        "symbol," + HEADER + "A ," + ROW,
        "column symbol: 'A ' is not a name",
    ),
    "a bad adjusted close": (
        HEADER.replace("\n", ",adj_close\n") + ROW + ",0\n",
        "line 2, column adj_close: 0.0 is not above zero",
    ),
    "an adjusted close that leaves the range": (
        HEADER.replace("\n", ",adj_close\n") + "2020-01-01,1e-17,1,1e-18,1,0,1e-3\n",
        "line 2, column adj_close: 0.001 scales a price out of range, the close being 1.0",
    ),
    "a date by words": (
        GOOD.replace("2020-01-02", "2019-05-16 09-PM"),
        "'2019-05-16 09-PM' is not",
    ),
    "a date by slashes": (GOOD.replace("2020-01-02", "1/2/2020"), "date: '1/2/2020' is not an ISO"),
    "a date without dashes": (GOOD.replace("2020-01-02", "20200102"), "date: '20200102' is not an"),
    "a date as a number": (GOOD.replace("2020-01-02", "1577923200"), "'1577923200' is not an ISO"),
    "a day that does not exist": (
        GOOD.replace("2020-01-02", "2020-02-30"),
        "not a date of the cal",
    ),
    "an hour that does not exist": (
        GOOD.replace("2020-01-02", "2020-01-02T24:01"),
        "of the calendar",
    ),
    "a fraction of a second": (
        GOOD.replace("2020-01-02", "2020-01-02T00:00:00.5"),
        "line 3, column date: '2020-01-02T00:00:00.5' is not an ISO 8601 date in whole seconds",
    ),
}


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_with_its_line_column_and_value(write, fault, compressed):
    text, *wanted = FAULTS[fault]
    path = write(text, "bars.csv.gz" if compressed else "bars.csv")
    with pytest.raises(BarsError) as raised:
        read_csv(path)
    message = str(raised.value)
    assert message.startswith(str(path)) and "\n" not in message
    for words in wanted:
        assert words in message
    assert "faulty lines" not in message or fault == "a descending file"


def test_the_first_fault_is_reported_with_the_number_of_faulty_lines(write):
    lines = GOOD.splitlines()
    rows = [*lines, "2020-01-02,1,1,1,1,1", "2020-01-05,1,x,1,1,1", "2020-01-06,1,1,1,1"]
    with pytest.raises(BarsError, match=r"line 5, column date: .* \(the first of 3 faulty lines\)"):
        read_csv(write("\n".join(rows)))


def test_a_field_of_two_lines_is_an_open_quote_even_in_a_column_that_is_not_read(write):
    text = HEADER.replace("\n", ",note\n") + '2020-01-01,1,1,1,1,0,"a\nb"\n2020-01-02,1,1,1,1,0,c\n'
    with pytest.raises(BarsError, match=r"line 2: a quote is not closed.*first of 2 faulty lines"):
        read_csv(write(text))


def test_counting_stops_at_a_thousand_faulty_lines(write):
    with pytest.raises(BarsError, match=r"line 2.*the first of at least 1000 faulty lines"):
        read_csv(write(HEADER + "x\n" * 200_000))


def test_a_fault_late_in_a_large_file_has_its_own_line(write):
    days = np.datetime64("1900-01-01") + np.arange(20_000)
    rows = [f"{day},10.25,10.5,10.125,10.25,12345\n" for day in days]
    rows[15_000] = rows[15_000].replace("10.5", "9.5")
    with pytest.raises(BarsError, match=r"line 15002, column high: 9.5 is below the open"):
        read_csv(write(HEADER + "".join(rows)))
    rows[15_000] = rows[14_999]
    with pytest.raises(BarsError, match=r"line 15002, column date: .* already on line 15001"):
        read_csv(write(HEADER + "".join(rows)))


def test_lines_are_counted_over_every_size_of_block(write, monkeypatch):
    days = np.datetime64("1900-01-01") + np.arange(40)
    text = HEADER + "".join(f"{day},1,1,1,1,{n}\n" for n, day in enumerate(days)) + "\n\n"
    expected = read_csv(write(text))
    assert expected.line.tolist() == list(range(2, 42))
    for nbytes in (1, 7, 31, 33, 97, 1000):
        monkeypatch.setattr(csv_reader, "_BLOCK_NBYTES", nbytes)
        assert same(read_csv(write(text)), expected)
        with pytest.raises(BarsError, match="line 42: the line is empty, and bars follow"):
            read_csv(write(text + "2020-01-01,1,1,1,1,0\n"))


def test_a_small_file_that_unpacks_to_endless_empty_lines_is_refused(write):
    path = write(GOOD + "\n" * 30_000_000, "bars.csv.gz")
    assert path.stat().st_size < 100_000
    started = time.monotonic()
    with pytest.raises(BarsError, match="line 5: only empty lines follow"):
        read_csv(path)
    assert time.monotonic() - started < 1


def test_what_is_no_readable_regular_file_is_refused(tmp_path, write):
    with pytest.raises(BarsError, match=r"none\.csv: the file cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(BarsError, match=r"cannot be read: .*null"):
        read_csv("a\0.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(BarsError, match="wanted a regular file"):
        read_csv(tmp_path / "folder.csv")
    with pytest.raises(BarsError, match=r"wanted a name that ends in \.csv or \.csv\.gz"):
        read_csv(write(GOOD, "bars.txt"))
    with pytest.raises(TypeError, match=r"path: wanted str or os.PathLike, got int"):
        read_csv(3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(BarsError, match="wanted a regular file"):
        read_csv(tmp_path / "pipe.csv")


def test_a_gzip_file_with_the_name_of_a_plain_one_is_refused(write):
    with pytest.raises(BarsError, match=r"gzip-compressed, so its name must end in \.csv\.gz"):
        read_csv(write(gzip.compress(GOOD.encode())))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(GOOD.encode())
    path = tmp_path / "bars.csv.gz"
    for data in (
        whole[:-9],
        whole[:20],
        GOOD.encode(),
        whole[:-5] + b"x" + whole[-4:],
        b"\x1f\x8b",
    ):
        path.write_bytes(data)
        with pytest.raises(BarsError, match="cannot be read"):
            read_csv(path)


def test_a_close_that_jumps_is_warned_of_once_with_symbol_date_and_line(write):
    closes = [100, 50, 49, 100]
    rows = [f"2020-01-0{day},{c},{c},{c},{c},0\n" for day, c in enumerate(closes, 1)]
    with pytest.warns(UserWarning) as caught:
        bars = read_csv(write(HEADER + "".join(rows), "spy.csv"))
    (warning,) = caught
    message = str(warning.message)
    assert "spy closes -50.0% on 2020-01-02 (line 3), the first of 2" in message
    assert "\n" not in message and warning.filename == __file__
    assert bars.close.tolist() == closes


def test_a_move_of_exactly_forty_percent_is_not_warned_of(write):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_csv(write(HEADER + "2020-01-01,10,10,10,10,0\n2020-01-02,6,6,6,6,0\n"))


def test_a_column_that_is_not_read_is_named_in_a_warning(write):
    with pytest.warns(UserWarning, match="column 'Dividends' is not read"):
        bars = read_csv(write(GOOD.replace("\n", ",x\n").replace("volume,x", "volume,Dividends")))
    assert len(bars) == 3


def test_the_sample_is_read_whole_and_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bars = sample()
    assert bars.symbol == ("AAPL", "FB", "GOOG", "IBM", "MSFT")
    assert np.diff(bars.offsets).tolist() == [3270, 196, 2148, 3270, 3270]
    assert bars.line.tolist() == list(range(2, 12_156))


def move_on(bars, symbol, day):
    rows = bars.rows(bars.symbol.index(symbol))
    at = int(np.flatnonzero(bars.date[rows] == epoch(day))[0])
    return bars.close[rows][at] / bars.close[rows][at - 1] - 1


def test_the_adjusted_close_undoes_a_split_and_leaves_a_real_crash():
    # Case G14.
    bars = sample()
    assert move_on(bars, "MSFT", "2003-02-18") == pytest.approx(0.0335, abs=1e-4)
    assert move_on(bars, "AAPL", "2000-09-29") == pytest.approx(-0.5187, abs=1e-4)


def test_without_the_adjusted_close_the_splits_of_the_sample_are_warned_of(write):
    source = csv_reader.Path(csv_reader.__file__).parent / "sample" / "stocks.csv.gz"
    lines = gzip.decompress(source.read_bytes()).decode().splitlines()
    text = "\n".join(line.rpartition(",")[0] for line in lines)
    with pytest.warns(
        UserWarning, match="AAPL closes -45.1% on 2000-06-21 .* the first of 4 closes"
    ):
        bars = read_csv(write(text))
    assert move_on(bars, "MSFT", "2003-02-18") == pytest.approx(-0.4832, abs=1e-4)


def test_a_close_of_zero_is_refused():
    # Case G10: as a return it would be infinite one bar later.
    ones = np.ones(3)
    with pytest.raises(BarsError, match=r"line 3, column low: 0\.0 is not above zero"):
        Bars(
            symbol=("x",),
            offsets=np.array([0, 3]),
            date=np.arange(3) * 60,
            open=ones * 5,
            high=ones * 5,
            low=np.array([5.0, 0, 5]),
            close=np.array([5.0, 0, 5]),
            volume=ones,
            line=np.arange(2, 5),
        )


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"close": np.ones(3, np.float32)}, TypeError, "close: wanted a NumPy array of float64"),
        ({"date": [1, 2, 3]}, TypeError, "date: wanted a NumPy array of int64, got list"),
        ({"volume": np.ones(2)}, BarsError, r"volume: wanted shape \(3,\), got \(2,\)"),
        ({"symbol": ("x", "y")}, BarsError, r"offsets: wanted shape \(3,\)"),
        ({"symbol": ("x", "x"), "offsets": np.array([0, 1, 3])}, BarsError, "all different"),
        ({"symbol": ("x", "y"), "offsets": np.array([0, 3, 3])}, BarsError, "offsets: wanted 0"),
        ({"offsets": np.array([0, 2])}, BarsError, "offsets: wanted 0"),
        ({"date": np.array([60, 60, 120])}, BarsError, "line 3, column date: .* already on line 2"),
        ({"date": np.array([0, 1, 2**62])}, BarsError, "line 4, column date: .* outside the years"),
        ({"high": np.array([1, np.nan, 1])}, BarsError, "line 3, column high: nan is not a finite"),
    ],
)
def test_bars_made_by_hand_are_checked_like_a_file(change, error, words):
    ones = np.ones(3)
    legal = dict(symbol=("x",), offsets=np.array([0, 3]), date=np.arange(3) * 60, open=ones)
    legal |= dict(high=ones, low=ones, close=ones, volume=ones, line=np.arange(2, 5))
    assert len(Bars(**legal)) == 3
    with pytest.raises(error, match=words):
        Bars(**{**legal, **change})


SYMBOLS = "symbol,date,open,high,low,close,volume,adj_close\n" + "".join(
    f'{s},2020-0{m}-01T10:30:00Z,10.5,"12",8,11,100,5.5\n' for m in (1, 2, 3) for s in "AB"
)
BASES = [GOOD.encode(), SYMBOLS.encode(), GOOD.replace("\n", "\r\n").encode()]
PIECES = [
    b"\n",
    b"\r",
    b",",
    b'"',
    b"\x00",
    b"\xff",
    b"-",
    b"e",
    b"nan",
    b"0",
    b"9" * 9000,
    b"\n" * 9,
]
EDIT = st.tuples(
    st.sampled_from(["put", "insert", "delete", "copy", "cut"]),
    st.integers(0, 400),
    st.integers(0, 60),
    st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from(PIECES)),
)


def mutate(data, edits):
    for kind, at, length, piece in edits:
        at %= len(data) + 1
        if kind == "put":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + length :]
        elif kind == "copy":
            data = data[:at] + data[at : at + length] + data[at:]
        else:
            data = data[:at]
    return data


def outcome(path):
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read_csv(path)
        except BarsError as error:
            return str(error)
        finally:
            assert time.process_time() - started < 1


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


FUZZ = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(max_examples=3000, **FUZZ)
@given(base=st.sampled_from(BASES), edits=st.lists(EDIT, min_size=1, max_size=4))
@example(base=b"\n", edits=[])
@example(base=HEADER.encode() + b"\r\r\n" + ROW.encode(), edits=[])
def test_a_mutated_file_gives_legal_bars_or_a_bars_error_alike_by_block_and_by_line(
    place, base, edits
):
    path = place / "bars.csv"
    path.write_bytes(mutate(base, edits))
    by_block = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_reader, "_parse_columns", lambda lines, header: None)
        by_line = outcome(path)
    if isinstance(by_block, str):
        assert by_block == by_line and "\n" not in by_block and len(by_block) < 500
    else:
        assert same(by_block, by_line)


@settings(max_examples=500, **FUZZ)
@given(base=st.sampled_from(BASES), edits=st.lists(EDIT, min_size=1, max_size=4))
def test_a_mutated_gzip_file_gives_legal_bars_or_a_bars_error(place, base, edits):
    path = place / "bars.csv.gz"
    path.write_bytes(mutate(gzip.compress(base, mtime=0), edits))
    assert isinstance(outcome(path), str | Bars)


NUMBER = st.decimals(min_value="0.0001", max_value="100000", places=6)


@settings(max_examples=100, **FUZZ)
@given(
    rows=st.lists(st.tuples(*[NUMBER] * 4, st.integers(0, 10**12)), min_size=1, max_size=33),
    start=st.integers(-(10**10), 10**11),
    step=st.integers(1, 10**6),
)
def test_numbers_and_dates_come_back_as_they_were_written(place, rows, start, step):
    text = HEADER
    for number, (*prices, volume) in enumerate(rows):
        date = np.datetime64(start + number * step, "s")
        text += f"{date}Z,{prices[0]},{max(prices)},{min(prices)},{prices[1]},{volume}\n"
    path = place / "round.csv"
    path.write_text(text)
    bars = outcome(path)
    assert bars.date.tolist() == [start + number * step for number in range(len(rows))]
    assert bars.open.tolist() == [float(row[0]) for row in rows]
    assert bars.high.tolist() == [float(max(row[:4])) for row in rows]
    assert bars.volume.tolist() == [row[4] for row in rows]
