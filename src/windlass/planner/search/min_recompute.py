"""Minimum recomputation per stage that makes an otherwise infeasible plan fit.

A stage's memory depends on its own layers only, so all stages of all plans are searched at once by
bisection, in each of two modes: block after block is recomputed in full; or first selectively,
then, one after the other again, in full. The more of these steps, the longer a training step: of
all plans that are equal except for these numbers, the fastest uses on each stage the quicker of
both modes' minima.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from windlass.cost import (
    Bools,
    Floats,
    Ints,
    LayerCosts,
    PlanTable,
    PlanTotals,
    RecomputeConfig,
    stage_bytes,
    stage_seconds,
    step_seconds,
)
from windlass.planner.search.extrapolate import stage_peak_bytes
from windlass.planner.space.plan_space import PlanBatch
from windlass.program import (
    chunks_of_stage,
    recomputable_layers,
    selective_recompute_errors,
    with_recompute,
)
from windlass.schema import Graph, Machine, Plan, Recompute


def recompute_twins(rows: PlanTable, mode: Recompute) -> Ints:
    """Index of the same plan with another recompute mode, `[plan]`; -1 if there is none.

    Args:
        rows: plans whose stages all recompute the same.
        mode: recompute mode of the twins.
    """
    key = (rows.block * len(rows.layer_configs.all) + rows.layer_config) * (
        rows.microbatches.max() + 1
    )
    _, first, alike = np.unique(key + rows.microbatches, return_index=True, return_inverse=True)
    counts = rows.sharding_table.counts[rows.shared]
    block = np.searchsorted(rows.shared, rows.block[first])
    ends = np.cumsum(counts[block])
    begins = ends - np.cumsum(counts)[block]  # of equal configs, each with all its sharding options
    slot = begins[alike][rows.config] + rows.sharding
    able = np.array([each.mode == mode for each in rows.recomputes])[rows.recompute][rows.config]
    found = np.full(ends[-1], -1)
    found[slot[able]] = np.flatnonzero(able)
    return np.asarray(found[slot])


def minimize_recompute(
    chain: LayerCosts,
    cell: PlanBatch,
    budget_bytes: float,
    far_full: Floats,
    selects: Bools,
) -> tuple[PlanBatch, PlanTotals]:
    """The given plans with as little recompute on each stage as fits.

    Args:
        chain: costs of layers.
        cell: plans that fit with all layers recomputed.
        budget_bytes: device memory budget.
        far_full: share of the offload tier that each plan takes, `[plan]`.
        selects: whether each plan's layers can recompute selectively, `[plan]`.
    """
    rows, shape, most = cell.table, cell.shape, _max_layers(cell)
    first = _min_recompute(chain, cell, budget_bytes, most, _full_steps)
    some = replace(cell, table=rows.select(selects))
    if some.table.count:
        second = _min_recompute(chain, some, budget_bytes, 2 * most, _selective_steps(most))
        first = _faster_mode(chain, cell, budget_bytes, first, second.among(selects))
    found = _with_own_recompute(rows, first.counts)
    cell = PlanBatch(shape, cell.chunk_bounds, found)
    seconds = step_seconds(chain, shape, cell.chunk_bounds, found)
    peaks = first.nbytes.max(axis=1)
    return cell, PlanTotals(step_seconds=seconds, peak_bytes=peaks, offload_fill=far_full)


class _MinRecompute:
    """The least recompute of each stage of each plan.

    Args:
        counts: blocks recomputed in full and selectively, `[plan, stage, 2]`.
        nbytes: bytes that each stage holds then, `[plan, stage]`.
    """

    def __init__(self, counts: Ints, nbytes: Floats) -> None:
        self.counts, self.nbytes = counts, nbytes

    def among(self, chosen: Bools) -> "_MinRecompute":
        """The same among more plans, which do not fit in this mode."""
        counts = np.zeros((len(chosen), *self.counts.shape[1:]), dtype=np.int64)
        nbytes = np.full((len(chosen), *self.nbytes.shape[1:]), np.inf)
        counts[chosen], nbytes[chosen] = self.counts, self.nbytes
        return _MinRecompute(counts, nbytes)


def _faster_mode(
    chain: LayerCosts,
    cell: PlanBatch,
    budget_bytes: float,
    one: _MinRecompute,
    other: _MinRecompute,
) -> _MinRecompute:
    """The mode of each stage that fits and takes less time."""
    first, second = (
        np.where(
            each.nbytes <= budget_bytes,
            stage_seconds(
                chain, cell.shape, cell.chunk_bounds, _with_own_recompute(cell.table, each.counts)
            ),
            np.inf,
        )
        for each in (one, other)
    )
    better = second < first
    return _MinRecompute(
        np.where(better[..., None], other.counts, one.counts),
        np.where(better, other.nbytes, one.nbytes),
    )


def _min_recompute(
    chain: LayerCosts, cell: PlanBatch, budget_bytes: float, last: Ints, way: Callable[[Ints], Ints]
) -> _MinRecompute:
    """The fewest steps of a mode with which each stage fits, or the last step if none does.

    Args:
        chain: costs of layers.
        cell: the plans.
        budget_bytes: device memory budget of each stage.
        last: last step of each stage, `[stage]`.
        way: what is recomputed at a step of each stage.
    """
    rows, shape = cell.table, cell.shape
    side = (rows.count, shape.pipeline)
    low, high = np.zeros(side, dtype=np.int64), np.tile(last, (rows.count, 1))
    nbytes = np.full(side, np.nan)
    step = low.copy()
    while (open_ := (low < high) | np.isnan(nbytes)).any():
        for count in np.unique(step[open_]):
            asked = open_ & (step == count)
            needed = asked.any(axis=1)
            stage_sizes = np.full(side, np.nan)
            tried = _with_recompute(
                rows.select(needed), _recompute_config(way(np.minimum(count, last)))
            )
            stage_sizes[needed] = stage_bytes(chain, shape, cell.chunk_bounds, tried)
            fits = asked & (stage_sizes <= budget_bytes)
            nbytes[fits], high[fits] = stage_sizes[fits], count
            fails = asked & ~fits
            low[fails] = np.minimum(count + 1, high[fails])
            none = fails & (count == last)
            nbytes[none] = stage_sizes[none]
        step = (low + high) // 2
    return _MinRecompute(way(low), nbytes)


def _full_steps(steps: Ints) -> Ints:
    """Block after block is recomputed in full."""
    return np.stack([steps, np.zeros_like(steps)], axis=-1)


def _selective_steps(most: Ints) -> Callable[[Ints], Ints]:
    """First each of this many blocks is recomputed selectively, then in full."""
    return lambda steps: np.stack([np.maximum(0, steps - most), np.minimum(steps, most)], axis=-1)


def _recompute_config(counts: Ints) -> RecomputeConfig:
    whole, selective = counts.T.tolist()
    return RecomputeConfig(tuple(whole), tuple(selective))


def _max_layers(cell: PlanBatch) -> Ints:
    """The most layers of a model chunk of each stage that can be recomputed, `[stage]`."""
    end = cell.chunk_bounds[-1] - 1
    able = np.array([min(last, end) - max(first, 1) for first, last in pairwise(cell.chunk_bounds)])
    return np.asarray(np.maximum(0, able.reshape(-1, cell.shape.pipeline)).max(axis=0))


def _with_recompute(rows: PlanTable, again: RecomputeConfig) -> PlanTable:
    """The same plans with this recompute."""
    return replace(rows, recomputes=(again,), recompute=np.zeros_like(rows.recompute))


def _with_own_recompute(rows: PlanTable, counts: Ints) -> PlanTable:
    """The same plans, each with its own recompute on each of its stages."""
    agains, again = np.unique(counts, axis=0, return_inverse=True)
    both = rows.config * len(agains) + again.reshape(-1)
    runs, run = np.unique(both, return_inverse=True)
    of, kinds = np.divmod(runs, len(agains))
    return replace(
        rows,
        recomputes=tuple(map(_recompute_config, agains)),
        block=rows.block[of],
        layer_config=rows.layer_config[of],
        microbatches=rows.microbatches[of],
        recompute=kinds,
        config=run,
    )


def min_recompute_plans(
    plan: Plan, graph: Graph, machine: Machine, budget_bytes: int
) -> tuple[Plan, ...]:
    """The plan with as little recompute on each stage as fits, in each mode that is possible.

    Args:
        plan: a plan that fits with all layers recomputed.
        graph: the graph that it partitions.
        machine: the machine that it is for.
        budget_bytes: device memory budget.
    """
    ways = (False, True) if not any(selective_recompute_errors(plan, graph)) else (False,)
    found = (
        _min_recompute_plan(
            RecomputeSteps(plan, selects=(way,) * plan.parallel.pipeline),
            graph,
            machine,
            budget_bytes,
        )
        for way in ways
    )
    return tuple(dict.fromkeys(found))


def _min_recompute_plan(
    steps: "RecomputeSteps", graph: Graph, machine: Machine, budget_bytes: int
) -> Plan:
    """The least recompute, for all stages at once: none, else by bisection.

    Bisection assumes that more recompute needs no more memory. Between none and one step that may
    be wrong, because recompute needs room to run in.
    """
    low, high = [0] * len(steps.last), list(steps.last)
    middle = low
    while True:
        for stage, peak in enumerate(stage_peak_bytes(steps.plan(middle), graph, machine)):
            if peak <= budget_bytes:
                high[stage] = middle[stage]
            else:
                low[stage] = min(middle[stage] + 1, high[stage])
        if low == high:
            return steps.plan(low)
        middle = [(one + other) // 2 for one, other in zip(low, high, strict=True)]


class RecomputeSteps:
    """How much of each stage is recomputed, step by step; at step 0 nothing is.

    Args:
        plan: states everything else.
        selects: whether each stage recomputes selectively first, `[stage]`.
    """

    def __init__(self, plan: Plan, *, selects: Sequence[bool]) -> None:
        self._plan, self._selects = plan, tuple(selects)
        self._layers = [
            max(
                len(recomputable_layers(plan, plan.stages[chunk]))
                for chunk in chunks_of_stage(plan, stage)
            )
            for stage in range(plan.parallel.pipeline)
        ]

    @property
    def last(self) -> tuple[int, ...]:
        """The step at which all layers are recomputed in full, `[stage]`."""
        return tuple(
            (1 + selects) * count
            for selects, count in zip(self._selects, self._layers, strict=True)
        )

    def plan(self, steps: Sequence[int]) -> Plan:
        """The plan with each stage at its step."""
        stages = range(self._plan.parallel.pipeline)
        kept = [self._layers[stage] if self._selects[stage] else 0 for stage in stages]
        whole = [max(0, steps[stage] - kept[stage]) for stage in stages]
        selective = [min(steps[stage], kept[stage]) for stage in stages]
        chunks = [chunk % len(stages) for chunk in range(len(self._plan.stages))]
        return with_recompute(
            self._plan,
            [whole[stage] for stage in chunks],
            [selective[stage] for stage in chunks],
        )
