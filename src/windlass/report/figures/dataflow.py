"""SVG figure of a layer's forward pass: its ops, and the bytes on every edge, on the chip or not.

It is in the manner of figure 2 of Srinivasan et al. 2023, arXiv:2304.05511: white arrows go through
far memory, grey ones stay on the chip.
"""

from collections.abc import Iterator, Sequence

from windlass.report.figures.dataflow_curves import curve_legend, curve_panels
from windlass.report.figures.svg import (
    element,
    svg_document,
    text_label,
    tooltip,
    with_heading,
)
from windlass.schema import DataflowReport, FlowEdge, FusedPass, PassFlow
from windlass.units import format_traffic

_LEFT, _RIGHT = 190.0, 20.0
_BOX, _PITCH, _HEIGHT = 112.0, 196.0, 44.0
_LEAST_WIDTH = 1000.0
_MAX_SCALE = 1.4
"""Curves below a wide figure are enlarged at most so much."""
_LANE, _TOP = 196.0, 34.0
_ARROW, _HEAD = 9.0, 9.0
"""Half the width of an arrow's shaft with its head, and the length of the head."""


def dataflow_figure(report: DataflowReport) -> str:
    """SVG file: the forward pass, fused to each degree, and the curves against sparsity."""
    flow = report.flow("forward")
    chip = report.chip
    lanes: list[tuple[str, FusedPass]] = [(level.fusion, level) for level in flow.levels]
    if chip.on_chip_bytes < flow.whole.on_chip_bytes:
        lanes.append(("one section", flow.whole))
    width = max(_LEAST_WIDTH, _LEFT + _PITCH * len(flow.ops) + _RIGHT)
    parts = [_legend()]
    for row, (name, level) in enumerate(lanes):
        parts += _lane(name, level, flow, _TOP + row * _LANE, width)
        fits = level.on_chip_bytes <= chip.on_chip_bytes or row < 3
        if not fits:
            parts.append(text_label(0, _TOP + row * _LANE + 102, "does not fit this chip"))
    height = _TOP + len(lanes) * _LANE + 10
    if report.curve:
        scale = min(_MAX_SCALE, width / _LEAST_WIDTH)
        legend, line = curve_legend()
        panels, tall = curve_panels(report)
        below = legend + element("g", panels, transform=f"translate(0 {line:g})")
        parts.append(element("g", below, transform=f"translate(0 {height:g}) scale({scale:g})"))
        height += (line + tall) * scale
    svg = svg_document("".join(parts), width, height, "bytes on every edge of a layer")
    part = f"the {report.role} branch of `{report.kind}`" if report.role else f"`{report.kind}`"
    subtitle = (
        f"{part}, {report.micro} × {report.sequence} tokens, {report.precision}, forward; on the "
        f"chip {format_traffic(chip.on_chip_bytes)}. All numbers are predicted."
    )
    return with_heading(svg, f"{report.model} on one device of {chip.machine}", subtitle)


def machines_curves_figure(reports: Sequence[DataflowReport]) -> str:
    """SVG file: the three curves against sparsity, a row for each machine."""
    legend, y = curve_legend()
    parts = [legend]
    for report in reports:
        panels, tall = curve_panels(report, is_alone=False)
        parts.append(element("g", panels, transform=f"translate(0 {y:g})"))
        y += tall
    svg = svg_document("".join(parts), _LEAST_WIDTH, y, "three curves against sparsity")
    first = reports[0]
    part = f"the {first.role} branch of `{first.kind}`" if first.role else f"`{first.kind}`"
    subtitle = (
        f"{part}, {first.micro} × {first.sequence} tokens, forward, one device of each machine. "
        "All numbers are predicted."
    )
    return with_heading(svg, f"{first.model} against the sparsity of its weights", subtitle)


def _x(index: int) -> float:
    return _LEFT + index * _PITCH + (_PITCH - _BOX) / 2


def _legend() -> str:
    parts = [
        _arrow(_LEFT, 8, _LEFT + 40, 8, on_chip=False),
        text_label(_LEFT + 50, 12, "through far memory"),
        _arrow(_LEFT + 200, 8, _LEFT + 240, 8, on_chip=True),
        text_label(_LEFT + 250, 12, "stays on the chip"),
    ]
    return "".join(parts)


def _lane(name: str, level: FusedPass, flow: PassFlow, top: float, width: float) -> Iterator[str]:
    box, memory = top + 62, top + 158
    yield text_label(0, top + 48, name, class_="strong", style="font-size:15px;font-weight:600")
    yield text_label(0, top + 68, f"{format_traffic(level.far_bytes)} of far memory")
    yield text_label(0, top + 85, f"{level.intensity:,.0f} FLOP/byte")
    yield element(
        "rect", x=_LEFT, y=memory, width=width - _LEFT - _RIGHT, height=18, rx=3,
        style="fill:var(--card);stroke:var(--line)",
    )  # fmt: skip
    yield text_label(width - _RIGHT - 8, memory + 13, "far memory", text_anchor="end")
    for section in level.sections:
        if section.last - section.first > 1:
            yield _section(section.first, section.last, box, section.on_chip_bytes)
    for index, op in enumerate(flow.ops):
        yield from _box(op.name, op.label, _x(index), box)
        into = [edge for edge in level.edges if edge.target == index and edge.source is None]
        out = [edge for edge in level.edges if edge.source == index and edge.target is None]
        yield from _far_arrows(into, out, _x(index), box, memory)
    yield from _chip_arrows([edge for edge in level.edges if edge.on_chip], box)


