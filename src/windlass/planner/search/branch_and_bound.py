"""Branch and bound: the fastest plans that fit, without evaluating provably slower ones."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from windlass.cost import (
    Bools,
    Floats,
    Ints,
    LayerCosts,
    PipelineShape,
    PlanTable,
    PlanTotals,
    RecomputeConfig,
    evaluate_batch,
)
from windlass.planner.gc_paused import gc_paused
from windlass.planner.search.bound_queue import BoundQueue, LowerBounds
from windlass.planner.search.min_recompute import minimize_recompute, recompute_twins
from windlass.planner.search.top_k import SearchResult, TopK
from windlass.planner.space.open_choices import RECOMPUTE_MODES
from windlass.planner.space.plan_space import PlanBatch, PlanSpace

_FASTEST = 8
"""Plans that are kept of those that are faster than a given one."""

_BATCH = 256
"""Plans whose least recompute is searched at a time."""

_ROUNDING = 1e-9
"""Relative rounding error of the batched cost model's bytes, which equal those of a program."""


class BranchAndBound:
    """Searches a plan space.

    Args:
        space: the plan space.
        budget_bytes: device memory budget.
        chain: layer costs that are known already; None computes them.
    """

    def __init__(
        self, space: PlanSpace, budget_bytes: float, *, chain: LayerCosts | None = None
    ) -> None:
        self.space, self._budget = space, budget_bytes * (1 + _ROUNDING)
        self.chain = chain or LayerCosts(space.base, space.graph, space.machine)
        self._bounds = LowerBounds(space, self.chain, budget_bytes)

    def totals(self, batch: PlanBatch) -> PlanTotals:
        """Seconds and bytes of all plans of a batch."""
        return evaluate_batch(self.chain, batch.shape, batch.chunk_bounds, batch.table)

    @gc_paused
    def exhaustive(self, count: int) -> SearchResult:
        """The fastest plans, found by evaluating the whole space.

        Args:
            count: most plans that are returned.
        """
        top = TopK(count)
        taken = (self._add(batch, top) for batch in self.space.batches())
        able = [spares for spares in taken if spares is not None]
        for spares in sorted(able, key=lambda each: float(each.least.min())):
            self._add_min_recompute(spares, top)
        return top.result(of=self._count)

    def scores(self, batch: PlanBatch, totals: PlanTotals) -> Floats:
        """Seconds of a step, with its share of the compilation that comes before the first step."""
        device, graph = self.space.machine.device, self.space.graph
        once = len({span.kind for span in graph.layer_runs}) * device.compile_seconds
        compiled = batch.table.layer_configs.compiled[batch.table.layer_config]
        share = once / self.space.request.train.steps
        return np.asarray(totals.step_seconds + share * compiled[batch.table.config])

    def fastest(self, count: int, *, within: float = inf, families: int = 0) -> SearchResult:
        """The fastest plans, without evaluating those that are provably slower or do not fit.

        Args:
            count: most plans that are returned.
            within: relative gap to the fastest plan up to which slower plans are returned.
            families: families of plans of which the fastest is wanted too, however slow.
        """
        return self._search(TopK(count, within=within, families=families))

    def faster(self, seconds: float) -> SearchResult:
        """The fastest plans that take less than this many seconds, and how many there are."""
        return self._search(TopK(_FASTEST, below=seconds))

    @gc_paused
    def _search(self, top: TopK) -> SearchResult:
        """Evaluates the subproblem with the lowest bound until all others are slower."""
        queue = BoundQueue(self._bounds.subproblems())
        while queue.least_bound <= (limit := top.limit) and queue.least_bound < inf:
            first, rest = queue.pop().split(limit)
            queue.push(rest)
            if first.bound_level == "room":
                self._evaluate(self._bounds.batch_of(first), top)
            else:
                queue.push(self._bounds.tighten(first, limit))
        return top.result(of=self._count)

    @cached_property
    def _count(self) -> int:
        """Number of plans of the space."""
        return sum(self.space.count(shape, able) for shape, able in self.space.open_shapes())

    def smallest(self) -> SearchResult:
        """The plan of each family that needs least memory, whether it fits or not.

        It shards as much as possible, in the smallest micro-batches, with recompute, under the
        schedule that keeps the fewest micro-batches alive.
        """
        top = TopK(1)
        for shape, able in self.space.open_shapes():
            if shape.schedule != "1f1b" and self.space.request.parallel.schedule is None:
                continue
            batch = self.space.batch_of(shape, self._smallest_microbatches(shape, able))
            rows = batch.table
            modes = np.array([RECOMPUTE_MODES.index(each.mode) for each in rows.recomputes])[
                rows.recompute
            ]
            kept = _shards_most(rows)[rows.sharding] & (modes == modes.max())[rows.config]
            batch = PlanBatch(shape, batch.chunk_bounds, rows.select(kept))
            totals = self.totals(batch)
            top.add(batch, self.scores(batch, totals), totals, -inf)
        return top.result(of=top.evaluated)

    def _evaluate(self, batch: PlanBatch, top: TopK) -> None:
        """Adds a batch, with as little recompute as fits if that is open."""
        spares = self._add(batch, top)
        if spares is not None:
            self._add_min_recompute(spares, top)

    def _add(self, batch: PlanBatch, top: TopK) -> "_NeedsRecompute | None":
        """Adds a batch; returns the plans that fit only with recompute."""
        totals = self.totals(batch)
        scores = self.scores(batch, totals)
        if not self.space.minimizes_recompute:
            top.add(batch, scores, totals, self._budget)
            return None
        fits = (totals.peak_bytes <= self._budget) & (totals.offload_fill <= 1)
        twin, some, whole = (recompute_twins(batch.table, mode) for mode in RECOMPUTE_MODES)
        spares = fits & (twin >= 0) & (totals.peak_bytes[twin] > self._budget)
        top.add(batch, np.where(spares, inf, scores), totals, self._budget)
        own = np.arange(batch.table.count)  # one of two twins that fit is enough
        spares &= (whole == own) | (whole < 0) | ~fits[whole]
        spares &= scores[twin] <= top.needed_seconds
        if not spares.any():
            return None
        rows = batch.table.select(spares)
        plain = replace(rows, recomputes=(RecomputeConfig(),), recompute=rows.recompute * 0)
        return _NeedsRecompute(
            cell=replace(batch, table=rows),
            least=self._bounds.in_memory(replace(batch, table=plain)),
            far_full=totals.offload_fill[spares],
            selects=some[spares] >= 0,
        )

    def _add_min_recompute(self, spares: "_NeedsRecompute", top: TopK) -> None:
        """Adds plans with as little recompute as fits, those with the lowest bounds first."""
        by_bound = np.argsort(spares.least)
        for first in range(0, len(by_bound), _BATCH):
            batch = by_bound[first : first + _BATCH]
            batch = batch[spares.least[batch] <= top.needed_seconds]
            if not batch.size:
                return
            chosen = np.isin(np.arange(len(by_bound)), batch)
            part = replace(spares.cell, table=spares.cell.table.select(chosen))
            far_full, selects = spares.far_full[chosen], spares.selects[chosen]
            fewer, totals = minimize_recompute(self.chain, part, self._budget, far_full, selects)
            top.add(fewer, self.scores(fewer, totals), totals, self._budget, counted=False)

    def _smallest_microbatches(self, shape: PipelineShape, able: Ints) -> Ints:
        """The configurations with the smallest micro-batch for their degrees."""
        table = self.space.config_table(shape)
        least = np.full(int(table.degrees.max()) + 1, table.batch)
        np.minimum.at(least, table.degrees[able], table.micro[able])
        return np.asarray(able[table.micro[able] == least[table.degrees[able]]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _NeedsRecompute:
    """Plans that fit with recompute but not without."""

    cell: PlanBatch
    least: Floats
    """Lower bound on each plan's seconds, whatever the recompute, `[plan]`."""
    far_full: Floats
    """Share of the offload tier that each plan takes, `[plan]`."""
    selects: Bools
    """Whether each plan's layers can recompute selectively, `[plan]`."""


def _shards_most(rows: PlanTable) -> Bools:
    """Whether each sharding option shards the most among its options, `[sharding]`."""
    degrees = rows.pairs.prod(axis=1)
    counts = rows.sharding_table.counts[rows.shared]
    most = np.maximum.reduceat(degrees, np.cumsum(counts) - counts)
    return np.asarray(degrees == np.repeat(most, counts))
