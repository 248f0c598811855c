"""Poster: the pictures of a forecast by name, one below the other in a file of their own."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from windlass.program.instruction import TRANSFER_KINDS
from windlass.report.figures.device_mesh import device_mesh_figure
from windlass.report.figures.memory import memory_over_time_figure, peak_memory_figure
from windlass.report.figures.phase_heatmap import phase_heatmap
from windlass.report.figures.svg import element, standalone, svg_document, svg_size, text_label
from windlass.report.figures.timeline import draw_timeline
from windlass.report.figures.waterfall import step_time_waterfall
from windlass.report.formatting import describe_batch, describe_parallelism, describe_plan
from windlass.report.plan_forecast import PlanForecast
from windlass.schema.prediction import DeviceTimeline

_LETTERS = 140
"""In a line as wide as a picture."""
_LANES = 9


def timeline_figure(forecast: PlanForecast) -> str:
    """The timeline of one device of each stage, of very many stages the first.

    What moves between tiers beside the computing has a lane of its own.
    """
    shown = []
    for stage, first in forecast.stage_timelines()[:_LANES]:
        lane = first.model_copy(update={"device": stage})
        name = f"stage {stage}" if len(forecast.timeline.devices) > 1 else "computes"
        if forecast.plan.offloads:
            shown.append((name, _part(lane, moves=False)))
            shown.append(("moves", _part(lane, moves=True)))
        else:
            shown.append((name, lane))
    return draw_timeline(shown, "predicted timeline of one step")


def _part(lane: DeviceTimeline, *, moves: bool) -> DeviceTimeline:
    """The instructions of a lane that move something between tiers, or the others."""
    kept = [at for at, kind in enumerate(lane.kinds) if (kind in TRANSFER_KINDS) == moves]
    names = ("kinds", "layers", "micro_batches", "starts", "ends")
    return lane.model_copy(
        update={name: tuple(getattr(lane, name)[at] for at in kept) for name in names}
    )


PLAN_FIGURES: Mapping[str, tuple[str, Callable[[PlanForecast], str]]] = {
    "decomposition": ("Decomposition", lambda of: device_mesh_figure(of.plan)),
    "phases": ("Predicted computing of each layer, phase by phase", phase_heatmap),
    "waterfall": ("Predicted step time by term", lambda of: step_time_waterfall(of.prediction)),
    "memory": ("Predicted peak memory by tier, stage and class", peak_memory_figure),
    "occupancy": ("Predicted memory over the step", memory_over_time_figure),
    "timeline": ("Predicted step, instruction by instruction", timeline_figure),
}
"""By name: a heading, and what draws it."""

_WIDTH, _MARGIN = 1000.0, 24.0
_LINE, _HEADING, _GAP = 18.0, 34.0, 26.0


def figure_notes(forecast: PlanForecast) -> Mapping[str, str]:
    """By name: a sentence below the heading."""
    plan = forecast.plan
    count = len(forecast.timeline.devices)
    many = f" Of {count} stages the first {_LANES}." if count > _LANES else ""
    one = " One device stands for each stage." if plan.parallel.devices > 1 else ""
    return {
        "decomposition": f"{describe_parallelism(plan)}; {describe_batch(plan)}.",
        "phases": "Each row is a phase on its way forward or back; a frame is around its layers.",
        "waterfall": f"Of the device that is done last.{one}",
        "memory": f"Each tier at its fullest moment.{one}",
        "occupancy": f"Bytes in the near tier while each instruction runs.{one}",
        "timeline": f"What a device does when.{one}{many}",
    }


def figure_sheet(forecast: PlanForecast, names: Sequence[str] = tuple(PLAN_FIGURES)) -> str:
    """Pictures below each other, with headings, as an SVG file of their own.

    Args:
        forecast: of the plan.
        names: of `PICTURES`.
    """
    words = figure_notes(forecast)
    lines = wrap(f"Predicted, before it runs: {describe_plan(forecast.plan)}.", _LETTERS)
    parts = [
        text_label(0, 26, forecast.title, class_="strong", style="font-size:24px;font-weight:600"),
        *(text_label(0, 50 + _LINE * at, line) for at, line in enumerate(lines)),
    ]
    y = 50 + _LINE * len(lines) + 8
    for name in names:
        heading, draw = PLAN_FIGURES[name]
        svg = draw(forecast)
        style = "font-size:16px;font-weight:600"
        parts.append(text_label(0, y + 16, heading, class_="strong", style=style))
        parts.append(text_label(0, y + _HEADING, words[name]))
        inside = svg.partition(">")[2].removesuffix("</svg>")
        parts.append(element("g", inside, transform=f"translate(0 {y + _HEADING + 14:g})"))
        y += _HEADING + 14 + svg_size(svg)[1] + _GAP
    content = element("g", "".join(parts), transform=f"translate({_MARGIN:g} {_MARGIN:g})")
    title = f"{forecast.title}, predicted"
    return standalone(svg_document(content, _WIDTH + 2 * _MARGIN, y + _MARGIN, title))