def _section(first: int, last: int, box: float, needs: float) -> str:
    x = _x(first) - 12
    hint = tooltip(f"one section, which needs {format_traffic(needs)} on the chip")
    return element(
        "rect", hint, x=x, y=box - 9, width=_x(last - 1) + _BOX + 12 - x, height=_HEIGHT + 18,
        rx=9, style="fill:var(--wash);stroke:var(--blue);stroke-dasharray:5 4",
    )  # fmt: skip


def _box(name: str, label: str, x: float, y: float) -> Iterator[str]:
    yield element(
        "rect", tooltip(label), x=x, y=y, width=_BOX, height=_HEIGHT, rx=5,
        style="fill:var(--card);stroke:var(--ink)",
    )  # fmt: skip
    module = label.removeprefix(name).strip()
    middle = x + _BOX / 2
    yield text_label(
        middle, y + (19 if module else 27), _short(name), text_anchor="middle", class_="strong"
    )
    if module:
        yield text_label(middle, y + 35, _short(module), text_anchor="middle")


def _short(name: str) -> str:
    """A name that fits a box."""
    return name if len(name) <= 17 else f"{name[:16]}…"


def _far_arrows(
    into: Sequence[FlowEdge], out: Sequence[FlowEdge], x: float, box: float, memory: float
) -> Iterator[str]:
    """Weights from and to above, activations from and to the memory below."""
    places = (
        ([e for e in into if e.is_weight], x + 34, box - 34, box - 1, "start"),
        ([e for e in out if e.is_weight], x + 78, box - 1, box - 34, "start"),
        ([e for e in into if not e.is_weight], x + 26, memory, box + _HEIGHT + 1, "end"),
        ([e for e in out if not e.is_weight], x + _BOX - 26, box + _HEIGHT + 1, memory, "start"),
    )
    for edges, place, y1, y2, anchor in places:
        if edges:
            total = sum(edge.nbytes for edge in edges)
            names = ", ".join(f"{edge.tensor} {format_traffic(edge.nbytes)}" for edge in edges)
            yield _arrow(place, y1, place, y2, on_chip=False, hint=names)
            shift = 14 if anchor == "start" else -14
            middle = (y1 + y2) / 2 + 4
            yield text_label(place + shift, middle, format_traffic(total), text_anchor=anchor)


def _chip_arrows(edges: Sequence[FlowEdge], box: float) -> Iterator[str]:
    """One grey arrow for each pair of ops: straight between neighbours, else below the boxes."""
    totals: dict[tuple[int, int], float] = {}
    for edge in edges:
        if edge.source is not None and edge.target is not None:
            pair = edge.source, edge.target
            totals[pair] = totals.get(pair, 0.0) + edge.nbytes
    for (source, target), total in totals.items():
        label = format_traffic(total)
        if target == source + 1:
            x1, x2, y = _x(source) + _BOX + 1, _x(target) - 1, box + _HEIGHT / 2
            yield _arrow(x1, y, x2, y, on_chip=True, hint=label)
            yield text_label((x1 + x2) / 2, y - 14, label, text_anchor="middle")
            continue
        x1, x2, y = _x(source) + _BOX / 2, _x(target) + _BOX / 2, box + _HEIGHT
        path = f"M{x1:.0f} {y:.0f}C{x1:.0f} {y + 26:.0f} {x2:.0f} {y + 26:.0f} {x2:.0f} {y:.0f}"
        style = "fill:none;stroke:var(--grey);stroke-width:5;opacity:.8"
        yield element("path", tooltip(label), d=path, style=style)
        yield text_label((x1 + x2) / 2, y + 34, label, text_anchor="middle")


def _arrow(x1: float, y1: float, x2: float, y2: float, *, on_chip: bool, hint: str = "") -> str:
    """A block arrow, horizontal or vertical."""
    length = abs(x2 - x1) + abs(y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    shaft, head = 0.5 * _ARROW, _ARROW
    neck = length - _HEAD
    outline = (
        (0.0, shaft), (neck, shaft), (neck, head), (length, 0.0), (neck, -head), (neck, -shaft),
        (0.0, -shaft),
    )  # fmt: skip
    points = " ".join(
        f"{x1 + along * dx - across * dy:.1f},{y1 + along * dy + across * dx:.1f}"
        for along, across in outline
    )
    fill = "var(--grey)" if on_chip else "var(--card)"
    style = f"fill:{fill};stroke:var(--ink);stroke-width:1"
    return element("polygon", tooltip(hint) if hint else "", points=points, style=style)
