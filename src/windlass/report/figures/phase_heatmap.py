"""Heat map: the layers that compute in each phase of a step, and their time."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from windlass.program import GRADIENT_PASSES
from windlass.report.figures.svg import element, svg_document, text_label, ticks, tooltip
from windlass.report.plan_forecast import PlanForecast, PlanPhase
from windlass.units import format_seconds

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 192.0, 14.0, 40.0
_HEIGHT, _LOWEST, _HIGHEST = 320.0, 1.6, 22.0
_FRAMED_ROW = 4.0
"""Smallest height of a row in pixels that has a frame."""
_NAMED_ROW = 12.0
"""Smallest height of a row in pixels that has a name."""
_FAINTEST = 0.12
_BACKWARD_KINDS = (*GRADIENT_PASSES, "backward_input", "recompute")
_SWATCHES = 8


class _Row(NamedTuple):
    """One phase in its forward or backward pass."""

    phase: PlanPhase
    forward: bool

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.phase.name, "forward" if self.forward else "backward")))


def phase_heatmap(forecast: PlanForecast) -> str:
    """SVG: phases from top to bottom in the order of the step, layers from left to right.

    A frame marks the layers that a phase holds in device memory. A darker cell means more compute
    time of its layer, recompute included.
    """
    seconds = _seconds(forecast)
    phases = forecast.phases()
    rows = [_Row(phase, True) for phase in phases]
    rows += [_Row(phase, False) for phase in reversed(phases)]
    layers = forecast.graph.layers
    cell = (_WIDTH - _LEFT - _RIGHT) / layers
    height = max(_LOWEST, min(_HIGHEST, _HEIGHT / len(rows)))
    longest = max(seconds.values(), default=0.0) or 1.0
    parts = []
    for line, row in enumerate(rows):
        y = _TOP + line * height
        if height >= _NAMED_ROW or line % int(-(-_NAMED_ROW // height)) == 0:
            parts.append(text_label(_LEFT - 8, y + height / 2 + 4, row.name, text_anchor="end"))
        held = row.phase.layers
        parts += _cells(row, y, (cell, height), seconds, longest)
        if height >= _FRAMED_ROW:
            parts.append(
                element("rect", x=_LEFT + held.start * cell, y=y + 0.5, width=len(held) * cell,
                        height=height - 1, style="fill:none;stroke:var(--grey);stroke-width:.8")
            )  # fmt: skip
    bottom = _TOP + len(rows) * height
    scale = colour_scale("compute time, predicted: 0", f"{format_seconds(longest)} a step")
    parts += [*_axis(layers, cell, bottom), *scale]
    return svg_document("".join(parts), _WIDTH, bottom + 42, "compute time of each layer by phase")


def _seconds(forecast: PlanForecast) -> dict[tuple[bool, int], float]:
    """Compute seconds by (is forward, layer), summed over micro-batches."""
    spent: dict[tuple[bool, int], float] = defaultdict(float)
    for _, lane in forecast.stage_timelines():
        for kind, layer, start, end in zip(
            lane.kinds, lane.layers, lane.starts, lane.ends, strict=True
        ):
            if layer is not None and (kind == "forward" or kind in _BACKWARD_KINDS):
                spent[kind == "forward", layer] += end - start
    return spent


def _cells(
    row: _Row,
    y: float,
    size: tuple[float, float],
    seconds: dict[tuple[bool, int], float],
    longest: float,
) -> Iterator[str]:
    width, height = size
    inset = 1 if height >= _FRAMED_ROW else 0
    direction = "forward" if row.forward else "backward"
    for layer in row.phase.layers:
        spent = seconds.get((row.forward, layer), 0.0)
        if spent:
            yield element(
                "rect", tooltip(f"layer {layer}, {direction}: {format_seconds(spent)}"),
                x=_LEFT + layer * width, y=y + inset, width=max(width - 0.4, 0.3),
                height=height - 2 * inset,
                style=f"fill:var(--blue);opacity:{opacity(spent / longest):.2f}",
            )  # fmt: skip


def opacity(share: float) -> float:
    """How dark a cell is, by its share of the darkest one."""
    return _FAINTEST + (1 - _FAINTEST) * share


def _axis(layers: int, cell: float, bottom: float) -> Iterator[str]:
    for tick in ticks(0, layers - 1, 10):
        if tick == int(tick):
            x = _LEFT + (tick + 0.5) * cell
            yield text_label(x, bottom + 16, f"{tick:.0f}", text_anchor="middle")
    yield text_label((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, "layer", text_anchor="middle")


def colour_scale(name: str, darkest: str) -> Iterator[str]:
    """What the colours above a heat map mean.

    Args:
        name: of what is drawn, with its lowest value.
    """
    x = _WIDTH - _RIGHT - 330
    yield text_label(x - 8, 20, name, text_anchor="end")
    for swatch in range(_SWATCHES):
        shade = opacity((swatch + 0.5) / _SWATCHES)
        yield element("rect", x=x + swatch * 24, y=10, width=24, height=12,
                      style=f"fill:var(--blue);opacity:{shade:.2f}")  # fmt: skip
    yield text_label(x + _SWATCHES * 24 + 8, 20, darkest)
