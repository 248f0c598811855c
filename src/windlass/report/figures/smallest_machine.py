"""Needed: how many devices, and which parallelism, each model needs of each family."""

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
from windlass.schema.comparison import SmallestMachine
from windlass.units import format_count

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 150.0, 150.0, 40.0
_ROW, _GAP = 19.0, 12.0


def smallest_machine_figure(rows: Sequence[SmallestMachine], words: str) -> str:
    """Devices on a scale of powers of two, a row for each model and family, as an SVG file.

    Args:
        rows: by model, then family.
        words: what was asked of every plan, for the line below the title.
    """
    families = list(dict.fromkeys(row.family for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    most = max((row.devices for row in rows if row.devices), default=1)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1.0, log2(most))
    block = _ROW * len(families) + _GAP
    bottom = _TOP + block * len(models)
    parts = [*_grid(most, scale, bottom), *_key(families)]
    for row in rows:
        y = _TOP + block * models.index(row.model) + _ROW * (families.index(row.family) + 0.5)
        parts += _dot(row, y, scale, STAGE_COLOURS[families.index(row.family)])
    for at, model in enumerate(models):
        y = _TOP + block * at + _ROW * len(families) / 2
        size = next(row.parameters for row in rows if row.model == model)
        parts.append(text_label(_LEFT - 12, y, model, text_anchor="end", class_="strong"))
        parts.append(text_label(_LEFT - 12, y + 15, format_count(size), text_anchor="end"))
    svg = svg_document("".join(parts), _WIDTH, bottom + 48, "devices that each model needs")
    return with_heading(svg, "How many devices, and which parallelism, for which model", words)


def _grid(most: int, scale: float, bottom: float) -> Iterator[str]:
    power = 0
    while 2**power <= most:
        x = _LEFT + power * scale
        yield element("line", x1=x, x2=x, y1=_TOP - 8, y2=bottom, class_="grid")
        yield text_label(x, bottom + 16, f"{2**power:,}", text_anchor="middle")
        power += 1
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield text_label(middle, bottom + 36, "devices that the smallest machine's best plan takes",
                text_anchor="middle")  # fmt: skip


def _key(families: Sequence[str]) -> Iterator[str]:
    x = _LEFT
    for at, family in enumerate(families):
        colour = f"fill:var(--{STAGE_COLOURS[at]})"
        yield element("circle", cx=x + 5, cy=10, r=5, style=colour)
        yield text_label(x + 16, 14, family)
        x += 32 + 7.2 * len(family)


def _dot(row: SmallestMachine, y: float, scale: float, colour: str) -> Iterator[str]:
    if row.devices is None:
        words = f"{row.model}: no {row.family} is enough; {row.infeasible_reason}"
        yield text_label(_LEFT + 4, y + 4, f"no {row.family} is enough", style="font-style:italic")
        yield element("circle", tooltip(words), cx=_LEFT, cy=y, r=3, style="fill:var(--grey)")
        return
    x = _LEFT + log2(row.devices) * scale
    yield element("line", x1=_LEFT, x2=x, y1=y, y2=y,
                  style=f"stroke:var(--{colour});stroke-width:2;opacity:.35")  # fmt: skip
    words = f"{row.model} on {row.machine}: {row.devices} devices, {row.parallelism}"
    yield element("circle", tooltip(words), cx=x, cy=y, r=5.5, style=f"fill:var(--{colour})")
    count = f"{row.devices}" if row.devices == 1 else f"{row.devices} = {_product(row)}"
    yield text_label(x + 12, y + 4, count)


def _product(row: SmallestMachine) -> str:
    """`p2 × t8`: degrees above 1."""
    degrees = [each for each in (row.parallelism or "").split() if each[1:] != "1"]
    return " × ".join(degrees) or "1"
