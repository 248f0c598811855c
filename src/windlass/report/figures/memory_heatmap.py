"""Heat map: the device memory that each layer takes over a step."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from windlass.program import LayerUse, memory_by_layer
from windlass.report.figures.phase_heatmap import colour_scale, opacity
from windlass.report.figures.svg import element, svg_document, text_label, ticks, tooltip
from windlass.report.plan_forecast import PlanForecast
from windlass.schema import DeviceTimeline
from windlass.units import format_bytes, format_seconds

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 192.0, 14.0, 40.0
_HEIGHT, _LOWEST, _HIGHEST = 360.0, 1.6, 22.0
_NAMED_ROW = 12.0
"""Smallest height of a group of rows in pixels that has a name."""
_COLUMNS = 270
"""Columns of equal time, three pixels each."""


def memory_heatmap(forecast: PlanForecast) -> str:
    """SVG: layers from top to bottom, in groups of a phase, and time from left to right.

    A darker cell means more bytes of its layer in device memory, weights, gradients, optimizer
    state, activations and temporary memory together: the most in that stretch of time. What
    belongs to no layer is not drawn.
    """
    layers = forecast.graph.layers
    end = max(max(lane.ends) for _, lane in forecast.stage_timelines())
    rows: dict[int, list[int]] = {layer: [0] * _COLUMNS for layer in range(layers)}
    for (_, lane), program in zip(forecast.stage_timelines(), forecast.programs, strict=True):
        uses = memory_by_layer(program, forecast.plan, forecast.graph)
        starts = _starts(lane)
        for layer, each in uses.items():
            if layer is not None:
                _fill(rows[layer], each, starts, end)
    most = max(map(max, rows.values()), default=0) or 1
    height = max(_LOWEST, min(_HIGHEST, _HEIGHT / layers))
    parts: list[str] = []
    for layer, row in rows.items():
        parts += _cells(layer, row, (_TOP + layer * height, height), most, end)
    parts += _groups(forecast, height)
    bottom = _TOP + layers * height
    parts += [
        *_axis(end, bottom),
        *colour_scale("memory of a layer, predicted: 0", format_bytes(most)),
    ]
    return svg_document("".join(parts), _WIDTH, bottom + 42, "memory of each layer over the step")


def _starts(lane: DeviceTimeline) -> list[float]:
    """When each instruction starts, and when the last one ends.

    A transfer that starts after what follows it in the program counts from there on.
    """
    starts = [max(lane.ends)]
    for start in reversed(lane.starts):
        starts.append(min(start, starts[-1]))
    return starts[::-1]


def _fill(row: list[int], uses: Sequence[LayerUse], starts: Sequence[float], end: float) -> None:
    """Enters the most bytes that a layer takes in each column."""
    ahead = [starts[use.instruction] for use in uses[1:]]
    for use, until in zip(uses, [*ahead, end], strict=True):
        ended = min(starts[use.instruction + 1], until)
        _raise(row, (starts[use.instruction], ended), use.during, end)
        _raise(row, (ended, until), use.after, end)


def _raise(row: list[int], between: tuple[float, float], nbytes: int, end: float) -> None:
    first, last = (min(int(_COLUMNS * time / end), _COLUMNS - 1) for time in between)
    for column in range(first, last + 1):
        row[column] = max(row[column], nbytes)


def _cells(
    layer: int, row: Sequence[int], place: tuple[float, float], most: int, end: float
) -> Iterator[str]:
    """The cells of a layer; columns that look alike are one."""
    y, height = place
    width = (_WIDTH - _LEFT - _RIGHT) / _COLUMNS
    column = 0
    for nbytes, columns in groupby(row):
        count = len(list(columns))
        if nbytes:
            since, until = (format_seconds(end * at / _COLUMNS) for at in (column, column + count))
            hint = tooltip(f"layer {layer}, {since} to {until}: {format_bytes(nbytes)}")
            yield element(
                "rect", hint, x=_LEFT + column * width, y=y, width=count * width,
                height=max(height - 0.4, 0.3),
                style=f"fill:var(--blue);opacity:{opacity(nbytes / most):.2f}",
            )  # fmt: skip
        column += count


def _groups(forecast: PlanForecast, height: float) -> Iterator[str]:
    """The name of each phase or stage beside its layers, and lines between them."""
    named = -_NAMED_ROW
    for name, held in forecast.phases():
        first, last = held.start, held.stop
        layers = f"layer {first}" if len(held) == 1 else f"layers {first}–{last - 1}"
        middle = (first + last) / 2 * height
        if middle >= named + _NAMED_ROW:
            text = ", ".join(filter(None, (name, layers)))
            yield text_label(_LEFT - 8, _TOP + middle + 4, text, text_anchor="end")
            named = middle
        if first:
            y = _TOP + first * height - 0.2
            yield element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y,
                          style="stroke:var(--grey);stroke-width:.8")  # fmt: skip


def _axis(end: float, bottom: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    for tick in ticks(0, end, 8):
        yield text_label(_LEFT + tick * scale, bottom + 16, format_seconds(tick) if tick else "0",
                         text_anchor="middle")  # fmt: skip
    yield text_label((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, "time in the step",
                     text_anchor="middle")  # fmt: skip
