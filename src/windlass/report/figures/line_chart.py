"""SVG line charts with axes, a grid, reference lines and bands; thinning keeps every spike."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from windlass.report.figures.svg import (
    UNITLESS,
    AxisUnit,
    element,
    legend,
    svg_document,
    text_label,
    ticks,
    tooltip,
)  # fmt: skip

_WIDTH, _HEIGHT = 1000.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 34.0, 42.0
_BUCKETS = 450


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """One line; points that are not finite are left out."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    """A CSS colour."""
    style: Literal["line", "faint", "dots", "area"] = "line"
    spread: tuple[Sequence[float], Sequence[float]] | None = None
    """Lowest and highest values at the same `xs`, drawn as a band behind the line; all finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLine:
    """A named horizontal line, with a band around it if `low` and `high` are given."""

    name: str
    y: float
    colour: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartAxes:
    """Names, units and ranges of the axes."""

    x_name: str
    y_name: str
    x_unit: AxisUnit = UNITLESS
    y_unit: AxisUnit = UNITLESS
    y_from_zero: bool = False
    y_max: float | None = None
    """Upper end of the chart, which cuts larger values off; None means the largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / (self.high_y - self.low_y)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(
    name: str,
    series: Sequence[ChartSeries],
    axes: ChartAxes,
    reference_lines: Sequence[ReferenceLine] = (),
) -> str:
    """SVG chart; empty series are left out, and without any series the frame stays empty."""
    shown = [thin for one in series if (thin := _thinned(one)).xs]
    frame = _frame(shown, axes, reference_lines)
    inside = "".join(_reference_line(line, frame) for line in reference_lines)
    inside += "".join(_series(one, frame) for one in shown)
    clip = "clip-" + re.sub(r"[^a-z0-9]+", "-", name.lower())
    window = element(
        "rect", x=_LEFT - 6, y=_TOP - 4, width=_WIDTH - _LEFT - _RIGHT + 12,
        height=_HEIGHT - _TOP - _BOTTOM + 5,
    )  # fmt: skip
    content = element("clipPath", window, id=clip) + _grid(frame, axes)
    content += element("g", inside, clip_path=f"url(#{clip})") if inside else ""
    entries = [(one.name, one.colour) for one in shown]
    entries += [(line.name, line.colour) for line in reference_lines]
    content += legend(entries, _LEFT, 14)
    return _with_points(svg_document(content, _WIDTH, _HEIGHT, name), shown, frame, axes)


def running_mean(values: Sequence[float], count: int) -> list[float]:
    """Centred mean of `count` values, of fewer at the ends; only finite values count.

    It is centred so that the mean of a falling line lies on the line and not above it.
    """
    half = count // 2
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = [v for v in values[index - reach : index + reach + 1] if math.isfinite(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def _thinned(series: ChartSeries) -> ChartSeries:
    """The series with at most two points for each bucket of x: its lowest and its highest.

    One with a spread keeps all its points.
    """
    if series.spread is not None:
        return series
    points = [
        (x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y + x)
    ]  # fmt: skip
    if len(points) > 2 * _BUCKETS:
        size = math.ceil(len(points) / _BUCKETS)
        buckets = [points[first : first + size] for first in range(0, len(points), size)]
        extremes = [(min(b, key=lambda p: p[1]), max(b, key=lambda p: p[1])) for b in buckets]
        points = [point for pair in extremes for point in sorted(set(pair))]
    return ChartSeries(
        name=series.name, xs=[x for x, _ in points], ys=[y for _, y in points],
        colour=series.colour, style=series.style,
    )  # fmt: skip


def _frame(
    series: Sequence[ChartSeries], axes: ChartAxes, reference_lines: Sequence[ReferenceLine]
) -> _Frame:
    xs = [x for one in series for x in one.xs] or [0.0]
    ys = [y for one in series for y in one.ys]
    ys += [y for one in series for side in one.spread or () for y in side]
    ys += [y for line in reference_lines for y in (line.y, line.low, line.high) if y is not None]
    ys = [y for y in ys if math.isfinite(y)] or [0.0]
    low = 0.0 if axes.y_from_zero else min(ys)
    high = axes.y_max if axes.y_max is not None else max(ys)
    spread = (high - low) or abs(high) or 1.0
    return _Frame(
        low_x=min(xs),
        high_x=max(xs) if max(xs) > min(xs) else min(xs) + 1,
        low_y=low if axes.y_from_zero else low - 0.05 * spread,
        high_y=low + 1.06 * spread,
    )


def _grid(frame: _Frame, axes: ChartAxes) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    scale = axes.y_unit.scale
    for tick in ticks(frame.low_y / scale, frame.high_y / scale, 6):
        y = frame.y(tick * scale)
        parts.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(text_label(_LEFT - 8, y + 4, f"{tick:.6g}", text_anchor="end"))
    scale = axes.x_unit.scale
    for tick in ticks(frame.low_x / scale, frame.high_x / scale, 8):
        x = frame.x(tick * scale)
        parts.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(text_label(x, bottom + 17, f"{tick:.6g}", text_anchor="middle"))
    parts.append(element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    middle = (_LEFT + right) / 2
    parts.append(
        text_label(middle, _HEIGHT - 6, _named(axes.x_name, axes.x_unit), text_anchor="middle")
    )
    turned = f"rotate(-90 14 {(_TOP + bottom) / 2:g})"
    y_name = _named(axes.y_name, axes.y_unit)
    parts.append(
        text_label(14, (_TOP + bottom) / 2, y_name, text_anchor="middle", transform=turned)
    )  # fmt: skip
    return "".join(parts)


def _named(name: str, unit: AxisUnit) -> str:
    return f"{name} [{unit.name}]" if unit.name else name


def _reference_line(line: ReferenceLine, frame: _Frame) -> str:
    right = _WIDTH - _RIGHT
    y = frame.y(line.y)
    parts = []
    if line.low is not None and line.high is not None:
        top, bottom = frame.y(line.high), frame.y(line.low)
        parts.append(
            element(
                "rect", x=_LEFT, y=top, width=right - _LEFT, height=bottom - top,
                style=f"fill:{line.colour};opacity:.13",
            )
        )  # fmt: skip
    parts.append(
        element(
            "line", tooltip(line.name), x1=_LEFT, x2=right, y1=y, y2=y, stroke_dasharray="6 4",
            style=f"stroke:{line.colour};stroke-width:1.6",
        )
    )  # fmt: skip
    return "".join(parts)


def _series(series: ChartSeries, frame: _Frame) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(series.xs, series.ys, strict=True)]
    if series.style == "area":
        return _area(series, points, frame)
    if series.style == "dots" or len(points) == 1:
        style = f"fill:{series.colour};stroke:var(--card);stroke-width:1.5"
        dots = [
            element(
                "circle", tooltip(f"{series.name}: {value:.4g}"), cx=x, cy=y, r=4.5, style=style
            )
            for (x, y), value in zip(points, series.ys, strict=True)
        ]
        path = _path(points) if len(points) > 1 else ""
        line = f"fill:none;stroke:{series.colour};stroke-width:1.2;opacity:.6"
        return (element("path", d=path, style=line) if path else "") + "".join(dots)
    look = "stroke-width:1.1;opacity:.75" if series.style == "faint" else "stroke-width:2"
    style = f"fill:none;stroke:{series.colour};{look};stroke-linejoin:round"
    line = element("path", tooltip(series.name), d=_path(points), style=style)
    return _spread(series, frame) + line


def _spread(series: ChartSeries, frame: _Frame) -> str:
    """The band between the lowest and the highest values; nothing without them."""
    if series.spread is None:
        return ""
    low, high = (
        [(frame.x(x), frame.y(y)) for x, y in zip(series.xs, side, strict=True)]
        for side in series.spread
    )
    outline = _path([*low, *reversed(high)]) + "Z"
    return element("path", d=outline, style=f"fill:{series.colour};opacity:.2")


def _area(series: ChartSeries, points: Sequence[tuple[float, float]], frame: _Frame) -> str:
    """A step function: each value holds until the next point."""
    corners = [points[0]]
    for (_, before), (x, y) in pairwise(points):
        corners += [(x, before), (x, y)]
    floor = frame.y(frame.low_y)
    closed = [(corners[0][0], floor), *corners, (corners[-1][0], floor)]
    fill = element("path", d=_path(closed) + "Z", style=f"fill:{series.colour};opacity:.18")
    style = f"fill:none;stroke:{series.colour};stroke-width:1.6"
    return fill + element("path", tooltip(series.name), d=_path(corners), style=style)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _with_points(svg: str, series: Sequence[ChartSeries], frame: _Frame, axes: ChartAxes) -> str:
    """Adds the data with which the page's script shows values under the pointer."""
    data = {
        "left": _LEFT, "right": _WIDTH - _RIGHT, "low": frame.low_x, "high": frame.high_x,
        "top": _TOP, "bottom": _HEIGHT - _BOTTOM, "x": [axes.x_name, *axes.x_unit],
        "y": [*axes.y_unit],
        "series": [
            {"name": one.name, "x": [_short(x) for x in one.xs], "y": [_short(y) for y in one.ys]}
            for one in series if one.style != "faint"
        ],
    }  # fmt: skip
    points = element("desc", _escaped_json(data), class_="points")
    head, _, rest = svg.partition(">")
    return f"{head}>{points}{rest}"


def _escaped_json(data: object) -> str:
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _short(value: float) -> float:
    return float(f"{value:.5g}")
