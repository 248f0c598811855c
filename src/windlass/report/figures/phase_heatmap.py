"""Heat map: which layers compute in which phase of a step, and for how long."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from windlass.program.instruction import GRADIENT_PASSES
from windlass.report.figures.svg import element, svg_document, text_label, ticks, tooltip
from windlass.report.plan_forecast import PlanForecast
from windlass.units import format_seconds

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 192.0, 14.0, 40.0
_HEIGHT, _LOWEST, _HIGHEST = 320.0, 1.6, 22.0
_FRAMED = 4.0
"""Pixels of a row from which on there is room for a frame."""
_LETTERS = 12.0
"""Pixels of a row from which on it has room for its name."""
_FAINTEST = 0.12
_BACK = (*GRADIENT_PASSES, "backward_input", "recompute")
_SWATCHES = 8


class _Row(NamedTuple):
    """One phase on its way forward or back."""

    stage: int
    phase: int
    forward: bool


def phase_heatmap(forecast: PlanForecast) -> str:
    """Phases from top to bottom in the order of the step, layers from left to right, as SVG.

    A frame is around the layers that a phase has in the near tier; the darker a cell, the longer
    its layer computes, recomputing included.
    """
    seconds = _seconds(forecast)
    turns = forecast.phase_ranges()
    forward = [_Row(stage, phase, True) for stage, phase, _ in turns]
    rows = forward + [row._replace(forward=False) for row in reversed(forward)]
    bounds = {(stage, phase): each for stage, phase, each in turns}
    layers = forecast.graph.layers
    cell = (_WIDTH - _LEFT - _RIGHT) / layers
    height = max(_LOWEST, min(_HIGHEST, _HEIGHT / len(rows)))
    most = max(seconds.values(), default=0.0) or 1.0
    parts = []
    for line, row in enumerate(rows):
        y = _TOP + line * height
        if height >= _LETTERS or line % int(-(-_LETTERS // height)) == 0:
            parts.append(text_label(_LEFT - 8, y + height / 2 + 4, _name(row, forecast),
                               text_anchor="end"))  # fmt: skip
        first, last = bounds[row.stage, row.phase]
        parts += _cells(row, range(first, last), y, (cell, height), seconds, most)
        if height >= _FRAMED:
            parts.append(
                element("rect", x=_LEFT + first * cell, y=y + 0.5, width=(last - first) * cell,
                        height=height - 1, style="fill:none;stroke:var(--grey);stroke-width:.8")
            )  # fmt: skip
    bottom = _TOP + len(rows) * height
    parts += [*_axis(layers, cell, bottom), *_scale(most)]
    return svg_document("".join(parts), _WIDTH, bottom + 42, "layers that compute in each phase")


def _seconds(forecast: PlanForecast) -> dict[tuple[bool, int], float]:
    """Computing of each layer, forward or back, over all micro-batches."""
    spent: dict[tuple[bool, int], float] = defaultdict(float)
    for _, lane in forecast.stage_timelines():
        for kind, layer, start, end in zip(
            lane.kinds, lane.layers, lane.starts, lane.ends, strict=True
        ):
            if layer is not None and (kind == "forward" or kind in _BACK):
                spent[kind == "forward", layer] += end - start
    return spent


def _name(row: _Row, forecast: PlanForecast) -> str:
    parts = [f"stage {row.stage}"] if forecast.plan.parallel.pipeline > 1 else []
    if any(len(part.phases) > 1 for part in forecast.plan.stages):
        parts.append(f"phase {row.phase}")
    return ", ".join((*parts, "forward" if row.forward else "backward"))


def _cells(
    row: _Row,
    layers: range,
    y: float,
    size: tuple[float, float],
    seconds: dict[tuple[bool, int], float],
    most: float,
) -> Iterator[str]:
    width, height = size
    inset = 1 if height >= _FRAMED else 0
    way = "forward" if row.forward else "backward"
    for layer in layers:
        spent = seconds.get((row.forward, layer), 0.0)
        if spent:
            yield element(
                "rect", tooltip(f"layer {layer}, {way}: {format_seconds(spent)}"),
                x=_LEFT + layer * width, y=y + inset, width=max(width - 0.4, 0.3),
                height=height - 2 * inset,
                style=f"fill:var(--blue);opacity:{_tone(spent / most):.2f}",
            )  # fmt: skip


def _tone(share: float) -> float:
    return _FAINTEST + (1 - _FAINTEST) * share


def _axis(layers: int, cell: float, bottom: float) -> Iterator[str]:
    for tick in ticks(0, layers - 1, 10):
        if tick == int(tick):
            x = _LEFT + (tick + 0.5) * cell
            yield text_label(x, bottom + 16, f"{tick:.0f}", text_anchor="middle")
    yield text_label((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, "layer", text_anchor="middle")


def _scale(most: float) -> Iterator[str]:
    x = _WIDTH - _RIGHT - 330
    yield text_label(x - 8, 20, "computing, predicted: 0", text_anchor="end")
    for swatch in range(_SWATCHES):
        tone = _tone((swatch + 0.5) / _SWATCHES)
        yield element("rect", x=x + swatch * 24, y=10, width=24, height=12,
                      style=f"fill:var(--blue);opacity:{tone:.2f}")  # fmt: skip
    yield text_label(x + _SWATCHES * 24 + 8, 20, f"{format_seconds(most)} a step")
