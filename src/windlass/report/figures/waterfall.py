"""Waterfall figure: the terms of a predicted step, which add up to the step time."""

from collections.abc import Iterator

from windlass.report.figures.svg import (
    element,
    seconds_unit,
    svg_document,
    text_label,
    ticks,
    tooltip,
)
from windlass.schema import Prediction
from windlass.units import format_seconds

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 200.0, 150.0, 12.0
_ROW, _BAR = 30.0, 18.0
_SMALLEST_SHARE = 0.002
"""Share of the step below which terms are added up."""
_COLOURS = {
    "matmul": "blue", "attention": "sky", "traffic": "orange", "launch": "grey",
    "update": "green", "norm": "pink", "load": "brown", "communication and waiting": "violet",
    "waiting for offload": "red", "waiting for the slowest host": "yellow",
}  # fmt: skip


def step_time_waterfall(prediction: Prediction) -> str:
    """SVG: terms as bars, each starting where the one before ends; below them the whole step.

    The first bar is the time of the model's FLOP at the devices' dense peak.
    """
    terms = _terms(prediction)
    ideal = prediction.model_flop / prediction.peak_flop_rate
    longest = max(prediction.high_seconds, prediction.step_seconds, ideal)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = [_row(0, "the model's FLOP at peak", 0.0, ideal, scale, "grey", 0.45)]
    end = 0.0
    for line, (name, seconds) in enumerate(terms, 1):
        colour = _COLOURS.get(name, "yellow")
        parts.append(_row(line, name, end, seconds, scale, colour, 1.0))
        share = f"{format_seconds(seconds)}, {100 * seconds / prediction.step_seconds:.0f} %"
        parts.append(_value(line, share))
        end += seconds
        x = _LEFT + end * scale
        parts.append(element("line", x1=x, x2=x, y1=_y(line), y2=_y(line) + _ROW + _BAR,
                             class_="axis"))  # fmt: skip
    last = len(terms) + 1
    parts.append(_row(last, "predicted step", 0.0, prediction.step_seconds, scale, "ink", 0.8))
    parts.append(_value(0, f"{format_seconds(ideal)}: MFU {100 * prediction.mfu:.1f} %"))
    parts.append(_value(last, format_seconds(prediction.step_seconds)))
    parts += _interval(prediction, last, scale)
    parts += _axis(longest, scale, _y(last + 1) + 14)
    return svg_document("".join(parts), _WIDTH, _y(last + 1) + 52, "predicted step time by term")


def _terms(prediction: Prediction) -> list[tuple[str, float]]:
    """Terms and seconds, largest first but waiting last; very small terms are added up."""
    smallest = _SMALLEST_SHARE * prediction.step_seconds
    large = {k: v for k, v in prediction.by_term.items() if v >= smallest}
    rest = sum(prediction.by_term.values()) - sum(large.values())
    ordered = sorted(large.items(), key=lambda term: ("waiting" in term[0], -term[1]))
    return [*ordered, *([("other", rest)] if rest > 0 else [])]


def _y(line: int) -> float:
    return _TOP + line * _ROW


def _row(
    line: int, name: str, begin: float, seconds: float, scale: float, colour: str, opacity: float
) -> str:
    y = _y(line)
    bar = element(
        "rect", tooltip(f"{name}: {format_seconds(seconds)}"), x=_LEFT + begin * scale, y=y + 4,
        width=max(seconds * scale, 0.8), height=_BAR, rx=2,
        style=f"fill:var(--{colour});opacity:{opacity}",
    )  # fmt: skip
    strong = {"class_": "strong"} if name == "predicted step" else {}
    return bar + text_label(_LEFT - 10, y + 17, name, text_anchor="end", **strong)


def _value(line: int, text: str) -> str:
    return text_label(_WIDTH - _RIGHT + 12, _y(line) + 17, text, class_="strong")


def _interval(prediction: Prediction, line: int, scale: float) -> Iterator[str]:
    low, high = (_LEFT + end * scale for end in (prediction.low_seconds, prediction.high_seconds))
    y = _y(line) + 4 + _BAR / 2
    style = "stroke:var(--orange);stroke-width:2"
    yield element("line", x1=low, x2=high, y1=y, y2=y, style=style)
    for x in (low, high):
        yield element("line", x1=x, x2=x, y1=y - 6, y2=y + 6, style=style)
    ends = f"{format_seconds(prediction.low_seconds)} to {format_seconds(prediction.high_seconds)}"
    yield text_label(_WIDTH - _RIGHT - 4, _y(line) + _ROW + 10, f"80 % interval {ends}",
                text_anchor="end")  # fmt: skip


def _axis(longest: float, scale: float, y: float) -> Iterator[str]:
    unit = seconds_unit(longest)
    for tick in ticks(0, longest / unit.scale, 8):
        x = _LEFT + tick * unit.scale * scale
        yield element("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis")
        yield text_label(x, y + 18, f"{tick:.6g}", text_anchor="middle")
    yield element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="axis")
    yield text_label((_LEFT + _WIDTH - _RIGHT) / 2, y + 35, f"time in the step [{unit.name}]",
                text_anchor="middle")  # fmt: skip
