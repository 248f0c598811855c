"""Sought: parts of a field by what no plan of theirs can be faster than, told ever more closely.

Each bound holds for all plans of a part, so that one whose bound is worse than what is found is
never looked at closer. The first takes no prices of layers, the last knows of each plan about how
many layers it must compute again:

1. products of all layers at the fastest rate that the machine states, on all of its devices;
2. the passes of the slowest stage, with the way to it and back;
3. the same with what a stage must compute again to have room, sums of gradients and updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.lower_bound import (
    MemoryLimit,
    min_batch_seconds,
    min_batch_seconds_in_memory,
)
from windlass.cost.batched.plan_table import PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.planner.space.config_table import ConfigTable
from windlass.planner.space.plan_space import PlanBatch, PlanSpace
from windlass.schema.graph import Precision
from windlass.schema.plan import PipelineSchedule

_REACH = {"products": 1.3, "passes": 1.1, "room": 1.4}
"""Up to how much slower than the fastest of a part those are that are looked at with it: with fewer
of them too much is done one by one, with more too much of what a better plan leaves out."""
_LATER = 0.02
"""By how much the closed form may say less than the clock: of steps that repeat themselves later
than it takes them to, bounds are nearer to the clock."""


@dataclass(frozen=True, slots=True)
class Subproblem:
    """Plans of one shape."""

    shape: PipelineShape
    bound_level: Literal["products", "passes", "room"]
    """What the bounds know of."""
    bounds: Floats
    """Seconds that no plan of each item is faster than."""
    items: Ints
    """Settings, as places in the shape's table; of a part with a cell places of plans in that."""
    batch: PlanBatch | None = None

    def split(self, limit: float) -> "tuple[Subproblem, Subproblem]":
        """Those that are to be looked at next, and those that are slower."""
        reach = min(limit, float(self.bounds.min()) * _REACH[self.bound_level])
        return self._only(self.bounds <= reach), self._only(self.bounds > reach)

    def _only(self, chosen: Bools) -> "Subproblem":
        return replace(self, bounds=self.bounds[chosen], items=self.items[chosen])


