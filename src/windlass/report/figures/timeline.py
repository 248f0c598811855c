"""Figure of one step as lanes: predicted above measured, coloured by instruction kind.

Where a step has too many instructions to be told apart, each lane is cut into columns that show
their shares of the time, and neighbours that look alike are one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from windlass.report.figures.svg import (
    AxisUnit,
    element,
    kind_colour,
    legend,
    legend_width,
    seconds_unit,
    svg_document,
    text_label,
    ticks,
    tooltip,
)  # fmt: skip
from windlass.schema import DeviceTimeline, Timeline
from windlass.units import format_seconds

_WIDTH, _LEFT, _RIGHT = 1000.0, 92.0, 14.0
_LANE_HEIGHT, _LANE_GAP, _RANK_GAP, _TOP = 38.0, 6.0, 16.0, 34.0
_LOWEST_LANE, _LANES_HEIGHT = 16.0, 400.0
"""Smallest height of a lane in pixels, and the height of all lanes from which on they shrink."""
_MAX_BARS = 3000
"""Bars of all lanes together above which columns of shares are drawn."""
_COLUMNS = 120
_SMALLEST_PIXELS = 0.2
_ALIKE = 0.12
"""Largest difference of any share between neighbouring columns that are drawn as one."""
_NAMED_KINDS = 2
"""Instruction kinds of one colour that the legend names."""
_SHORTEST_SHARE = 1 / 2400
"""Share of the step below which an instruction is merged with its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBar:
    """One or more instructions drawn as one rectangle."""

    kind: str
    """The kind that takes most of its time."""
    start: float
    end: float
    text: str
    odd_microbatch: bool
    """Whether the micro-batch has an odd number; it is drawn lighter, so that neighbours differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineColumn:
    """A span of time in a lane, and what it is spent on."""

    start: float
    end: float
    shares: Mapping[str, float]
    """Share of the span by instruction kind; the rest is idle."""


def predicted_and_measured_timeline(predicted: Timeline | None, measured: Timeline | None) -> str:
    """SVG: the lanes of all ranks, predicted above measured."""
    named = [("predicted", predicted), ("measured", measured)]
    lanes = [(name, lane) for name, step in named if step is not None for lane in step.devices]
    lanes.sort(key=lambda pair: pair[1].device)
    if len({lane.device for _, lane in lanes}) > 1:
        lanes = [(f"{name} {lane.device}", lane) for name, lane in lanes]
    return draw_timeline(lanes, "timeline of one step, predicted above measured")


def draw_timeline(lanes: Sequence[tuple[str, DeviceTimeline]], name: str) -> str:
    """SVG: lanes below each other on one time axis, those of one rank close together."""
    end = max((max(lane.ends, default=0.0) for _, lane in lanes), default=0.0) or 1.0
    unit = seconds_unit(end)
    parts = []
    bars = []
    detailed = [list(merge_short_instructions(lane, end * _SHORTEST_SHARE)) for _, lane in lanes]
    in_columns = sum(map(len, detailed)) > _MAX_BARS
    height = max(_LOWEST_LANE, min(_LANE_HEIGHT, _LANES_HEIGHT / max(1, len(lanes))))
    y, device = _TOP, lanes[0][1].device if lanes else 0
    has_pairs = len({lane.device for _, lane in lanes}) < len(lanes)
    for (text, lane), merged in zip(lanes, detailed, strict=True):
        if lane.device != device:
            y, device = y + (_RANK_GAP if has_pairs else 0.0), lane.device
        middle = y + height / 2 + 4
        parts.append(text_label(_LEFT - 10, middle, text, text_anchor="end", class_="strong"))
        if in_columns:
            bars += [_column(column, y, height, end) for column in time_shares(lane, end)]
        else:
            bars += [_bar(bar, y, height, end) for bar in merged]
        y += height + _LANE_GAP
    entries = _entries([lane for _, lane in lanes])
    clip = element("rect", x=_LEFT, y=0, width=_WIDTH - _LEFT - _RIGHT, height=y)
    moving = element("g", "".join(bars), class_="moving") if bars else ""
    inside = element("clipPath", clip, id="lanes") + element("g", moving, clip_path="url(#lanes)")
    if in_columns:
        note = "colours show shares of the time: instructions are too short to tell apart"
        parts.append(text_label(_LEFT, y + 54, note))
    content = legend(entries, _LEFT, 14) + _time_axis(end, unit, y) + inside + "".join(parts)
    svg = svg_document(content, _WIDTH, y + (60 if in_columns else 40), name)
    scale = (
        f' data-left="{_LEFT:g}" data-right="{_WIDTH - _RIGHT:g}" data-end="{end / unit.scale:.6g}"'
    )
    return svg.replace("<svg", f'<svg class="lanes"{scale}', 1)


def merge_short_instructions(lane: DeviceTimeline, shortest: float) -> Iterator[TimelineBar]:
    """Bars for the instructions of a lane; those shorter than `shortest` seconds are merged.

    Bars keep the order and cover the same time; gaps of at least `shortest` seconds stay gaps.
    """
    group: list[int] = []
    for index, (start, end) in enumerate(zip(lane.starts, lane.ends, strict=True)):
        short = end - start < shortest
        if group and (not short or start - lane.ends[group[-1]] >= shortest):
            yield _merged_bar(lane, group)
            group = []
        group.append(index)
        if not short or end - lane.starts[group[0]] >= shortest:
            yield _merged_bar(lane, group)
            group = []
    if group:
        yield _merged_bar(lane, group)


def time_shares(
    lane: DeviceTimeline, end: float, columns: int = _COLUMNS
) -> Iterator[TimelineColumn]:
    """A lane in equal columns of time, with neighbours of alike shares as one.

    Args:
        columns: number of columns before neighbours are joined.
    """
    width = end / columns
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    for kind, start, stop in zip(lane.kinds, lane.starts, lane.ends, strict=True):
        for column in range(int(start / width), min(columns, int(stop / width) + 1)):
            inside = min(stop, (column + 1) * width) - max(start, column * width)
            if inside > 0:
                spent[column][kind] = spent[column].get(kind, 0.0) + inside
    first = 0
    for column in range(1, columns + 1):
        joined = _mean_shares(spent[first:column], width)
        if column == columns or not _alike(joined, _mean_shares([spent[column]], width)):
            yield TimelineColumn(start=first * width, end=column * width, shares=joined)
            first = column


def _mean_shares(columns: Sequence[Mapping[str, float]], width: float) -> dict[str, float]:
    """Shares of the time by kind; transfers may overlap, so their sum is bounded."""
    total: dict[str, float] = {}
    for column in columns:
        for kind, seconds in column.items():
            total[kind] = total.get(kind, 0.0) + seconds
    whole = max(sum(total.values()), len(columns) * width)
    return {kind: seconds / whole for kind, seconds in total.items()}


def _alike(shares: Mapping[str, float], other: Mapping[str, float]) -> bool:
    kinds = {*shares, *other}
    return all(abs(shares.get(kind, 0.0) - other.get(kind, 0.0)) <= _ALIKE for kind in kinds)


def _column(column: TimelineColumn, y: float, height: float, end: float) -> str:
    """The shares of a column above each other, from the bottom of its lane."""
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    listed = sorted(column.shares.items(), key=lambda item: -item[1])
    words = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in listed if share > 0.005)
    span = f"from {format_seconds(column.start)} to {format_seconds(column.end)}"
    shares: dict[str, float] = {}
    for kind, share in sorted(column.shares.items()):
        shares[kind_colour(kind)] = shares.get(kind_colour(kind), 0.0) + share
    parts = [tooltip(f"{words or 'nothing'} {span}")]
    bottom = y + height
    for colour, share in shares.items():
        if share * height >= _SMALLEST_PIXELS:
            bottom -= share * height
            parts.append(
                element(
                    "rect", x=_LEFT + column.start * scale, y=bottom, height=share * height,
                    width=(column.end - column.start) * scale, style=f"fill:{colour}",
                )
            )  # fmt: skip
    return element("g", "".join(parts))


def _entries(lanes: Sequence[DeviceTimeline]) -> list[tuple[str, str]]:
    """Legend entries: for each colour the kinds that take most of its time, and the colour."""
    spent: dict[str, dict[str, float]] = {}
    for lane in lanes:
        for kind, start, end in zip(lane.kinds, lane.starts, lane.ends, strict=True):
            kinds = spent.setdefault(kind_colour(kind), {})
            kinds[kind] = kinds.get(kind, 0.0) + end - start
    for named in (_NAMED_KINDS, 1):
        entries = []
        for colour, kinds in spent.items():
            ordered = sorted(kinds, key=lambda kind: -kinds[kind])
            more = ", …" if len(ordered) > named else ""
            entries.append((", ".join(ordered[:named]) + more, colour))
        if legend_width(entries) <= _WIDTH - _LEFT:
            break
    return entries


def _merged_bar(lane: DeviceTimeline, group: Sequence[int]) -> TimelineBar:
    seconds: dict[str, float] = {}
    for index in group:
        spent = lane.ends[index] - lane.starts[index]
        seconds[lane.kinds[index]] = seconds.get(lane.kinds[index], 0.0) + spent
    kind = max(seconds, key=lambda name: seconds[name])
    first, last = group[0], group[-1]
    start, end = lane.starts[first], lane.ends[last]
    if len(group) == 1:
        layer, micro = lane.layers[first], lane.micro_batches[first]
        what = kind + (f" of layer {layer}" if layer is not None else "")
        what += f", micro-batch {micro}" if micro is not None else ""
    else:
        micro = lane.micro_batches[first]
        what = f"{len(group)} instructions: {', '.join(seconds)}"
    text = f"{what}: {format_seconds(end - start)} from {format_seconds(start)}"
    return TimelineBar(
        kind=kind, start=start, end=end, text=text, odd_microbatch=bool(micro and micro % 2)
    )


def _bar(bar: TimelineBar, y: float, height: float, end: float) -> str:
    span = _WIDTH - _LEFT - _RIGHT
    style = f"fill:{kind_colour(bar.kind)}" + (";opacity:.72" if bar.odd_microbatch else "")
    width = (bar.end - bar.start) / end * span
    # A hairline around a wide enough bar shows where one instruction ends.
    if width > 3:
        style += ";stroke:var(--card);stroke-width:.4"
    return element(
        "rect", tooltip(bar.text), x=_LEFT + bar.start / end * span, y=y,
        width=max(width, 0.05), height=height, style=style,
    )  # fmt: skip


def _time_axis(end: float, unit: AxisUnit, y: float) -> str:
    span = _WIDTH - _LEFT - _RIGHT
    marks = []
    for tick in ticks(0, end / unit.scale, 8):
        x = _LEFT + tick * unit.scale / end * span
        marks.append(element("line", x1=x, x2=x, y1=_TOP - 6, y2=y + 2, class_="grid"))
        marks.append(text_label(x, y + 16, f"{tick:.6g}", text_anchor="middle"))
    clock = element("g", "".join(marks), class_="clock", data_y=y)
    name = f"time in the step [{unit.name}]"
    return clock + text_label(_LEFT + span / 2, y + 35, name, text_anchor="middle")
