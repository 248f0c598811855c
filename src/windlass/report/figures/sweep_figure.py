"""SVG figure of a sweep: its trials as lines over all keys, and how much each key matters."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from windlass.report.figures.svg import (
    element,
    svg_document,
    text_label,
    ticks,
    tooltip,
    with_heading,
)

_WIDTH, _LEFT, _RIGHT = 1000.0, 60.0, 90.0
_TOP, _HEIGHT = 44.0, 300.0
_BAR, _ROW, _NAMES = 12.0, 24.0, 190.0
_HALO = "paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round"
"""Keeps a text legible in front of lines."""
_MOST_CHOICES = 12
"""Choices of a key that are named on its axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAxis:
    """One vertical axis: a key of the space, or an objective."""

    name: str
    low: float
    high: float
    log: bool = False
    choices: tuple[str, ...] = ()
    """Names of the values 0, 1, ...; empty for numbers."""

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the bottom to 1."""
        if self.high <= self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLine:
    """One trial: its value on each axis, in their order."""

    number: int
    values: tuple[float, ...]
    rank: float
    """0 for the best trial to 1 for the worst."""
    is_pruned: bool = False


def sweep_figure(
    axes: Sequence[SweepAxis],
    lines: Sequence[SweepLine],
    importance: Mapping[str, float],
    heading: str,
) -> str:
    """SVG file: parallel coordinates of all trials that have a result, and bars of importance.

    Args:
        axes: the keys of the space, then the objectives.
        lines: the trials; the best is drawn last, and so in front.
        importance: share of the spread that each key explains, the largest first; may be empty.
    """
    parts = [*_lines(axes, lines), *_axes(axes)]
    height = _TOP + _HEIGHT + 20
    if importance:
        parts += _importance(importance, height + 30)
        height += 44 + _ROW * len(importance)
    svg = svg_document("".join(parts), _WIDTH, height, "trials of a sweep")
    pruned = sum(line.is_pruned for line in lines)
    subtitle = (
        f"{len(lines)} trials with a result, {pruned} of them pruned (dashed); the better the bluer"
    )
    return with_heading(svg, heading, subtitle)


def _x(axes: Sequence[SweepAxis], index: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / max(1, len(axes) - 1)


def _y(share: float) -> float:
    return _TOP + _HEIGHT * (1 - share)


def _axes(axes: Sequence[SweepAxis]) -> Iterator[str]:
    for index, axis in enumerate(axes):
        x = _x(axes, index)
        yield element("line", x1=x, x2=x, y1=_TOP, y2=_TOP + _HEIGHT, class_="axis")
        is_last = 0 < index == len(axes) - 1
        anchor, shift = ("middle", 0.0) if index else ("start", 10 - _LEFT)
        yield text_label(x + shift, _TOP - 22, axis.name, text_anchor=anchor, class_="strong")
        side, anchor = (1, "start") if is_last else (-1, "end")
        for value, name in _marks(axis):
            y = _y(axis.share(value))
            yield element("line", x1=x + 4 * side, x2=x, y1=y, y2=y, class_="axis")
            yield text_label(x + 7 * side, y + 4, name, text_anchor=anchor, style=_HALO)


def _marks(axis: SweepAxis) -> Iterator[tuple[float, str]]:
    """Values of an axis that are named, with their names."""
    if axis.choices:
        every = math.ceil(len(axis.choices) / _MOST_CHOICES)
        yield from ((float(i), name) for i, name in enumerate(axis.choices) if i % every == 0)
        return
    if not axis.log or axis.high <= axis.low:
        yield from ((value, f"{value:.4g}") for value in ticks(axis.low, axis.high, 6))
        return
    powers = range(math.ceil(math.log10(axis.low) - 1e-9), math.floor(math.log10(axis.high)) + 1)
    marks = [10.0**power for power in powers]
    ends = [end for end in (axis.low, axis.high) if all(_apart(axis, end, m) for m in marks)]
    yield from ((value, f"{value:.3g}") for value in sorted([*marks, *ends]))


def _apart(axis: SweepAxis, first: float, second: float) -> bool:
    return abs(axis.share(first) - axis.share(second)) > 0.06


def _lines(axes: Sequence[SweepAxis], lines: Sequence[SweepLine]) -> Iterator[str]:
    """The trials, the worst first."""
    for line in sorted(lines, key=lambda line: -line.rank):
        points = [
            f"{_x(axes, index):.1f} {_y(axis.share(value)):.1f}"
            for index, (axis, value) in enumerate(zip(axes, line.values, strict=True))
        ]
        colour = f"color-mix(in oklab, var(--blue) {100 * (1 - line.rank):.0f}%, var(--orange))"
        is_best = line.rank == 0
        style = f"fill:none;stroke:{colour};stroke-width:{2.6 if is_best else 1.3};"
        style += f"opacity:{1 if is_best else 0.75}"
        style += ";stroke-dasharray:5 4" if line.is_pruned else ""
        values = ", ".join(
            f"{axis.name} {_named(axis, value)}"
            for axis, value in zip(axes, line.values, strict=True)
        )
        hint = tooltip(f"trial {line.number}: {values}")
        yield element("path", hint, d="M" + "L".join(points), style=style)


def _named(axis: SweepAxis, value: float) -> str:
    return axis.choices[round(value)] if axis.choices else f"{value:.4g}"


def _importance(importance: Mapping[str, float], y: float) -> Iterator[str]:
    title = "Importance: share of the spread of the ranks that each key alone explains"
    yield text_label(0, y - 8, title, class_="strong")
    for index, (key, share) in enumerate(importance.items()):
        top = y + 4 + _ROW * index
        length = (_WIDTH - _NAMES - _RIGHT) * share
        yield text_label(_NAMES - 10, top + 13, key, text_anchor="end")
        yield element(
            "rect", tooltip(f"{key}: {share:.0%}"), x=_NAMES, y=top + 3, width=length, height=_BAR,
            rx=2, style="fill:var(--blue);opacity:.85",
        )  # fmt: skip
        yield text_label(_NAMES + length + 8, top + 13, f"{share:.0%}")
