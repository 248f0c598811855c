"""Bar charts that compare machines or batch sizes; every number is predicted, with its interval."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log10

from windlass.report.figures.svg import (
    element,
    svg_document,
    text_label,
    ticks,
    tooltip,
    with_heading,
)
from windlass.report.formatting import format_speed, parallel_degrees
from windlass.schema import MachineForecast
from windlass.units import format_count, format_seconds

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 160.0, 400.0, 12.0
_ROW, _BAR = 24.0, 14.0
_MAX_REASON_LETTERS = 78
"""Longest reason that is drawn in place of a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """One machine or batch size of a chart."""

    name: str
    value: float | None
    """Length of the bar in the chart's unit; None where there is no plan and `text` says why."""
    low: float = 0.0
    """Lower end of the 80 % interval."""
    high: float = 0.0
    """Upper end of the 80 % interval."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Scale, tick marks and name of the value axis."""

    position: Callable[[float], float]
    """Converts a value to pixels from the left end."""
    marks: Sequence[tuple[float, str]]
    name: str


def machine_comparison_figure(forecasts: Sequence[MachineForecast], heading: str) -> str:
    """SVG file: step time on each machine on a logarithmic axis, shortest first."""
    bars = [
        _Bar(
            name=forecast.machine,
            value=forecast.prediction.step_seconds,
            low=forecast.prediction.low_seconds,
            high=forecast.prediction.high_seconds,
            text=f"{format_seconds(forecast.prediction.step_seconds)}: {_describe(forecast)}",
        )
        if forecast.prediction
        else _infeasible(forecast.machine, forecast)
        for forecast in forecasts
    ]
    bars.sort(key=lambda bar: (bar.value is None, bar.value or 0.0))
    svg = _draw(bars, _log_axis(bars), "predicted step time on each machine")
    return with_heading(svg, heading, "Predicted step time on each machine, with its 80 % interval")


def batch_comparison_figure(forecasts: Sequence[MachineForecast], heading: str) -> str:
    """SVG file: speed with each global batch, in the given order."""
    bars = []
    for forecast in forecasts:
        prediction, plan = forecast.prediction, forecast.plan
        if prediction is None or plan is None:
            bars.append(_infeasible(str(forecast.global_batch), forecast))
            continue
        factors = f"{plan.batch.sequences_per_replica} × {plan.parallel.data}"
        tokens = prediction.tokens_per_step
        speed = format_speed(prediction.tokens_per_second, prediction.unit)
        bars.append(
            _Bar(
                name=f"{forecast.global_batch} = {factors}",
                value=prediction.tokens_per_second,
                low=tokens / prediction.high_seconds,
                high=tokens / prediction.low_seconds,
                text=f"{speed}: {_describe(forecast)}",
            )
        )
    svg = _draw(bars, _linear_axis(bars), "predicted speed with each global batch")
    return with_heading(
        svg, heading, "Predicted speed with each global batch (sequences of a replica × replicas)"
    )


def _describe(forecast: MachineForecast) -> str:
    """The plan's parallel degrees and the largest term of its step."""
    term, share = forecast.slowest_term
    degrees = f"{parallel_degrees(forecast.plan)}, " if forecast.plan else ""
    return f"{degrees}{100 * share:.0f} % {term}"


def _infeasible(name: str, forecast: MachineForecast) -> _Bar:
    reason = (
        (forecast.infeasible_reason or "no plan").splitlines()[0].partition(";")[0].replace("`", "")
    )
    if len(reason) > _MAX_REASON_LETTERS:
        reason = f"{reason[:_MAX_REASON_LETTERS]}…"
    return _Bar(name=name, value=None, text=reason)


def _log_axis(bars: Sequence[_Bar]) -> _Axis:
    """A logarithmic axis that begins at half of the smallest value."""
    begin = min((bar.low for bar in bars if bar.value), default=1.0) / 2
    largest = max((bar.high for bar in bars if bar.value), default=10.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / log10(largest / begin)
    power = int(log10(begin)) - 1
    marks = []
    while 10.0**power <= largest:
        marks += [(10.0**power, format_seconds(10.0**power))] if 10.0**power >= begin else []
        power += 1
    return _Axis(
        position=lambda value: log10(value / begin) * scale, marks=marks,
        name="predicted step time, logarithmic",
    )  # fmt: skip


def _linear_axis(bars: Sequence[_Bar]) -> _Axis:
    largest = max((bar.high for bar in bars if bar.value), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / largest
    return _Axis(
        position=lambda value: value * scale,
        marks=[(tick, format_count(tick)) for tick in ticks(0, largest, 5)],
        name="predicted tokens per second",
    )


def _draw(bars: Sequence[_Bar], axis: _Axis, name: str) -> str:
    bottom = _TOP + _ROW * len(bars)
    parts = []
    for value, name_of_mark in axis.marks:
        x = _LEFT + axis.position(value)
        parts.append(element("line", x1=x, x2=x, y1=_TOP - 4, y2=bottom, class_="grid"))
        parts.append(text_label(x, bottom + 16, name_of_mark, text_anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(text_label(middle, bottom + 36, axis.name, text_anchor="middle"))
    for line, bar in enumerate(bars):
        parts += _draw_bar(bar, _TOP + line * _ROW, axis)
    return svg_document("".join(parts), _WIDTH, bottom + 44, name)


def _draw_bar(bar: _Bar, y: float, axis: _Axis) -> Iterator[str]:
    yield text_label(_LEFT - 10, y + 16, bar.name, text_anchor="end", class_="strong")
    if bar.value is None:
        yield text_label(_LEFT + 4, y + 16, bar.text, style="font-style:italic")
        return
    hint = tooltip(f"{bar.name}: {bar.text}, predicted")
    yield element(
        "rect", hint, x=_LEFT, y=y + 5, width=axis.position(bar.value), height=_BAR, rx=2,
        style="fill:var(--blue);opacity:.85",
    )  # fmt: skip
    low, high = _LEFT + axis.position(bar.low), _LEFT + axis.position(bar.high)
    middle, style = y + 5 + _BAR / 2, "stroke:var(--orange);stroke-width:2"
    yield element("line", x1=low, x2=high, y1=middle, y2=middle, style=style)
    for x in (low, high):
        yield element("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, style=style)
    yield text_label(high + 8, y + 16, bar.text)
