"""Figures of predicted memory: peaks by tier, stage and class, and device memory over the step."""

from collections.abc import Iterator, Sequence

from windlass.report.figures.line_chart import ChartAxes, ChartSeries, ReferenceLine, line_chart
from windlass.report.figures.svg import (
    STAGE_COLOURS,
    bytes_unit,
    element,
    legend,
    seconds_unit,
    svg_document,
    text_label,
    text_width,
    tooltip,
)
from windlass.report.plan_forecast import PlanForecast
from windlass.schema import DeviceTimeline, MemoryClass, TierPeak
from windlass.units import format_bytes

_WIDTH, _LEFT, _RIGHT = 1000.0, 120.0, 210.0
_ROW, _BAR, _HEAD = 22.0, 15.0, 34.0
_MAX_STAGES = 16
_MAX_LINES = 6
CLASS_COLOURS: dict[MemoryClass, str] = {
    "weights": "blue", "gradients": "red", "optimizer": "green", "activations": "orange",
    "working": "pink", "runtime": "grey",
}  # fmt: skip


def peak_memory_figure(forecast: PlanForecast) -> str:
    """SVG: for each tier in use, one bar for each stage, stacked by memory class.

    A line marks the tier's capacity, where it is within the figure.
    """
    stages = forecast.stage_peaks
    shown = evenly_spaced(range(len(stages)))
    classes = [
        memory_class
        for memory_class in CLASS_COLOURS
        if any(peak.by_class.get(memory_class) for tiers in stages for peak in tiers)
    ]
    parts = [legend([(name, f"var(--{CLASS_COLOURS[name]})") for name in classes], _LEFT, 14)]
    y = 30.0
    for tier, first in enumerate(stages[0]):
        peaks = [(stage, stages[stage][tier]) for stage in shown]
        if tier == 0 or any(peak.peak_bytes for _, peak in peaks):
            parts.append(_tier(first, peaks, y, forecast))
            y += _HEAD + _ROW * len(peaks) + 12
    return svg_document("".join(parts), _WIDTH, y, "predicted peak memory of each tier and stage")


def memory_over_time_figure(forecast: PlanForecast) -> str:
    """SVG: device memory of one rank of each stage over the step."""
    lanes = [
        (stage, memory_over_time(lane))
        for stage, lane in forecast.stage_timelines()
        if lane.memory_bytes
    ]
    shown = [lanes[index] for index in evenly_spaced(range(len(lanes)), _MAX_LINES)]
    series = [
        ChartSeries(
            name=f"stage {stage}" if len(lanes) > 1 else "device memory, predicted",
            xs=[seconds for seconds, _ in points], ys=[nbytes for _, nbytes in points],
            colour=f"var(--{STAGE_COLOURS[stage % len(STAGE_COLOURS)]})",
            style="area" if len(shown) == 1 else "line",
        )
        for stage, points in shown
    ]  # fmt: skip
    capacity = forecast.prediction.peaks[0].capacity_bytes
    highest = max((max(one.ys) for one in series), default=1.0)
    longest = max((one.xs[-1] for one in series), default=1.0)
    reference_lines = []
    if highest > capacity / 2:
        name = f"capacity {format_bytes(capacity)}"
        reference_lines = [ReferenceLine(name=name, y=float(capacity), colour="var(--grey)")]
    axes = ChartAxes(
        x_name="time in the step", y_name="memory, predicted", x_unit=seconds_unit(longest),
        y_unit=bytes_unit(highest), y_from_zero=True,
    )  # fmt: skip
    return line_chart("predicted memory over the step", series, axes, reference_lines)


def memory_over_time(lane: DeviceTimeline) -> list[tuple[float, float]]:
    """Seconds in the step and bytes of device memory, in order of time.

    A transfer starts after the transfers before it, so perhaps later than the instructions that
    follow it in the program. Such a transfer is left out: what follows it holds as much memory.
    """
    end = max(lane.ends)
    points, earliest = [(end, float(lane.memory_bytes[-1]))], end
    for start, nbytes in zip(reversed(lane.starts), reversed(lane.memory_bytes), strict=True):
        if start <= earliest:
            points.append((start, float(nbytes)))
            earliest = start
    return points[::-1]


def evenly_spaced(indices: range, limit: int = _MAX_STAGES) -> list[int]:
    """All indices, or `limit` evenly spaced ones with both ends."""
    if len(indices) <= limit:
        return list(indices)
    return [indices[round(step * (len(indices) - 1) / (limit - 1))] for step in range(limit)]


def _tier(
    first: TierPeak, peaks: Sequence[tuple[int, TierPeak]], y: float, forecast: PlanForecast
) -> str:
    fullest = max(peak.peak_bytes for _, peak in peaks)
    capacity = (
        forecast.prediction.peaks[0].capacity_bytes
        if first.tier == forecast.prediction.peaks[0].tier
        else first.capacity_bytes
    )
    within = fullest > capacity / 4
    scale = (_WIDTH - _LEFT - _RIGHT) / (max(capacity, fullest) * 1.02 if within else fullest)
    name = (
        f"{first.tier}: {format_bytes(fullest)} of {format_bytes(capacity)} on the fullest device"
    )
    parts = [text_label(_LEFT, y + 14, name, class_="strong")]
    for line, (stage, peak) in enumerate(peaks):
        parts += _bar(stage, peak, y + _HEAD - 10 + line * _ROW, scale, capacity, len(peaks))
    if within:
        x, top = _LEFT + capacity * scale, y + _HEAD - 14
        style = "stroke:var(--ink);stroke-width:1.4;stroke-dasharray:5 3"
        bottom = top + _ROW * len(peaks) + 4
        parts.append(
            element(
                "line", tooltip(f"capacity {format_bytes(capacity)}"), x1=x, x2=x, y1=top,
                y2=bottom, style=style,
            )
        )  # fmt: skip
    return "".join(parts)


def _bar(
    stage: int, peak: TierPeak, y: float, scale: float, capacity: int, stages: int
) -> Iterator[str]:
    name = f"stage {stage}" if stages > 1 else "each device"
    yield text_label(_LEFT - 10, y + 12, name, text_anchor="end")
    x = _LEFT
    for memory_class, colour in CLASS_COLOURS.items():
        nbytes = peak.by_class.get(memory_class, 0)
        if nbytes > 0:
            hint = tooltip(f"{name}, {memory_class}: {format_bytes(nbytes)}")
            yield element("rect", hint, x=x, y=y, width=nbytes * scale, height=_BAR,
                          style=f"fill:var(--{colour})")  # fmt: skip
            x += nbytes * scale
    over = peak.peak_bytes - capacity
    text = format_bytes(peak.peak_bytes)
    text += f", {format_bytes(over)} too much" if over > 0 else ""
    end = _LEFT + capacity * scale
    left = end if x - 8 <= end <= x + 16 + text_width(text) else x
    yield text_label(left + 8, y + 12, text)
