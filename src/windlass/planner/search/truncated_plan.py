"""A plan in phases with few micro-batches, which tells of the peak and the step of the full one."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from windlass.cost import predict_plan, simulated_seconds
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.phase_bounds import PhasePrices
from windlass.program import Program, lower_stages, memory_profile
from windlass.schema import Plan, Prediction

_SHORT_MICROBATCHES = 3
"""Micro-batches of the shorter of two short programs."""


@dataclass(frozen=True)
class TruncatedPlan:
    """Peak memory of one plan and a bound on its step, from programs of few micro-batches.

    Args:
        plan: a legal plan in phases.
        prices: of plans of the same model and machine.
    """

    plan: Plan
    prices: PhasePrices
    _lowered: dict[int, tuple[Program, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def peak_bytes(self) -> int:
        """Peak device memory of the full plan.

        All micro-batches pass a phase before the next one begins. So what a stage holds at an
        instruction of the first, the second or the last of them grows by a constant with each one
        in between, and is largest at one of those three.
        """
        graph, machine = self.prices.graph, self.prices.machine
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES
        if self.spans_stages or further <= 0:
            return max(stage_peak_bytes(self.plan, graph, machine, self._programs(further)))
        return max(self._peak_of(program) for program in self._programs(1))

    @cached_property
    def least_peak_bytes(self) -> int:
        """Lower bound on the peak: of phases that span stages, that of fewer micro-batches."""
        few = 2 * self.plan.parallel.pipeline + 1
        if not self.spans_stages or self.plan.batch.accumulation <= few:
            return 0
        process_bytes = self.prices.machine.device.process_bytes(compiled=self.plan.compile)
        profiles = (
            memory_profile(program, self.plan, self.prices.graph, runtime_bytes=process_bytes)
            for program in self._programs(few - _SHORT_MICROBATCHES)
        )
        return max(max(profile.bytes_by_instruction) for profile in profiles)

    def _peak_of(self, program: Program) -> int:
        """Bytes of the full plan on one stage, by its program of one micro-batch more.

        Each further micro-batch leaves what its last but one does.
        """
        graph, process_bytes = self.prices.graph, self.prices.machine.device.process_bytes
        # Sizes are the plan's own: rows of an embedding's gradient grow up to its vocabulary only.
        profile = memory_profile(
            program, self.plan, graph, runtime_bytes=process_bytes(compiled=self.plan.compile)
        )
        last = np.array(
            [each.micro_batch == _SHORT_MICROBATCHES - 1 for each in program.instructions]
        )
        left = np.cumsum(np.where(last, profile.changes, 0))
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES - 1
        held = np.array(profile.bytes_by_instruction) + further * left
        return int(held[~last].max())

    @property
    def spans_stages(self) -> bool:
        """Whether each phase is a model chunk, which all stages run at a time.

        What comes early from the other end of the pipeline then depends on how many micro-batches
        there are, so that no short program tells of the full one.
        """
        return self.plan.parallel.virtual_stages > 1

    @cached_property
    def step_seconds(self) -> float:
        """Lower bound on step time: a line through the ends of two short programs."""
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES
        if self.spans_stages or further <= 0:
            return self._seconds(further)
        few = self._seconds(0)
        return few + further * (self._seconds(1) - few)

    @property
    def whole_step_seconds(self) -> float:
        """Step time of the full plan."""
        return self._seconds(self.plan.batch.accumulation)

    def _seconds(self, more: int) -> float:
        """Seconds of a step of few micro-batches and some more."""
        plan, prices = self._shortened(more), self.prices
        return simulated_seconds(
            plan, prices.graph, prices.machine, prices.costs(plan), self._programs(more)
        )

    @cached_property
    def prediction(self) -> Prediction:
        """Prediction of the full plan."""
        programs = lower_stages(self.plan, self.prices.graph)
        return predict_plan(self.plan, self.prices.graph, self.prices.machine, programs)

    def _programs(self, more: int) -> tuple[Program, ...]:
        """Programs of all stages, of few micro-batches and some more."""
        if more not in self._lowered:
            self._lowered[more] = lower_stages(self._shortened(more), self.prices.graph)
        return self._lowered[more]

    def _shortened(self, more: int) -> Plan:
        """The plan with few micro-batches and some more, if it has as many."""
        batch = self.plan.batch
        few = min(batch.accumulation, _SHORT_MICROBATCHES + more)
        return self.plan.model_copy(
            update={"batch": batch.model_copy(update={"accumulation": few})}
        )
