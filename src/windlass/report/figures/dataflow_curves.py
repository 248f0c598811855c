"""Three curves against sparsity: bandwidth and memory on the chip that are needed, and speed-up."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from windlass.report.figures.svg import element, legend, text_label, tooltip
from windlass.schema import DataflowReport, FusionLevel, SparsityLevel
from windlass.units import format_bytes, format_rate

_COLOURS: dict[FusionLevel, str] = {
    "kernel by kernel": "var(--red)", "epilogue": "var(--orange)", "dataflow": "var(--blue)",
}  # fmt: skip
_WIDTH, _PANEL, _TALL = 1000.0, 236.0, 150.0
_LEFT, _GAP, _TOP = 66.0, 84.0, 58.0
_BOTTOM = 46.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One chart, with a logarithmic vertical axis."""

    title: str
    lines: tuple[tuple[str, str, tuple[float, ...]], ...]
    """Name, colour and values of each line."""
    reference: tuple[str, float] | None
    """Name and value of a horizontal line; None if there is none."""
    format: Callable[[float], str]
    base: float
    """Base of the numbers on the axis."""


def curve_panels(report: DataflowReport) -> tuple[str, float]:
    """Drawing of a report's three curves, 1000 wide, and its height."""
    sparsities = sorted({level.sparsity for level in report.curve})
    chip = report.chip
    panels = (
        _Panel(
            title="bandwidth of far memory needed",
            lines=_lines(report, lambda level: level.needed_bandwidth),
            reference=(f"it has {format_rate(chip.far_rate)}", chip.far_rate),
            format=format_rate,
            base=10.0,
        ),
        _Panel(
            title="memory on the chip needed",
            lines=_lines(report, lambda level: level.on_chip_bytes)[-1:],
            reference=(f"it has {format_bytes(chip.on_chip_bytes)}", chip.on_chip_bytes),
            format=format_bytes,
            base=2.0,
        ),
        _Panel(
            title="speed-up over dense kernel by kernel",
            lines=_lines(report, lambda level: level.speed_up),
            reference=None,
            format=lambda value: f"{value:g}",
            base=2.0,
        ),
    )
    name = f"{chip.machine}, {report.precision}"
    parts = [text_label(0, 16, name, class_="strong", style="font-size:15px;font-weight:600")]
    entries = [(f"{fusion}", colour) for fusion, colour in _COLOURS.items()]
    parts.append(legend([*entries, ("the device itself", "var(--grey)")], 290, 16))
    for index, panel in enumerate(panels):
        parts += _panel(panel, sparsities, _LEFT + index * (_PANEL + _GAP))
    return "".join(parts), _TOP + _TALL + _BOTTOM


def _lines(
    report: DataflowReport, value: Callable[[SparsityLevel], float]
) -> tuple[tuple[str, str, tuple[float, ...]], ...]:
    ordered = sorted(report.curve, key=lambda level: level.sparsity)
    return tuple(
        (fusion, colour, tuple(value(level) for level in ordered if level.fusion == fusion))
        for fusion, colour in _COLOURS.items()
    )


def _panel(panel: _Panel, sparsities: Sequence[float], left: float) -> Iterator[str]:
    values = [value for _, _, line in panel.lines for value in line if value > 0]
    values += [panel.reference[1]] if panel.reference else []
    low, high = min(values) / 1.15, max(values) * 1.15

    def x(index: int) -> float:
        return left + _PANEL * index / max(1, len(sparsities) - 1)

    def y(value: float) -> float:
        return _TOP + _TALL * (1 - math.log(value / low) / math.log(high / low))

    yield text_label(left, _TOP - 14, panel.title, class_="strong")
    for mark in _marks(low, high, panel.base):
        at = y(mark)
        yield element("line", x1=left, x2=left + _PANEL, y1=at, y2=at, class_="grid")
        yield text_label(left - 6, at + 4, panel.format(mark), text_anchor="end")
    for index, sparsity in enumerate(sparsities):
        name = f"{100 * sparsity:g} %"
        yield text_label(x(index), _TOP + _TALL + 16, name, text_anchor="middle")
    if panel.reference:
        name, value = panel.reference
        style = "stroke:var(--grey);stroke-width:1.6;stroke-dasharray:6 4"
        at = y(value)
        yield element("line", x1=left, x2=left + _PANEL, y1=at, y2=at, style=style)
        yield text_label(
            left + _PANEL, at - 5, name, text_anchor="end",
            style="paint-order:stroke;stroke:var(--card);stroke-width:3px",
        )  # fmt: skip
    for name, colour, line in panel.lines:
        yield from _line(name, colour, [(x(i), y(v), v) for i, v in enumerate(line) if v > 0])


def _line(name: str, colour: str, points: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
    style = f"fill:none;stroke:{colour};stroke-width:2"
    yield element("path", tooltip(name), d=path, style=style)
    for x, y, value in points:
        hint = tooltip(f"{name}: {value:.4g}")
        yield element("circle", hint, cx=x, cy=y, r=3.4, style=f"fill:{colour}")


def _marks(low: float, high: float, base: float) -> list[float]:
    """Round numbers of an axis, at most six: powers of the base, with halves if these are few."""
    first = math.ceil(math.log(low, base) - 1e-9)
    powers = [base**n for n in range(first, math.floor(math.log(high, base)) + 1)]
    if base == 10 and len(powers) < 3:
        powers = sorted(
            mark
            for n in range(first - 1, first + 4)
            for mark in (10.0**n, 2 * 10.0**n, 5 * 10.0**n)
            if low <= mark <= high
        )
    every = math.ceil(len(powers) / 6)
    return powers[::every]
