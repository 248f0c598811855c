"""Poster: the pictures of a forecast by name, one below the other in a file of their own."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from windlass.report.decomposition import decomposition
from windlass.report.forecast import Forecast
from windlass.report.heatmap import heat_map
from windlass.report.svg import drawing, element, label, size_of, standalone
from windlass.report.tiers import memory_bars, memory_lines
from windlass.report.timeline import timeline
from windlass.report.waterfall import waterfall
from windlass.report.words import batch_words, cut_words, plan_words

_LETTERS = 140
"""In a line as wide as a picture."""
_LANES = 9


def lanes(forecast: Forecast) -> str:
    """The timeline of one device of each stage, of very many stages the first."""
    shown = tuple(
        lane.model_copy(update={"device": stage}) for stage, lane in forecast.lanes()[:_LANES]
    )
    name = "stage" if len(shown) > 1 else "predicted"
    return timeline(forecast.timeline.model_copy(update={"lanes": shown}), None, name=name)


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
    count = len(forecast.timeline.lanes)
    many = f" Of {count} stages the first {_LANES}." if count > _LANES else ""
    one = " One device stands for each stage." if plan.cut.devices > 1 else ""
    return {
        "decomposition": f"{cut_words(plan)}; {batch_words(plan)}.",
        "phases": "Each row is a phase on its way forward or back; a frame is around its layers.",
        "waterfall": f"Of the device that is done last.{one}",
        "memory": f"Each tier at its fullest moment.{one}",
        "occupancy": f"Bytes in the near tier while each instruction runs.{one}",
        "timeline": f"The bar shows what a device does when.{one}{many}",
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
