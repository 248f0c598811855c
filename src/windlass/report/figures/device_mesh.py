"""Figure of the device mesh: pipeline stages, tensor-parallel ranks, replicas and sharding groups.

Columns are stages, rows replicas or the context-parallel ranks of each, and the cells of a block
its tensor-parallel ranks, in rows and columns if they form a grid. A solid ring joins the replicas
that shard the parameters together (FSDP), a dashed one those that shard the optimizer state
together, unless they are the same. If there are very many stages or replicas, a gap stands for the
middle ones. Replicas of a single stage are side by side.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windlass.program import (
    MeshCoord,
    chunks_of_stage,
    gradient_scatter_group,
    parameter_gather_group,
    rank_of,
)
from windlass.report.figures.svg import STAGE_COLOURS, element, svg_document, text_label, tooltip
from windlass.report.formatting import (
    describe_coord,
    describe_parallelism,
    describe_sharding,
    sharding_clauses,
)
from windlass.report.plan_forecast import describe_layers
from windlass.schema import Plan, TensorGrid

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 96.0, 30.0, 62.0
_MAX_STAGES, _MAX_REPLICAS = 9, 8
_MAX_TENSOR_RANKS = 64
_ROW_GAP = 26.0
_SMALLEST, _LARGEST = 6.0, 34.0
_HEIGHT = 760.0
"""Height of all rows in pixels, unless cells would be too small."""
_NUMBERED_CELL = 20.0
"""Smallest cell in pixels that shows its rank."""
_RAIL = 11.0
"""Pixels from one ring to the next."""
_MAX_RAILS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Positions of stages and replicas; None stands for the ones left out."""

    plan: Plan
    columns: tuple[int | None, ...]
    """Stages; replicas if there is a single stage."""
    rows: tuple[int | None, ...]
    """Replicas; the single stage if replicas are columns."""
    block_columns: int
    """Tensor-parallel ranks side by side in a block."""
    pitch: float
    """Pixels from one column to the next."""
    cell: float

    @property
    def flat(self) -> bool:
        """Whether replicas are columns, because there is a single stage."""
        return _flat(self.plan)

    @property
    def replicas(self) -> tuple[int | None, ...]:
        """Replicas that are drawn."""
        return self.columns if self.flat else self.rows

    @property
    def block_rows(self) -> int:
        """Rows of tensor-parallel ranks in a block."""
        return -(-_tensor_ranks(self.plan) // self.block_columns)

    @property
    def row_pitch(self) -> float:
        """Pixels from one row to the next."""
        return self.block_rows * self.cell + _ROW_GAP

    def x(self, column: int) -> float:
        """Left end of a column's blocks, which are centred in it."""
        return _LEFT + column * self.pitch + (self.pitch - self.block_columns * self.cell) / 2

    def y(self, row: int) -> float:
        """Top of a row's blocks."""
        return _TOP + row * self.row_pitch

    def middle(self, replica: int) -> float:
        """Centre of a replica's blocks, or of the gap if the replica is left out."""
        shown = self.replicas
        index = shown.index(replica) if replica in shown else shown.index(None)
        if self.flat:
            return _LEFT + (index + 0.5) * self.pitch
        return self.y(index) + self.block_rows * self.cell / 2


def device_mesh_figure(plan: Plan) -> str:
    """SVG of a plan's device mesh, with rings around the ranks that shard state together."""
    layout = _layout(plan)
    parts = [*_column_heads(layout), *_row_names(layout), *_blocks(layout), *_rings(layout)]
    height = layout.y(len(layout.rows)) + 20
    if layout.flat and plan.sharding.parameters < plan.sharding.optimizer:
        height += _RAIL * _MAX_RAILS
    parts.append(_legend(plan, height - 8))
    name = f"{describe_parallelism(plan)}; {describe_sharding(plan)}"
    return svg_document("".join(parts), _WIDTH, height, name)


def _tensor_ranks(plan: Plan) -> int:
    return min(int(plan.parallel.tensor), _MAX_TENSOR_RANKS)


def _flat(plan: Plan) -> bool:
    return plan.parallel.pipeline == 1 and plan.parallel.replicas > 1


def _layout(plan: Plan) -> _Layout:
    stages = _shown(plan.parallel.pipeline, _MAX_STAGES)
    replicas = _shown(plan.parallel.replicas, _MAX_REPLICAS)
    columns, rows = (replicas, stages) if _flat(plan) else (stages, replicas)
    block_columns = _block_columns(plan)
    pitch = min(280.0, (_WIDTH - _LEFT - _RIGHT) / len(columns))
    rails = 2 * _RAIL * (1 if _flat(plan) else _MAX_RAILS)
    block_rows = -(-_tensor_ranks(plan) // block_columns)
    available = min((pitch - rails) / block_columns, (_HEIGHT / len(rows) - _ROW_GAP) / block_rows)
    cell = max(_SMALLEST, min(_LARGEST, available))
    return _Layout(
        plan=plan, columns=columns, rows=rows, block_columns=block_columns, pitch=pitch, cell=cell
    )


def _block_columns(plan: Plan) -> int:
    """Columns of a block: those of a tensor grid, or else a block about as wide as high."""
    ranks = _tensor_ranks(plan)
    if isinstance(plan.parallel.tensor, TensorGrid) and ranks == int(plan.parallel.tensor):
        return plan.parallel.tensor.columns
    rows = next(rows for rows in range(math.isqrt(ranks), 0, -1) if ranks % rows == 0)
    return ranks // rows


def _shown(count: int, limit: int) -> tuple[int | None, ...]:
    """All indices, or the first ones and the last with None for the gap between."""
    if count <= limit:
        return tuple(range(count))
    return (*range(limit - 2), None, count - 1)


def _column_heads(layout: _Layout) -> Iterator[str]:
    plan = layout.plan
    count = plan.parallel.replicas if layout.flat else plan.parallel.pipeline
    for column, shown in enumerate(layout.columns):
        middle = _LEFT + (column + 0.5) * layout.pitch
        if shown is None:
            left_out = count - len(layout.columns) + 1
            yield text_label(middle, 18, f"… {left_out} more", text_anchor="middle")
            continue
        name = f"stage {shown}" if count > 1 else "one stage"
        name = _replica_name(plan, shown) if layout.flat else name
        yield text_label(middle, 18, name, text_anchor="middle", class_="strong")
        lines = _part_lines(plan, shown) if layout.flat else _stage_lines(plan, shown)
        for line, words in enumerate(lines):
            yield text_label(middle, 34 + 16 * line, words, text_anchor="middle")
        if column + 1 < len(layout.columns) and not layout.flat:
            x = _LEFT + (column + 1) * layout.pitch
            yield text_label(x, 19, "→", text_anchor="middle", class_="strong")


def _stage_lines(plan: Plan, stage: int) -> Iterator[str]:
    """The layers of a stage, and its number of phases."""
    yield describe_layers(plan, stage)
    phases = sum(len(plan.stages[chunk].phases) for chunk in chunks_of_stage(plan, stage))
    if phases > 1 and plan.is_offloaded("parameters"):
        yield f"in {phases} phases"


def _row_names(layout: _Layout) -> Iterator[str]:
    count = layout.plan.parallel.replicas
    for row, shown in enumerate(layout.rows):
        y = layout.y(row) + layout.block_rows * layout.cell / 2 + 4
        if layout.flat:
            name = "one stage"
            for line, words in enumerate(_stage_lines(layout.plan, 0), 1):
                yield text_label(_LEFT - 12, y + 16 * line, words, text_anchor="end")
        elif shown is None:
            name = f"… {count - len(layout.rows) + 1} more"
        else:
            name = _replica_name(layout.plan, shown)
            for words in _part_lines(layout.plan, shown):
                yield text_label(_LEFT - 12, y + 16, words, text_anchor="end")
        yield text_label(_LEFT - 12, y, name, text_anchor="end", class_="strong")


def _replica_name(plan: Plan, replica: int) -> str:
    """Name of the replica that one is, or that a context-parallel rank belongs to."""
    count = plan.parallel.data
    return f"replica {replica // (plan.parallel.context or 1)}" if count > 1 else "one replica"


def _part_lines(plan: Plan, replica: int) -> Iterator[str]:
    """Which part of its replica's tokens a context-parallel rank has."""
    if (context := plan.parallel.context) is not None:
        yield f"part {replica % context + 1} of {context}"


def _blocks(layout: _Layout) -> Iterator[str]:
    for column, in_column in enumerate(layout.columns):
        for row, in_row in enumerate(layout.rows):
            if in_column is None or in_row is None:
                x = _LEFT + (column + 0.5) * layout.pitch
                y = layout.y(row) + layout.block_rows * layout.cell / 2 + 4
                yield text_label(x, y, "…", text_anchor="middle")
                continue
            stage, replica = (in_row, in_column) if layout.flat else (in_column, in_row)
            yield from _block(layout, column, row, stage, replica)


def _block(layout: _Layout, column: int, row: int, stage: int, replica: int) -> Iterator[str]:
    colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
    parallel = layout.plan.parallel
    for tensor_rank in range(_tensor_ranks(layout.plan)):
        cell_row, cell_column = divmod(tensor_rank, layout.block_columns)
        coord = MeshCoord(stage, tensor_rank, replica)
        rank = rank_of(coord, parallel)
        x = layout.x(column) + cell_column * layout.cell
        y = layout.y(row) + cell_row * layout.cell
        hint = f"rank {rank}: {describe_coord(coord, parallel) or 'the only one'}"
        opacity = 0.85 if (cell_row + cell_column) % 2 else 0.68
        yield element(
            "rect", tooltip(hint), x=x + 0.5, y=y + 0.5, width=layout.cell - 1,
            height=layout.cell - 1, rx=2, style=f"fill:var(--{colour});opacity:{opacity}",
        )  # fmt: skip
        if layout.cell >= _NUMBERED_CELL:
            font_size = min(10.0, layout.cell / (0.8 * len(str(rank))))
            style = f"fill:#fff;font-size:{font_size:.1f}px;font-weight:600"
            middle = x + layout.cell / 2
            yield text_label(
                middle, y + layout.cell / 2 + 4, str(rank), text_anchor="middle", style=style
            )


def _rings(layout: _Layout) -> Iterator[str]:
    plan = layout.plan
    replicas = range(plan.parallel.replicas)
    parameter_groups = tuple(
        dict.fromkeys(tuple(sorted(parameter_gather_group(rank, plan))) for rank in replicas)
    )
    optimizer_groups = tuple(
        dict.fromkeys(tuple(sorted(gradient_scatter_group(rank, plan))) for rank in replicas)
    )
    if optimizer_groups == parameter_groups:
        optimizer_groups = ()
    if layout.flat:
        yield from _loops(layout, optimizer_groups, layout.y(0) - 10, -1, "orange", "4 3")
        yield from _loops(layout, parameter_groups, layout.y(1) - _ROW_GAP + 10, 1, "green", "none")
        return
    for column, stage in enumerate(layout.columns):
        if stage is not None:
            left, right = layout.x(column), layout.x(column) + layout.block_columns * layout.cell
            yield from _loops(layout, optimizer_groups, left - 9, -1, "orange", "4 3")
            yield from _loops(layout, parameter_groups, right + 9, 1, "green", "none")


def _loops(
    layout: _Layout, groups: Sequence[tuple[int, ...]], first_rail: float, side: int, colour: str,
    dashes: str,
) -> Iterator[str]:  # fmt: skip
    """A narrow ring along the blocks of each group, with a dot at each replica.

    Args:
        first_rail: coordinate of the first ring: x beside the blocks, or y above or below them.
        side: direction in which further rings lie, 1 or -1.
        dashes: SVG dash pattern of their lines.
    """
    rails: list[float] = []
    for group in groups:
        if len(group) < 2:
            continue
        first, last = layout.middle(group[0]), layout.middle(group[-1])
        rail = next((index for index, end in enumerate(rails) if end < first), len(rails))
        if rail == _MAX_RAILS or last <= first:
            continue
        rails[rail : rail + 1] = [last]
        across = first_rail + side * rail * _RAIL
        style = f"fill:none;stroke:var(--{colour});stroke-width:1.8;stroke-dasharray:{dashes}"
        hint = tooltip("replicas " + ", ".join(map(str, group)))
        (x, width), (y, height) = (across - 4, 8.0), (first - 8, last - first + 16)
        if layout.flat:
            (x, width), (y, height) = (y, height), (x, width)
        yield element("rect", hint, x=x, y=y, width=width, height=height, rx=4, style=style)
        for replica in group:
            if replica in layout.replicas:
                cx, cy = across, layout.middle(replica)
                cx, cy = (cy, cx) if layout.flat else (cx, cy)
                yield element("circle", cx=cx, cy=cy, r=3.4, style=f"fill:var(--{colour})")


def _legend(plan: Plan, y: float) -> str:
    """What the rings mean, in the words that describe the plan elsewhere."""
    degrees = (plan.sharding.parameters, plan.sharding.optimizer)
    parts, x = [], _LEFT
    for text, degree, ring in zip(
        sharding_clauses(plan), degrees, ("green", "orange"), strict=False
    ):
        colour = ring if degree > 1 else "grey"
        parts.append(element("circle", cx=x + 4, cy=y - 4, r=4, style=f"fill:var(--{colour})"))
        parts.append(text_label(x + 14, y, text))
        x += 430
    return "".join(parts)
