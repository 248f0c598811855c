"""Ranking: offers side by side as pictures, each number with its interval, all of it predicted."""

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
from windlass.schema.comparison import MachineForecast
from windlass.units import format_count, format_seconds

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 160.0, 330.0, 12.0
_ROW, _BAR = 24.0, 14.0
_LETTERS = 78
"""Of why there is no plan, beside where its bar would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """One offer: what is drawn of it, from a common begin."""

    name: str
    value: float | None
    """None: there is no plan, and `words` say why."""
    low: float = 0.0
    """Of the 80 % interval."""
    high: float = 0.0
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Where a value lies, and what the axis says."""

    at: Callable[[float], float]
    """Pixels from the left end."""
    marks: Sequence[tuple[float, str]]
    name: str


def machine_comparison_figure(offers: Sequence[MachineForecast], heading: str) -> str:
    """Step time on each machine, the shortest first, on a scale of powers of ten, as an SVG file.

    Args:
        offers: of one request.
        heading: what was asked.
    """
    bars = [
        _Bar(
            name=offer.machine,
            value=offer.prediction.step_seconds,
            low=offer.prediction.low_seconds,
            high=offer.prediction.high_seconds,
            words=f"{format_seconds(offer.prediction.step_seconds)}: {_words(offer)}",
        )
        if offer.prediction
        else _refused(offer.machine, offer)
        for offer in offers
    ]
    bars.sort(key=lambda bar: (bar.value is None, bar.value or 0.0))
    svg = _drawn(bars, _powers(bars), "predicted step time on each machine")
    return with_heading(svg, heading, "Predicted step time on each machine, with its 80 % interval")


def batch_comparison_figure(offers: Sequence[MachineForecast], heading: str) -> str:
    """Speed with each global batch, in the order given, as an SVG file.

    Args:
        offers: of one machine.
        heading: what was asked.
    """
    bars = []
    for offer in offers:
        told, plan = offer.prediction, offer.plan
        if told is None or plan is None:
            bars.append(_refused(str(offer.global_batch), offer))
            continue
        made = f"{plan.batch.sequences_per_replica} × {plan.parallel.data}"
        tokens = told.tokens_per_step
        bars.append(
            _Bar(
                name=f"{offer.global_batch} = {made}",
                value=told.tokens_per_second,
                low=tokens / told.high_seconds,
                high=tokens / told.low_seconds,
                words=f"{format_speed(told.tokens_per_second)}: {_words(offer)}",
            )
        )
    svg = _drawn(bars, _from_zero(bars), "predicted speed with each global batch")
    return with_heading(
        svg, heading, "Predicted speed with each global batch b × r, with its interval"
    )


def _words(offer: MachineForecast) -> str:
    """The plan, and what most of its step goes into."""
    term, share = offer.slowest_term
    cut = f"{parallel_degrees(offer.plan)}, " if offer.plan else ""
    return f"{cut}{100 * share:.0f} % {term}"


def _refused(name: str, offer: MachineForecast) -> _Bar:
    why = (offer.infeasible_reason or "no plan").splitlines()[0].partition(";")[0].replace("`", "")
    return _Bar(name=name, value=None, words=why if len(why) <= _LETTERS else f"{why[:_LETTERS]}…")


def _powers(bars: Sequence[_Bar]) -> _Axis:
    """Powers of ten; half of the least is where bars begin."""
    first = min((bar.low for bar in bars if bar.value), default=1.0) / 2
    most = max((bar.high for bar in bars if bar.value), default=10.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / log10(most / first)
    power = int(log10(first)) - 1
    marks = []
    while 10.0**power <= most:
        marks += [(10.0**power, format_seconds(10.0**power))] if 10.0**power >= first else []
        power += 1
    return _Axis(
        at=lambda value: log10(value / first) * scale, marks=marks,
        name="predicted step time, powers of ten",
    )  # fmt: skip


def _from_zero(bars: Sequence[_Bar]) -> _Axis:
    most = max((bar.high for bar in bars if bar.value), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    return _Axis(
        at=lambda value: value * scale,
        marks=[(tick, format_count(tick)) for tick in ticks(0, most, 5)],
        name="predicted tokens a second",
    )


def _drawn(bars: Sequence[_Bar], axis: _Axis, name: str) -> str:
    bottom = _TOP + _ROW * len(bars)
    parts = []
    for value, words in axis.marks:
        x = _LEFT + axis.at(value)
        parts.append(element("line", x1=x, x2=x, y1=_TOP - 4, y2=bottom, class_="grid"))
        parts.append(text_label(x, bottom + 16, words, text_anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(text_label(middle, bottom + 36, axis.name, text_anchor="middle"))
    for line, bar in enumerate(bars):
        parts += _bar(bar, _TOP + line * _ROW, axis)
    return svg_document("".join(parts), _WIDTH, bottom + 44, name)


def _bar(bar: _Bar, y: float, axis: _Axis) -> Iterator[str]:
    yield text_label(_LEFT - 10, y + 16, bar.name, text_anchor="end", class_="strong")
    if bar.value is None:
        yield text_label(_LEFT + 4, y + 16, bar.words, style="font-style:italic")
        return
    words = tooltip(f"{bar.name}: {bar.words}, predicted")
    yield element("rect", words, x=_LEFT, y=y + 5, width=axis.at(bar.value), height=_BAR, rx=2,
                  style="fill:var(--blue);opacity:.85")  # fmt: skip
    low, high = _LEFT + axis.at(bar.low), _LEFT + axis.at(bar.high)
    middle, style = y + 5 + _BAR / 2, "stroke:var(--orange);stroke-width:2"
    yield element("line", x1=low, x2=high, y1=middle, y2=middle, style=style)
    for x in (low, high):
        yield element("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, style=style)
    yield text_label(high + 8, y + 16, bar.words)
