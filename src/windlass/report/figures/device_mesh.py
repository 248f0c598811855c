"""Decomposition: stages, slices and replicas as a picture, and rings through those that share.

Columns are stages, rows replicas, and the cells of a block its slices, in rows and columns if they
are a grid. A solid ring runs through the rts replicas that share one copy of the weights, a dashed
one through the rts' that share one of the optimizer state. Of very many stages or replicas the
middle is left out, and said to be. Replicas of a single stage stand side by side.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windlass.program.device_mesh import MeshCoord, rank_of
from windlass.program.zero_sharding import gradient_scatter_group, parameter_gather_group
from windlass.report.figures.svg import STAGE_COLOURS, element, svg_document, text_label, tooltip
from windlass.report.formatting import describe_coord
from windlass.report.plan_forecast import describe_layers
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorGrid

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 96.0, 30.0, 62.0
_MOST_STAGES, _MOST_REPLICAS = 9, 8
_MOST_SLICES = 64
_ROW_GAP = 26.0
_SMALLEST, _LARGEST = 6.0, 34.0
_HEIGHT = 760.0
"""Of all rows, as far as cells are not too small for it."""
_LETTERS = 20.0
"""Pixels of a cell from which on it has room for its device's number."""
_RAIL = 11.0
"""Pixels from one ring to the next beside it."""
_MOST_RAILS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """Where stages and replicas lie; None stands for those that are left out."""

    plan: Plan
    columns: tuple[int | None, ...]
    """Stages; of a single one, replicas."""
    lines: tuple[int | None, ...]
    """Replicas; where they are columns, the one stage."""
    across: int
    """Slices side by side in a block."""
    pitch: float
    """From one column to the next."""
    cell: float

    @property
    def flat(self) -> bool:
        """Whether replicas stand side by side."""
        return _flat(self.plan)

    @property
    def replicas(self) -> tuple[int | None, ...]:
        """Those that are drawn."""
        return self.columns if self.flat else self.lines

    @property
    def down(self) -> int:
        """Rows of slices in a block."""
        return -(-_slices(self.plan) // self.across)

    @property
    def row(self) -> float:
        """From one line to the next."""
        return self.down * self.cell + _ROW_GAP

    def x(self, column: int) -> float:
        """Left end of a column's blocks, which stand in its middle."""
        return _LEFT + column * self.pitch + (self.pitch - self.across * self.cell) / 2

    def y(self, line: int) -> float:
        """Top of a line's blocks."""
        return _TOP + line * self.row

    def middle(self, replica: int) -> float:
        """Where the middle of a replica's blocks is, or of those left out that it is among."""
        shown = self.replicas
        at = shown.index(replica) if replica in shown else shown.index(None)
        if self.flat:
            return _LEFT + (at + 0.5) * self.pitch
        return self.y(at) + self.down * self.cell / 2


def device_mesh_figure(plan: Plan) -> str:
    """The cut of a plan as SVG: p x t x r blocks, and the rings of rts and rts'."""
    axes = _axes(plan)
    parts = [*_heads(axes), *_names(axes), *_blocks(axes), *_rings(axes)]
    height = axes.y(len(axes.lines)) + 20
    if axes.flat and plan.sharding.parameters < plan.sharding.optimizer:
        height += _RAIL * _MOST_RAILS
    parts.append(_legend(plan, height - 8))
    name = (
        f"{plan.parallel.pipeline} stages, {plan.parallel.tensor} slices, {plan.parallel.data} replicas; "
        f"{plan.sharding.parameters} replicas share weights, {plan.sharding.optimizer} optimizer state"
    )
    return svg_document("".join(parts), _WIDTH, height, name)


def _slices(plan: Plan) -> int:
    return min(int(plan.parallel.tensor), _MOST_SLICES)


def _flat(plan: Plan) -> bool:
    return plan.parallel.pipeline == 1 and plan.parallel.data > 1


def _axes(plan: Plan) -> _Axes:
    stages = _shown(plan.parallel.pipeline, _MOST_STAGES)
    replicas = _shown(plan.parallel.data, _MOST_REPLICAS)
    columns, lines = (replicas, stages) if _flat(plan) else (stages, replicas)
    across = _across(plan)
    pitch = min(280.0, (_WIDTH - _LEFT - _RIGHT) / len(columns))
    rails = 2 * _RAIL * (1 if _flat(plan) else _MOST_RAILS)
    down = -(-_slices(plan) // across)
    room = min((pitch - rails) / across, (_HEIGHT / len(lines) - _ROW_GAP) / down)
    cell = max(_SMALLEST, min(_LARGEST, room))
    return _Axes(plan=plan, columns=columns, lines=lines, across=across, pitch=pitch, cell=cell)


def _across(plan: Plan) -> int:
    """Slices side by side: the columns of a grid, else about as many as below each other."""
    slices = _slices(plan)
    if isinstance(plan.parallel.tensor, TensorGrid) and slices == int(plan.parallel.tensor):
        return plan.parallel.tensor.columns
    down = next(each for each in range(math.isqrt(slices), 0, -1) if slices % each == 0)
    return slices // down


def _shown(count: int, most: int) -> tuple[int | None, ...]:
    """All of them, or the first and the last with a gap between."""
    if count <= most:
        return tuple(range(count))
    return (*range(most - 2), None, count - 1)


def _heads(axes: _Axes) -> Iterator[str]:
    plan = axes.plan
    count = plan.parallel.data if axes.flat else plan.parallel.pipeline
    for column, shown in enumerate(axes.columns):
        middle = _LEFT + (column + 0.5) * axes.pitch
        if shown is None:
            left_out = count - len(axes.columns) + 1
            yield text_label(middle, 18, f"… {left_out} more", text_anchor="middle")
            continue
        kind = "replica" if axes.flat else "stage"
        name = f"{kind} {shown}" if count > 1 else f"one {kind}"
        yield text_label(middle, 18, name, text_anchor="middle", class_="strong")
        if axes.flat:
            continue
        for turn, words in enumerate(_stage_words(plan, shown)):
            yield text_label(middle, 34 + 16 * turn, words, text_anchor="middle")
        if column + 1 < len(axes.columns):
            x = _LEFT + (column + 1) * axes.pitch
            yield text_label(x, 19, "→", text_anchor="middle", class_="strong")


def _stage_words(plan: Plan, stage: int) -> Iterator[str]:
    """Its layers, and in how many turns they come."""
    yield describe_layers(plan, stage)
    phases = len(plan.stages[stage].phases)
    if phases > 1:
        yield f"in {phases} phases"


def _names(axes: _Axes) -> Iterator[str]:
    count = axes.plan.parallel.data
    for line, shown in enumerate(axes.lines):
        y = axes.y(line) + axes.down * axes.cell / 2 + 4
        if axes.flat:
            name = "one stage"
            for turn, words in enumerate(_stage_words(axes.plan, 0), 1):
                yield text_label(_LEFT - 12, y + 16 * turn, words, text_anchor="end")
        elif shown is None:
            name = f"… {count - len(axes.lines) + 1} more"
        else:
            name = f"replica {shown}" if count > 1 else "one replica"
        yield text_label(_LEFT - 12, y, name, text_anchor="end", class_="strong")


def _blocks(axes: _Axes) -> Iterator[str]:
    for column, one in enumerate(axes.columns):
        for line, other in enumerate(axes.lines):
            if one is None or other is None:
                x = _LEFT + (column + 0.5) * axes.pitch
                y = axes.y(line) + axes.down * axes.cell / 2 + 4
                yield text_label(x, y, "…", text_anchor="middle")
                continue
            stage, replica = (other, one) if axes.flat else (one, other)
            yield from _block(axes, column, line, stage, replica)


def _block(axes: _Axes, column: int, line: int, stage: int, replica: int) -> Iterator[str]:
    colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
    cut = axes.plan.parallel
    for index in range(_slices(axes.plan)):
        down, across = divmod(index, axes.across)
        place = MeshCoord(stage, index, replica)
        device = rank_of(place, cut)
        x, y = axes.x(column) + across * axes.cell, axes.y(line) + down * axes.cell
        words = f"device {device}: {describe_coord(place, cut) or 'the only one'}"
        tone = 0.85 if (down + across) % 2 else 0.68
        yield element(
            "rect", tooltip(words), x=x + 0.5, y=y + 0.5, width=axes.cell - 1,
            height=axes.cell - 1, rx=2, style=f"fill:var(--{colour});opacity:{tone}",
        )  # fmt: skip
        if axes.cell >= _LETTERS:
            letters = min(10.0, axes.cell / (0.8 * len(str(device))))
            style = f"fill:#fff;font-size:{letters:.1f}px;font-weight:600"
            middle = x + axes.cell / 2
            yield text_label(middle, y + axes.cell / 2 + 4, str(device), text_anchor="middle",
                        style=style)  # fmt: skip


def _rings(axes: _Axes) -> Iterator[str]:
    plan = axes.plan
    shared = range(plan.parallel.data)
    weights = tuple(dict.fromkeys(tuple(sorted(parameter_gather_group(at, plan))) for at in shared))
    state = tuple(dict.fromkeys(gradient_scatter_group(at, plan) for at in shared))
    if axes.flat:
        yield from _loops(axes, state, axes.y(0) - 10, -1, "orange", "4 3")
        yield from _loops(axes, weights, axes.y(1) - _ROW_GAP + 10, 1, "green", "none")
        return
    for column, stage in enumerate(axes.columns):
        if stage is not None:
            left, right = axes.x(column), axes.x(column) + axes.across * axes.cell
            yield from _loops(axes, state, left - 9, -1, "orange", "4 3")
            yield from _loops(axes, weights, right + 9, 1, "green", "none")


def _loops(
    axes: _Axes, groups: Sequence[tuple[int, ...]], beside: float, side: int, colour: str,
    dashes: str,
) -> Iterator[str]:  # fmt: skip
    """A narrow ring along the blocks of each group, and a dot at each.

    Args:
        axes: of the picture.
        groups: of replicas.
        beside: where the first ring is: left or right of the blocks, or above or below them.
        side: in which direction further rings lie.
        colour: of all.
        dashes: of their lines.
    """
    rails: list[float] = []
    for group in groups:
        if len(group) < 2:
            continue
        first, last = axes.middle(group[0]), axes.middle(group[-1])
        free = next((at for at, end in enumerate(rails) if end < first), len(rails))
        if free == _MOST_RAILS or last <= first:
            continue
        rails[free : free + 1] = [last]
        at = beside + side * free * _RAIL
        style = f"fill:none;stroke:var(--{colour});stroke-width:1.8;stroke-dasharray:{dashes}"
        words = tooltip("replicas " + ", ".join(map(str, group)))
        (x, width), (y, height) = (at - 4, 8.0), (first - 8, last - first + 16)
        if axes.flat:
            (x, width), (y, height) = (y, height), (x, width)
        yield element("rect", words, x=x, y=y, width=width, height=height, rx=4, style=style)
        for replica in group:
            if replica in axes.replicas:
                cx, cy = at, axes.middle(replica)
                cx, cy = (cy, cx) if axes.flat else (cx, cy)
                yield element("circle", cx=cx, cy=cy, r=3.4, style=f"fill:var(--{colour})")


def _legend(plan: Plan, y: float) -> str:
    weights, state = plan.sharding.parameters, plan.sharding.optimizer
    told = [
        ("green", f"rts = {weights}: so many replicas share one copy of the weights")
        if weights > 1
        else ("grey", "every replica has all its weights"),
        ("orange", f"rts' = {state}: so many share one copy of the optimizer state")
        if state > 1
        else ("grey", "every replica has all its optimizer state"),
    ]
    parts, x = [], _LEFT
    for colour, words in told:
        parts.append(element("circle", cx=x + 4, cy=y - 4, r=4, style=f"fill:var(--{colour})"))
        parts.append(text_label(x + 14, y, words))
        x += 430
    return "".join(parts)
