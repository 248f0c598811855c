"""Three curves against sparsity: bandwidth and memory on the chip that are needed, and speed-up."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from windlass.report.figures.svg import element, legend, text_label, tooltip
from windlass.schema import DataflowReport, FusionLevel, SparsityLevel
from windlass.units import format_rate, format_traffic

_COLOURS: dict[FusionLevel, str] = {
    "kernel by kernel": "var(--red)", "epilogue": "var(--orange)", "dataflow": "var(--blue)",
}  # fmt: skip
_PANEL, _LEFT, _GAP = 236.0, 66.0, 84.0
_TALL, _LOW = 150.0, 70.0
"""Height of a chart that stands alone, and of one among many."""
_BOTTOM = 34.0


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


def curve_legend() -> tuple[str, float]:
    """What the colours of all curves mean, and its height."""
    entries = [*_COLOURS.items(), ("what the device has", "var(--grey)")]
    return legend(entries, _LEFT, 16), 24.0


def curve_panels(report: DataflowReport, *, is_alone: bool = True) -> tuple[str, float]:
    """Drawing of a report's three curves, 1000 wide, and its height.

    Args:
        is_alone: whether no other machine is drawn below; if one is, charts are lower.
    """
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
            reference=(f"it has {format_traffic(chip.on_chip_bytes)}", chip.on_chip_bytes),
            format=format_traffic,
            base=10.0,
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
    parts = [text_label(0, 14, name, class_="strong", style="font-size:14px;font-weight:600")]
    top, tall = 44.0, _TALL if is_alone else _LOW
    for index, panel in enumerate(panels):
        parts += _panel(panel, sparsities, _LEFT + index * (_PANEL + _GAP), (top, tall))
    return "".join(parts), top + tall + _BOTTOM


def _lines(
    report: DataflowReport, value: Callable[[SparsityLevel], float]
) -> tuple[tuple[str, str, tuple[float, ...]], ...]:
    ordered = sorted(report.curve, key=lambda level: level.sparsity)
    return tuple(
        (fusion, colour, tuple(value(level) for level in ordered if level.fusion == fusion))
        for fusion, colour in _COLOURS.items()
    )


def _panel(
    panel: _Panel, sparsities: Sequence[float], left: float, place: tuple[float, float]
) -> Iterator[str]:
    """One chart.

    Args:
        sparsities: places on the horizontal axis, which are equally far apart.
        place: its top and its height.
    """
    top, tall = place
    values = [value for _, _, line in panel.lines for value in line if value > 0]
    values += [panel.reference[1]] if panel.reference else []
    low, high = min(values) / 1.15, max(values) * 1.15

    def x(index: int) -> float:
        return left + _PANEL * index / max(1, len(sparsities) - 1)

    def y(value: float) -> float:
        return top + tall * (1 - math.log(value / low) / math.log(high / low))

    yield text_label(left, top - 10, panel.title, class_="strong")
    for mark in _marks(low, high, panel.base, int(tall / 15)):
        at = y(mark)
        yield element("line", x1=left, x2=left + _PANEL, y1=at, y2=at, class_="grid")
        yield text_label(left - 6, at + 4, panel.format(mark), text_anchor="end")
    for index, sparsity in enumerate(sparsities):
        name = f"{100 * sparsity:g} %"
        yield text_label(x(index), top + tall + 16, name, text_anchor="middle")
    if panel.reference:
        name, value = panel.reference
        style = "stroke:var(--grey);stroke-width:1.6;stroke-dasharray:6 4"
        at = y(value)
        yield element("line", x1=left, x2=left + _PANEL, y1=at, y2=at, style=style)
        # On the left, where the curves of needed bandwidth are low and those of memory high.
        halo = "paint-order:stroke;stroke:var(--card);stroke-width:3px"
        shift = 13 if at < top + 18 else -5
        yield text_label(left + 6, at + shift, name, style=halo)
    for name, colour, line in panel.lines:
        yield from _line(name, colour, [(x(i), y(v), v) for i, v in enumerate(line) if v > 0])


def _line(name: str, colour: str, points: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
    style = f"fill:none;stroke:{colour};stroke-width:2"
    yield element("path", tooltip(name), d=path, style=style)
    for x, y, value in points:
        hint = tooltip(f"{name}: {value:.4g}")
        yield element("circle", hint, cx=x, cy=y, r=3.4, style=f"fill:{colour}")


def _marks(low: float, high: float, base: float, most: int) -> list[float]:
    """Round numbers of an axis: powers of the base; of ten, also 2 and 5 times these."""
    first = math.floor(math.log(low, base))
    powers = [base**n for n in range(first, math.ceil(math.log(high, base)) + 1)]
    finer = [factor * power for power in powers for factor in ((1, 2, 5) if base == 10 else (1,))]
    choices = ([mark for mark in marks if low <= mark <= high] for marks in (finer, powers))
    marks = next((found for found in choices if len(found) <= most), [])
    every = math.ceil(len(finer) / most)
    return marks or [mark for mark in powers if low <= mark <= high][::every]
