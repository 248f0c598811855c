"""Figure of the number of devices and the parallelism that each model needs of each family."""

from collections.abc import Iterator, Sequence
from math import log2

from windlass.report.figures.svg import (
    STAGE_COLOURS,
    element,
    svg_document,
    text_label,
    tooltip,
    with_heading,
)  # fmt: skip
from windlass.schema import SmallestMachine
from windlass.units import format_count

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 150.0, 200.0, 40.0
_ROW, _GAP = 19.0, 12.0


def smallest_machine_figure(rows: Sequence[SmallestMachine], subtitle: str) -> str:
    """SVG file: numbers of devices on a logarithmic axis, a row for each model and family.

    Args:
        rows: results, ordered by model and then family.
        subtitle: what was asked of every plan.
    """
    families = list(dict.fromkeys(row.family for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    largest = max((row.devices for row in rows if row.devices), default=1)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1.0, log2(largest))
    block = _ROW * len(families) + _GAP
    bottom = _TOP + block * len(models)
    parts = [*_grid(largest, scale, bottom), *_legend(families)]
    for row in rows:
        y = _TOP + block * models.index(row.model) + _ROW * (families.index(row.family) + 0.5)
        parts += _dot(row, y, scale, STAGE_COLOURS[families.index(row.family)])
    for index, model in enumerate(models):
        y = _TOP + block * index + _ROW * len(families) / 2
        size = next(row.parameters for row in rows if row.model == model)
        parts.append(text_label(_LEFT - 12, y, model, text_anchor="end", class_="strong"))
        parts.append(text_label(_LEFT - 12, y + 15, format_count(size), text_anchor="end"))
    svg = svg_document("".join(parts), _WIDTH, bottom + 48, "devices that each model needs")
    return with_heading(svg, "How many devices, and which parallelism, for which model", subtitle)


def _grid(largest: int, scale: float, bottom: float) -> Iterator[str]:
    power = 0
    while 2**power <= largest:
        x = _LEFT + power * scale
        yield element("line", x1=x, x2=x, y1=_TOP - 8, y2=bottom, class_="grid")
        yield text_label(x, bottom + 16, f"{2**power:,}", text_anchor="middle")
        power += 1
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield text_label(middle, bottom + 36, "devices of the best plan on the smallest machine",
                text_anchor="middle")  # fmt: skip


def _legend(families: Sequence[str]) -> Iterator[str]:
    x = _LEFT
    for index, family in enumerate(families):
        colour = f"fill:var(--{STAGE_COLOURS[index]})"
        yield element("circle", cx=x + 5, cy=10, r=5, style=colour)
        yield text_label(x + 16, 14, family)
        x += 32 + 7.2 * len(family)


def _dot(row: SmallestMachine, y: float, scale: float, colour: str) -> Iterator[str]:
    if row.devices is None:
        hint = f"{row.model}: no {row.family} is large enough; {row.infeasible_reason}"
        yield text_label(
            _LEFT + 4, y + 4, f"no {row.family} is large enough", style="font-style:italic"
        )
        yield element("circle", tooltip(hint), cx=_LEFT, cy=y, r=3, style="fill:var(--grey)")
        return
    x = _LEFT + log2(row.devices) * scale
    yield element("line", x1=_LEFT, x2=x, y1=y, y2=y,
                  style=f"stroke:var(--{colour});stroke-width:2;opacity:.35")  # fmt: skip
    hint = f"{row.model} on {row.machine}: {row.devices} devices, {row.parallelism}"
    yield element("circle", tooltip(hint), cx=x, cy=y, r=5.5, style=f"fill:var(--{colour})")
    count = f"{row.devices}" if row.devices == 1 else f"{row.devices} = {_degrees(row)}"
    yield text_label(x + 12, y + 4, count)


def _degrees(row: SmallestMachine) -> str:
    """`PP 2 × TP 8`: the degrees above 1."""
    degrees = (degree.split("=") for degree in (row.parallelism or "").split())
    return " × ".join(f"{name} {size}" for name, size in degrees if size != "1") or "1"
