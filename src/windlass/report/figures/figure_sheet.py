"""Poster: the pictures of a forecast by name, one below the other in a file of their own."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from windlass.program.instruction import MOVES
from windlass.report.figures.device_mesh import decomposition
from windlass.report.figures.memory import memory_bars, memory_lines
from windlass.report.figures.phase_heatmap import heat_map
from windlass.report.figures.svg import drawing, element, label, size_of, standalone
from windlass.report.figures.timeline import drawn_lanes
from windlass.report.figures.waterfall import waterfall
from windlass.report.formatting import batch_words, cut_words, plan_words
from windlass.report.plan_forecast import Forecast
from windlass.schema.prediction import DeviceTimeline

_LETTERS = 140
"""In a line as wide as a picture."""
_LANES = 9


def lanes(forecast: Forecast) -> str:
    """The timeline of one device of each stage, of very many stages the first.

    What moves between tiers beside the computing has a lane of its own.
    """
    shown = []
    for stage, first in forecast.lanes()[:_LANES]:
        lane = first.model_copy(update={"device": stage})
        name = f"stage {stage}" if len(forecast.timeline.devices) > 1 else "computes"
        if forecast.plan.offloads:
            shown.append((name, _part(lane, moves=False)))
            shown.append(("moves", _part(lane, moves=True)))
        else:
            shown.append((name, lane))
    return drawn_lanes(shown, "predicted timeline of one step")


def _part(lane: DeviceTimeline, *, moves: bool) -> DeviceTimeline:
    """The instructions of a lane that move something between tiers, or the others."""
    kept = [at for at, kind in enumerate(lane.kinds) if (kind in MOVES) == moves]
    names = ("kinds", "layers", "micros", "starts", "ends")
    return lane.model_copy(
        update={name: tuple(getattr(lane, name)[at] for at in kept) for name in names}
    )


PICTURES: Mapping[str, tuple[str, Callable[[Forecast], str]]] = {
    "decomposition": ("Decomposition", lambda of: decomposition(of.plan)),
    "phases": ("Predicted computing of each layer, phase by phase", heat_map),
    "waterfall": ("Predicted step time by term", lambda of: waterfall(of.prediction)),
    "memory": ("Predicted peak memory by tier, stage and class", memory_bars),
    "occupancy": ("Predicted memory over the step", memory_lines),
    "timeline": ("Predicted step, instruction by instruction", lanes),
}
"""By name: a heading, and what draws it."""

_WIDTH, _MARGIN = 1000.0, 24.0
_LINE, _HEADING, _GAP = 18.0, 34.0, 26.0


def notes(forecast: Forecast) -> Mapping[str, str]:
    """By name: a sentence below the heading."""
    plan = forecast.plan
    count = len(forecast.timeline.devices)
    many = f" Of {count} stages the first {_LANES}." if count > _LANES else ""
    one = " One device stands for each stage." if plan.parallel.devices > 1 else ""
    return {
        "decomposition": f"{cut_words(plan)}; {batch_words(plan)}.",
        "phases": "Each row is a phase on its way forward or back; a frame is around its layers.",
        "waterfall": f"Of the device that is done last.{one}",
        "memory": f"Each tier at its fullest moment.{one}",
        "occupancy": f"Bytes in the near tier while each instruction runs.{one}",
        "timeline": f"What a device does when.{one}{many}",
    }


def poster(forecast: Forecast, names: Sequence[str] = tuple(PICTURES)) -> str:
    """Pictures below each other, with headings, as an SVG file of their own.

    Args:
        forecast: of the plan.
        names: of `PICTURES`.
    """
    words = notes(forecast)
    lines = wrap(f"Predicted, before it runs: {plan_words(forecast.plan)}.", _LETTERS)
    parts = [
        label(0, 26, forecast.title, class_="strong", style="font-size:24px;font-weight:600"),
        *(label(0, 50 + _LINE * at, line) for at, line in enumerate(lines)),
    ]
    y = 50 + _LINE * len(lines) + 8
    for name in names:
        heading, draw = PICTURES[name]
        svg = draw(forecast)
        style = "font-size:16px;font-weight:600"
        parts.append(label(0, y + 16, heading, class_="strong", style=style))
        parts.append(label(0, y + _HEADING, words[name]))
        inside = svg.partition(">")[2].removesuffix("</svg>")
        parts.append(element("g", inside, transform=f"translate(0 {y + _HEADING + 14:g})"))
        y += _HEADING + 14 + size_of(svg)[1] + _GAP
    content = element("g", "".join(parts), transform=f"translate({_MARGIN:g} {_MARGIN:g})")
    title = f"{forecast.title}, predicted"
    return standalone(drawing(content, _WIDTH + 2 * _MARGIN, y + _MARGIN, title))
