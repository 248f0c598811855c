"""MemoryFit: which plans fit in memory, with the recompute that they need for that."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from windlass.cost import ArrayClock, Bools, Floats, Ints, PlanColumns
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.least_recompute import (
    LeastRecompute,
    StageBytes,
    with_least_recompute,
)
from windlass.planner.search.search_result import SearchResult
from windlass.planner.space.plan_space import PipelineOption, PlanSpace
from windlass.schema import DEVICE_TIER


class MemoryFit:
    """Plans of a space in a memory budget.

    Args:
        space: the plan space.
        clock: tells the least bytes of many plans.
        budget_bytes: device memory budget.
    """

    def __init__(self, space: PlanSpace, clock: ArrayClock, budget_bytes: int) -> None:
        self._space, self._clock, self._budget_bytes = space, clock, budget_bytes

    def recomputed(
        self, columns: PlanColumns, option: PipelineOption, result: SearchResult
    ) -> Iterator[tuple[PlanColumns, Ints]]:
        """Plans that fit as they recompute, and the row of each before.

        Args:
            columns: plans that recompute nothing.
            option: their pipeline.
            result: keeps the plans that come nearest to fitting.
        """
        if not columns.count:
            return
        if self._space.minimizes_recompute:
            held = self._clock.state_bytes(columns).max(axis=1)
            if (held > self._budget_bytes).all():
                most = np.full_like(columns.full, self._space.graph.layers)
                able = self._ways(columns, option)[0, :, None]
                smallest = replace(columns, full=np.where(able, most, 0))
                result.keep_misfits(smallest, held, self._budget_bytes)
                return
            least = self._least(columns, option, self._clock.least_bytes)
            result.keep_misfits(columns, least.plain_bytes, self._budget_bytes, "none")
            result.keep_misfits(least.columns, least.least_bytes, self._budget_bytes)
            fits = np.flatnonzero(least.fits)
            if fits.size:
                yield least.columns.select(fits), fits
            return
        modes = [self._space.recomputes(option, each) for each in columns.configs]
        for mode, counts in self._space.pinned_recompute.items():
            able = np.array([mode in each for each in modes])[columns.config]
            rows = np.flatnonzero(able)
            if not rows.size:
                continue
            stages = np.resize(np.array(counts), option.pipeline)
            layers = np.tile(np.resize(stages, columns.shape.chunks), (rows.size, 1))
            plans = columns.select(rows)
            if mode == "full":
                plans = replace(plans, full=layers)
            elif mode == "selective":
                plans = replace(plans, selective=layers)
            nbytes = self._clock.least_bytes(plans).max(axis=1)
            result.keep_misfits(plans, nbytes, self._budget_bytes, mode)
            fits = nbytes <= self._budget_bytes
            if fits.any():
                yield plans.select(fits), rows[fits]

    def recomputed_by_program(self, columns: PlanColumns) -> LeastRecompute:
        """Plans with as little recompute as fits by their programs, `[plan]`.

        Args:
            columns: plans, whose own recompute does not count.
        """
        none, shape = np.zeros_like(columns.full), columns.shape
        option = PipelineOption(shape.pipeline, shape.schedule, shape.virtual_stages)
        plain = replace(columns, full=none, selective=none)
        return self._least(plain, option, self._program_bytes)

    def tiers_hold(self, columns: PlanColumns) -> Bools:
        """Whether tiers have room for the optimizer state that is offloaded, `[plan]`.

        As far as parameters that are evenly divided tell; a plan's program tells exactly.
        """
        tiers = {tier.name: tier.capacity_bytes for tier in self._space.machine.device.tiers}
        chunks = np.diff(self._parameters_before[list(columns.chunk_bounds)])
        fullest = int(chunks.reshape(-1, columns.shape.pipeline).sum(axis=0).max())
        held = []
        for config in columns.configs:
            plan = self._space.base.model_copy(update={"precision": config.precision})
            ranks = int(config.tensor) * (config.expert or 1)
            nbytes = plan.state_bytes(fullest // ranks)
            free = tiers[config.optimizer_tier] / nbytes if nbytes else inf
            held.append(inf if config.optimizer_tier == DEVICE_TIER else free)
        return np.asarray(columns.optimizer * np.array(held)[columns.config] >= 1)

    @cached_property
    def _parameters_before(self) -> Ints:
        """Trained parameters of all layers before each, `[layer]`."""
        kinds = self._space.graph.layer_kinds()
        return np.cumsum([0, *(kind.trained_count for kind in kinds)])

    def _least(
        self, columns: PlanColumns, option: PipelineOption, holds: StageBytes
    ) -> LeastRecompute:
        """Plans with as little recompute as fits, in the ways in which they can recompute."""
        ways = self._ways(columns, option)
        return with_least_recompute(columns, holds, self._clock, self._budget_bytes, ways)

    def _ways(self, columns: PlanColumns, option: PipelineOption) -> Bools:
        """Whether full and whether selective recompute are possible, `[2, plan]`."""
        modes = [self._space.recomputes(option, each) for each in columns.configs]
        ways = np.array([[way in each for each in modes] for way in ("full", "selective")])
        return np.asarray(ways[:, columns.config])

    def _program_bytes(self, columns: PlanColumns) -> Floats:
        """Bytes of the stages of plans by their programs, `[plan, stage]`."""
        space = self._space
        plans = (space.plan(columns, row) for row in range(columns.count))
        held = [stage_peak_bytes(plan, space.graph, space.machine) for plan in plans]
        return np.array(held, dtype=float)
