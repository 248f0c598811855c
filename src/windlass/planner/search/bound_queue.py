"""Lower bounds on the step time of plans, ever tighter, and a queue of subproblems ordered by them.

Each bound holds for all plans of a subproblem, so a subproblem whose bound is worse than the best
    plan
found is never examined further. The first bound needs no layer costs, the last one knows roughly
    how
many layers each plan must recompute:

1. products of all layers at the fastest rate that the machine states, on all of its devices;
2. the passes of the slowest stage, with the way to it and back;
3. the same with the recompute that a stage needs to fit, gradient reductions and updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np

from windlass.cost import (
    Bools,
    Floats,
    Ints,
    LayerCosts,
    MemoryLimit,
    PipelineShape,
    PlanTable,
    min_batch_seconds,
    min_batch_seconds_in_memory,
)
from windlass.planner.space.config_table import ConfigTable
from windlass.planner.space.plan_space import PlanBatch, PlanSpace
from windlass.schema import PipelineSchedule, Precision

_SPLIT_FACTOR = {"products": 1.3, "passes": 1.1, "room": 1.4}
"""Factor by which plans may be slower than the fastest of a subproblem and still be examined with
it.

With a smaller factor too much is done one by one, with a larger one too much that a better plan
would rule out.
"""
_STEADY_STATE_ERROR = 0.02
"""Share by which the batched cost model may underestimate the simulator.

In steps that reach their steady state late, bounds are closer to the simulator's times.
"""


@dataclass(frozen=True, slots=True)
class Subproblem:
    """Plans of one pipeline shape."""

    shape: PipelineShape
    bound_level: Literal["products", "passes", "room"]
    """How much the bounds take into account."""
    bounds: Floats
    """Seconds that no plan of each item is faster than, `[item]`."""
    items: Ints
    """Indices of layer configurations, or of plans if there is a batch, `[item]`."""
    batch: PlanBatch | None = None

    def split(self, limit: float) -> "tuple[Subproblem, Subproblem]":
        """The items to examine next, and the slower ones."""
        reach = min(limit, float(self.bounds.min()) * _SPLIT_FACTOR[self.bound_level])
        return self._select(self.bounds <= reach), self._select(self.bounds > reach)

    def _select(self, chosen: Bools) -> "Subproblem":
        return replace(self, bounds=self.bounds[chosen], items=self.items[chosen])


class BoundQueue:
    """Subproblems, the one with the lowest bound first.

    Args:
        parts: the first subproblems.
    """

    def __init__(self, parts: Iterator[Subproblem]) -> None:
        self._heap = [(float(part.bounds.min()), at, part) for at, part in enumerate(parts)]
        self._pushed = len(self._heap)
        heapify(self._heap)

    @property
    def least_bound(self) -> float:
        """Lowest bound of all subproblems; infinite if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> Subproblem:
        """Takes the first subproblem out."""
        return heappop(self._heap)[2]

    def push(self, part: Subproblem) -> None:
        """Adds a subproblem unless it is empty."""
        if part.items.size:
            self._pushed += 1
            heappush(self._heap, (float(part.bounds.min()), self._pushed, part))