class BoundQueue:
    """Parts, the fastest by their bounds first.

    Args:
        parts: that are in it first.
    """

    def __init__(self, parts: Iterator[Subproblem]) -> None:
        self._heap = [(float(part.bounds.min()), at, part) for at, part in enumerate(parts)]
        self._turn = len(self._heap)
        heapify(self._heap)

    @property
    def least_bound(self) -> float:
        """The bound of the first part; infinite if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> Subproblem:
        """Takes the first part out."""
        return heappop(self._heap)[2]

    def push(self, part: Subproblem) -> None:
        """Puts a part in, if there is anything in it."""
        if part.items.size:
            self._turn += 1
            heappush(self._heap, (float(part.bounds.min()), self._turn, part))


class LowerBounds:
    """Tells what plans of a field cannot be faster than.

    Args:
        field: the plans.
        chain: with prices of layers.
        budget_bytes: that the near tier has.
    """

    def __init__(self, field: PlanSpace, chain: LayerCosts, budget_bytes: float) -> None:
        self._field, self._chain, self._near = field, chain, budget_bytes
        self._products = cache(self._products_of)
        self._known_selects: dict[tuple[PipelineSchedule, ConfigTable], Bools] = {}

    def subproblems(self) -> Iterator[Subproblem]:
        """All plans, shape by shape, by the first of the bounds."""
        for shape, able in self._field.open_shapes():
            yield Subproblem(shape, "products", self._of_products(shape, able), able)

    def tighten(self, part: Subproblem, limit: float) -> Subproblem:
        """A part with the next bound of each item, without those that are slower than a limit."""
        if part.bound_level == "products":
            cell = self._plain(part)
            least = self._least(part.shape, min_batch_seconds(*self._of(cell)))
            return self._kept(
                Subproblem(part.shape, "passes", least, cell.table.layer_config), limit
            )
        cell = self._plain(part)
        places = np.arange(cell.table.count)
        return self._kept(Subproblem(part.shape, "room", self.in_memory(cell), places, cell), limit)

    def in_memory(self, cell: PlanBatch) -> Floats:
        """What each plan of a cell that computes nothing again, or what all do, is no faster than.

        Where that is open it is as much again as it takes, and more than nothing.
        """
        room = MemoryLimit(
            self._near, self._field.minimizes_recompute, self._selects(cell.shape, cell.table)
        )
        return self._least(cell.shape, min_batch_seconds_in_memory(*self._of(cell), room))

    def batch_of(self, part: Subproblem) -> PlanBatch:
        """The plans of a part that is bounded by room, with all that they may compute again."""
        plain = part.batch or self._plain(part)
        cell = self._field.batch_of(part.shape, np.unique(plain.table.layer_config))
        chosen = np.isin(_keys(cell.table), _keys(plain.table)[part.items])
        return replace(cell, table=cell.table.select(chosen))

    def _kept(self, part: Subproblem, limit: float) -> Subproblem:
        kept = np.isfinite(part.bounds) & (part.bounds <= limit)
        return replace(part, bounds=part.bounds[kept], items=part.items[kept])

    def _of(self, cell: PlanBatch) -> tuple[LayerCosts, PipelineShape, tuple[int, ...], PlanTable]:
        return self._chain, cell.shape, cell.chunk_bounds, cell.table

    def _least(self, shape: PipelineShape, seconds: Floats) -> Floats:
        return seconds * (1 - _LATER) if shape.repeats else seconds

    def _plain(self, part: Subproblem) -> PlanBatch:
        """The plans of a part's settings that compute as little again as any."""
        cell = self._field.batch_of(part.shape, part.items)
        rows, least = cell.table, int(cell.table.recompute.min())
        rows = rows.select((rows.recompute == least)[rows.config])
        rows = replace(rows, recomputes=(rows.recomputes[least],), recompute=rows.recompute * 0)
        return replace(cell, table=rows)

    def _selects(self, shape: PipelineShape, rows: PlanTable) -> Bools:
        """Of each run whether its layers can keep what their large products give."""
        table = self._field.config_table(shape)
        if (shape.schedule, table) not in self._known_selects:
            self._known_selects[shape.schedule, table] = np.array(
                [
                    self._field.allows_selective(shape.schedule, tensor, compiled=compiled)
                    for tensor, _, compiled in table.modes
                ]
            )
        return self._known_selects[shape.schedule, table][table.mode[rows.layer_config]]

    def _of_products(self, shape: PipelineShape, able: Ints) -> Floats:
        """Seconds of products alone of each of some settings."""
        table = self._field.config_table(shape)
        found = [self._products(tensor, precision) for tensor, precision, _ in table.modes]
        sequences = (table.micro * table.microbatches)[able]
        return np.asarray(np.array(found)[table.mode[able]] * sequences / shape.pipeline)

    def _products_of(self, tensor: int, precision: Precision) -> float:
        """Seconds of all products of one sequence on one slice, at the fastest rate there is."""
        rate = self._field.machine.device.rate(precision)
        curves = (rate.curve, rate.biased or rate.curve)
        fastest = max(point.rate for curve in curves for point in curve.points)
        kinds, total = self._chain.kinds(tensor), 0.0
        for span in self._field.graph.layer_runs:
            costs = [cost for cost in kinds[span.kind].costs if cost.precision == precision]
            total += span.count * min(
                sum(
                    op.flop.at(1, self._field.sequence)
                    for op in (*cost.forward, *cost.backward)
                    if op.kind == "matmul"
                )
                for cost in costs
            )
        return total / fastest


def _keys(rows: PlanTable) -> Ints:
    """Of each plan a number that those share which differ in what they compute again only."""
    return np.asarray(
        rows.layer_config[rows.config] * len(rows.sharding_table.options)
        + rows.places[rows.sharding]
    )
