"""The return curve, the metrics file and the line of progress."""

import io
import json

import pytest
from rich.console import Console

from lowgpu import metrics
from lowgpu.metrics import Curve, MetricsFile, ProgressLine


def curve_of(*entries):
    curve = Curve()
    for entry in entries:
        curve.add(*entry)
    return curve


def test_there_is_no_mean_before_an_episode_has_finished():
    assert Curve().mean is None
    assert curve_of((0, 0.0), (0, 0.0)).mean is None


def test_every_iteration_counts_until_there_are_100_episodes():
    assert curve_of((1, 10.0), (3, 6.0)).mean == 4.0


def test_only_the_shortest_tail_with_100_episodes_counts():
    # 60 + 50 hold 100 without the first; 40 + 60 + 50 without the last would not be recent.
    assert curve_of((40, 4000.0), (60, 60.0), (50, 50.0)).mean == 1.0
    assert curve_of((40, 4000.0), (60, 60.0), (39, 39.0)).mean == pytest.approx(4099 / 139)
    assert curve_of((5, 500.0), (1000, 3000.0)).mean == 3.0


def test_a_curve_goes_on_from_its_entries():
    entries = [(40, 0.1), (0, 0.0), (60, 0.3), (50, 0.7), (7, 0.9)]
    whole, first = curve_of(*entries), curve_of(*entries[:3])
    second = Curve(json.loads(json.dumps(first.entries)))
    for entry in entries[3:]:
        second.add(*entry)
    assert second.entries == whole.entries
    assert second.mean == whole.mean


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_is_an_object_that_is_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for iteration in (1, 2):
        file.write({"iteration": iteration, "return": None})
        assert lines_of(path)[-1] == {"iteration": iteration, "return": None}
    file.close()


def test_a_number_that_json_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        MetricsFile(tmp_path / "metrics.jsonl").write({"loss": float("nan")})


@pytest.mark.parametrize(
    "tail",
    ['{"iteration": 3, "lo', "", "\0\0\0\0", "[]\n", '{"iteration": "4"}\n'],
    ids=["half a line", "nothing", "zeros", "a list", "text"],
)
def test_going_on_keeps_each_iteration_once(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {i}}}\n' for i in (1, 2, 3)) + tail)
    file = MetricsFile(path, 2)
    for iteration in (3, 4):
        file.write({"iteration": iteration})
    file.close()
    assert [line["iteration"] for line in lines_of(path)] == [1, 2, 3, 4]


def test_there_is_a_line_a_minute_where_there_is_no_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with ProgressLine(10_000, 1000, "3 MB", Console(file=out, width=200)) as progress:
        for second in range(1, 131):
            now[0] = float(second)
            progress.show(1000 + 10 * second, None if second < 61 else 1.5)
    lines = out.getvalue().splitlines()
    assert lines == [
        "1,600 steps  10 steps/s  return -  memory 3 MB  of 10,000 steps",
        "2,200 steps  10 steps/s  return 1.5  memory 3 MB  of 10,000 steps",
    ]


def test_there_is_a_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with ProgressLine(1000, 0, "3 MB", console) as progress:
        progress.show(500, 2.0)
    assert "500 steps" in out.getvalue()
    assert "return 2 " in out.getvalue()
