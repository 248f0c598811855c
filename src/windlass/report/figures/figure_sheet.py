"""Figure sheet: the figures of a plan by name, one below the other in one SVG file."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from windlass.program import TRANSFER_KINDS
from windlass.report.figures.device_mesh import device_mesh_figure
from windlass.report.figures.memory import (
    evenly_spaced,
    memory_over_time_figure,
    peak_memory_figure,
)
from windlass.report.figures.memory_heatmap import memory_heatmap
from windlass.report.figures.phase_heatmap import phase_heatmap
from windlass.report.figures.svg import element, standalone, svg_document, svg_size, text_label
from windlass.report.figures.timeline import draw_timeline
from windlass.report.figures.waterfall import step_time_waterfall
from windlass.report.formatting import describe_batch, describe_parallelism, describe_plan
from windlass.report.plan_forecast import PlanForecast
from windlass.schema import DeviceTimeline

_LINE_LETTERS = 140
"""Letters in a line as wide as a figure."""
_MAX_LANES = 16


def timeline_figure(forecast: PlanForecast) -> str:
    """SVG: the timeline of one rank of each stage, or of some stages if there are many.

    Transfers between tiers have a lane of their own, because they overlap compute.
    """
    shown = []
    timelines = forecast.stage_timelines()
    for index in evenly_spaced(range(len(timelines)), _max_stages(forecast)):
        stage, first = timelines[index]
        lane = first.model_copy(update={"device": stage})
        name = f"stage {stage}" if len(forecast.timeline.devices) > 1 else "compute"
        if forecast.plan.offloads:
            shown.append((name, _split(lane, transfers=False)))
            shown.append(("transfers", _split(lane, transfers=True)))
        else:
            shown.append((name, lane))
    return draw_timeline(shown, "predicted timeline of one step")


def _max_stages(forecast: PlanForecast) -> int:
    """Stages that are drawn at most; transfers take a second lane of each."""
    return _MAX_LANES // 2 if forecast.plan.offloads else _MAX_LANES


def _split(lane: DeviceTimeline, *, transfers: bool) -> DeviceTimeline:
    """The transfers of a lane, or its other instructions."""
    kept = [index for index, kind in enumerate(lane.kinds) if (kind in TRANSFER_KINDS) == transfers]
    names = ("kinds", "layers", "micro_batches", "starts", "ends")
    return lane.model_copy(
        update={name: tuple(getattr(lane, name)[index] for index in kept) for name in names}
    )


PLAN_FIGURES: Mapping[str, tuple[str, Callable[[PlanForecast], str]]] = {
    "mesh": ("Device mesh", lambda forecast: device_mesh_figure(forecast.plan)),
    "phases": ("Predicted compute of each layer by phase", phase_heatmap),
    "waterfall": (
        "Predicted step time by term",
        lambda forecast: step_time_waterfall(forecast.prediction),
    ),
    "memory": ("Predicted peak memory by tier, stage and class", peak_memory_figure),
    "memory-timeline": ("Predicted memory over the step", memory_over_time_figure),
    "memory-layers": ("Predicted memory of each layer over the step", memory_heatmap),
    "timeline": ("Predicted step, instruction by instruction", timeline_figure),
}
"""Heading and drawing function of each figure by name."""

_WIDTH, _MARGIN = 1000.0, 24.0
_LINE, _HEADING, _GAP = 18.0, 34.0, 26.0


def figure_notes(forecast: PlanForecast) -> Mapping[str, str]:
    """The sentence below the heading of each figure, by name."""
    plan = forecast.plan
    stages = len(forecast.timeline.devices)
    shown = _max_stages(forecast)
    more = f" {shown} of {stages} stages are drawn." if stages > shown else ""
    one_rank = " One rank stands for each stage." if plan.parallel.devices > 1 else ""
    return {
        "mesh": f"{describe_parallelism(plan)}; {describe_batch(plan, forecast.graph)}.",
        "phases": "Each row is one phase, forward or backward; a frame marks its layers.",
        "waterfall": f"Terms of the slowest rank.{one_rank}",
        "memory": f"Peak of each tier.{one_rank}",
        "memory-timeline": f"Bytes in device memory while each instruction runs.{one_rank}",
        "memory-layers": f"Bytes in device memory that belong to a layer.{one_rank}",
        "timeline": f"The instructions of a rank over the step.{one_rank}{more}",
    }


def figure_sheet(forecast: PlanForecast, names: Sequence[str] = tuple(PLAN_FIGURES)) -> str:
    """SVG file with several figures below each other, each with its heading."""
    notes = figure_notes(forecast)
    lines = wrap(
        f"Predicted, before it runs: {describe_plan(forecast.plan, forecast.graph)}.", _LINE_LETTERS
    )
    parts = [
        text_label(0, 26, forecast.title, class_="strong", style="font-size:24px;font-weight:600"),
        *(text_label(0, 50 + _LINE * index, line) for index, line in enumerate(lines)),
    ]
    y = 50 + _LINE * len(lines) + 8
    for name in names:
        heading, draw = PLAN_FIGURES[name]
        svg = draw(forecast)
        style = "font-size:16px;font-weight:600"
        parts.append(text_label(0, y + 16, heading, class_="strong", style=style))
        parts.append(text_label(0, y + _HEADING, notes[name]))
        inside = svg.partition(">")[2].removesuffix("</svg>")
        parts.append(element("g", inside, transform=f"translate(0 {y + _HEADING + 14:g})"))
        y += _HEADING + 14 + svg_size(svg)[1] + _GAP
    content = element("g", "".join(parts), transform=f"translate({_MARGIN:g} {_MARGIN:g})")
    title = f"{forecast.title}, predicted"
    return standalone(svg_document(content, _WIDTH + 2 * _MARGIN, y + _MARGIN, title))