class LowerBounds:
    """Lower bounds on the step time of the plans of a space.

    Args:
        space: the plan space.
        costs: costs of layers.
        budget_bytes: device memory budget.
    """

    def __init__(self, space: PlanSpace, costs: LayerCosts, budget_bytes: float) -> None:
        self._field, self._chain, self._budget_bytes = space, costs, budget_bytes
        self._products = cache(self._product_seconds)
        self._selective_cache: dict[tuple[PipelineSchedule, ConfigTable], Bools] = {}

    def subproblems(self) -> Iterator[Subproblem]:
        """All plans, shape by shape, with the first bound."""
        for shape, able in self._field.open_shapes():
            yield Subproblem(shape, "products", self._product_bounds(shape, able), able)

    def tighten(self, part: Subproblem, limit: float) -> Subproblem:
        """The subproblem with the next bound of each item, without items slower than a limit."""
        if part.bound_level == "products":
            batch = self._least_recompute_batch(part)
            least = self._least(part.shape, min_batch_seconds(*self._of(batch)))
            return self._within_limit(
                Subproblem(part.shape, "passes", least, batch.table.layer_config), limit
            )
        batch = self._least_recompute_batch(part)
        places = np.arange(batch.table.count)
        return self._within_limit(
            Subproblem(part.shape, "room", self.in_memory(batch), places, batch), limit
        )

    def in_memory(self, batch: PlanBatch) -> Floats:
        """Lower bounds on plans that recompute nothing, or that all recompute the same.

        If recompute is open, each plan is charged with the recompute that it needs to fit, at least
        some.
        """
        room = MemoryLimit(
            self._budget_bytes,
            self._field.minimizes_recompute,
            self._allows_selective(batch.shape, batch.table),
        )
        return self._least(batch.shape, min_batch_seconds_in_memory(*self._of(batch), room))

    def batch_of(self, part: Subproblem) -> PlanBatch:
        """The plans of a subproblem bounded in memory, with all their recompute modes."""
        plain = part.batch or self._least_recompute_batch(part)
        batch = self._field.batch_of(part.shape, np.unique(plain.table.layer_config))
        chosen = np.isin(_keys(batch.table), _keys(plain.table)[part.items])
        return replace(batch, table=batch.table.select(chosen))

    def _within_limit(self, part: Subproblem, limit: float) -> Subproblem:
        kept = np.isfinite(part.bounds) & (part.bounds <= limit)
        return replace(part, bounds=part.bounds[kept], items=part.items[kept])

    def _of(self, batch: PlanBatch) -> tuple[LayerCosts, PipelineShape, tuple[int, ...], PlanTable]:
        return self._chain, batch.shape, batch.chunk_bounds, batch.table

    def _least(self, shape: PipelineShape, seconds: Floats) -> Floats:
        return seconds * (1 - _STEADY_STATE_ERROR) if shape.repeats else seconds

    def _least_recompute_batch(self, part: Subproblem) -> PlanBatch:
        """The plans of a subproblem's configurations with the least recompute."""
        batch = self._field.batch_of(part.shape, part.items)
        rows, least = batch.table, int(batch.table.recompute.min())
        rows = rows.select((rows.recompute == least)[rows.config])
        rows = replace(rows, recomputes=(rows.recomputes[least],), recompute=rows.recompute * 0)
        return replace(batch, table=rows)

    def _allows_selective(self, shape: PipelineShape, rows: PlanTable) -> Bools:
        """Whether layers of each configuration can recompute selectively."""
        table = self._field.config_table(shape)
        if (shape.schedule, table) not in self._selective_cache:
            self._selective_cache[shape.schedule, table] = np.array(
                [
                    self._field.allows_selective(shape.schedule, tensor, compiled=compiled)
                    for tensor, _, compiled in table.modes
                ]
            )
        return self._selective_cache[shape.schedule, table][table.mode[rows.layer_config]]

    def _product_bounds(self, shape: PipelineShape, able: Ints) -> Floats:
        """Seconds of matrix products alone, for each of some configurations."""
        table = self._field.config_table(shape)
        found = [self._products(tensor, precision) for tensor, precision, _ in table.modes]
        sequences = (table.micro * table.microbatches)[able]
        return np.asarray(np.array(found)[table.mode[able]] * sequences / shape.pipeline)

    def _product_seconds(self, tensor: int, precision: Precision) -> float:
        """Seconds of one sequence's products on one tensor-parallel rank, at the fastest rate."""
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
    """A number that plans share which differ only in recompute, `[plan]`."""
    return np.asarray(
        rows.layer_config[rows.config] * len(rows.sharding_table.options)
        + rows.places[rows.sharding]
    )
