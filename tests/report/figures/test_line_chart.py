"""Charts are well-formed, keep every spike, and draw values where the axes say."""

import json
import math
import xml.etree.ElementTree as ET

from hypothesis import given, settings, strategies as st

from windlass.report.figures.line_chart import (
    ChartAxes,
    ChartSeries,
    ReferenceLine,
    line_chart,
    running_mean,
)
from windlass.report.figures.svg import bytes_unit, seconds_unit, standalone, ticks

AXES = ChartAxes(x_name="step", y_name="loss")


def series(ys: list[float], style: str = "line") -> ChartSeries:
    xs = [float(x) for x in range(len(ys))]
    return ChartSeries(name="a < b & c", xs=xs, ys=ys, colour="red", style=style)  # type: ignore[arg-type]


def points(svg: str) -> list[tuple[float, float]]:
    desc = ET.fromstring(svg).find("{*}desc")  # noqa: S314  our own drawing
    assert desc is not None
    (one,) = json.loads(desc.text or "")["series"]
    return list(zip(one["x"], one["y"], strict=True))


@settings(deadline=None)
@given(
    ys=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=60),
    style=st.sampled_from(["line", "faint", "dots", "area"]),
    level=st.floats(-1e6, 1e6),
)
def test_any_numbers_give_a_well_formed_drawing(ys: list[float], style: str, level: float):
    lines = [ReferenceLine(name='"x"', y=level, low=level - 1, high=level + 1, colour="blue")]
    svg = line_chart("losses", [series(ys, style)], AXES, lines)
    ET.fromstring(svg)  # noqa: S314  our own drawing
    ET.fromstring(standalone(svg))  # noqa: S314
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_spike_among_ten_thousand_points_is_drawn():
    ys = [1.0] * 10_000
    ys[7_777] = 9.0
    ys[2_222] = -9.0
    drawn = points(line_chart("loss", [series(ys)], AXES))
    assert len(drawn) < 1_000
    assert {(7_777.0, 9.0), (2_222.0, -9.0)} <= set(drawn)


def test_a_line_is_drawn_where_its_axis_says():
    svg = line_chart("loss", [series([0.0, 5.0, 10.0])], AXES)
    path = next(p for p in ET.fromstring(svg).iter() if "stroke-width:2" in p.get("style", ""))  # noqa: S314
    spots = [tuple(map(float, spot.split())) for spot in (path.get("d") or "")[1:].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = spots
    assert math.isclose(x1, (x0 + x2) / 2)
    assert math.isclose(y1, (y0 + y2) / 2, abs_tol=0.1)
    assert y2 < y0


@given(low=st.floats(-1e9, 1e9), spread=st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_inside(low: float, spread: float):
    values = ticks(low, low + spread)
    slack = 1e-6 * (abs(low) + spread)
    assert 1 <= len(values) <= 11
    assert all(low - slack <= tick <= low + spread + slack for tick in values)


def test_a_running_mean_lies_on_a_straight_line():
    line = [float(10 - x) for x in range(10)]
    assert running_mean(line, 5) == line
    assert running_mean([1.0, math.nan, 3.0], 3)[1] == 2.0


def test_axis_units_give_small_numbers():
    assert seconds_unit(0.5).name == "ms"
    assert seconds_unit(3).name == "s"
    assert seconds_unit(7000).name == "min"
    assert bytes_unit(3 * 2**30).name == "GiB"
    assert bytes_unit(100).name == "B"
