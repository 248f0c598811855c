"""Phase table: plans that differ in their phases only, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from windlass.cost import Bools, Floats, Ints
from windlass.program import fully_recomputed
from windlass.schema import Graph, Plan, Stage

Numbers = TypeVar("Numbers", Ints, Floats)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseTable:
    """Plans with offloaded parameters that differ in their phases only."""

    stages: tuple[tuple[Stage, ...], ...]
    """Stages of each plan."""
    plan: Ints
    """Plan of each phase, ascending, `[phase]`."""
    begin: Ints
    """First layer, `[phase]`."""
    end: Ints
    """The layer after its last one, `[phase]`."""
    stage_begin: Ints
    """First layer of its stage, `[phase]`."""
    stage_end: Ints
    """The layer after its stage's last one, `[phase]`."""
    resident_end: Ints
    """The layer after the first phase of its stage, `[phase]`."""
    recomputed: Bools
    """Whether a layer runs its full forward again, `[plan, layer]`."""
    waits: Bools
    """Whether a layer's output waits for its backward pass, `[plan, layer]`.

    It does unless it is sent. The model's last phase leaves nothing, because it runs backward at
    once; nor do layers before the first trained one.
    """
    moves: Bools
    """Whether that output is offloaded if activations are, `[plan, layer]`.

    It is, between layers that are recomputed.
    """
    saves: Bools
    """Whether what the layer saves waits too, because it is not recomputed, `[plan, layer]`."""

    @classmethod
    def of(cls, plan: Plan, stages: Sequence[tuple[Stage, ...]], graph: Graph) -> "PhaseTable":
        """The table of a plan with other stages.

        Args:
            plan: a plan that offloads parameters.
            stages: the stages in its place.
            graph: the graph that it partitions.
        """
        rows = [
            (row, *phase, stage.first_layer, stage.end_layer, stage.phases[0][1])
            for row, each in enumerate(stages)
            for stage in each
            for phase in stage.phases
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        masks = [_activations(plan.model_copy(update={"stages": each}), graph) for each in stages]
        shape = -1, 4, graph.layers
        recomputed, waits, moves, saves = np.array(masks).reshape(shape).swapaxes(0, 1)
        plans, begin, end, stage_begin, stage_end, resident_end = columns
        return cls(
            stages=tuple(stages),
            plan=plans,
            begin=begin,
            end=end,
            stage_begin=stage_begin,
            stage_end=stage_end,
            resident_end=resident_end,
            recomputed=recomputed,
            waits=waits,
            moves=moves,
            saves=saves,
        )

    def most(self, values: Numbers, phases: Bools | None = None) -> Numbers:
        """The largest value of each plan, `[plan]`.

        Args:
            values: a value for each phase.
            phases: the phases that the values are of; None means all.
        """
        plan = self.plan if phases is None else self.plan[phases]
        most: Numbers = np.maximum.reduceat(values, np.flatnonzero(np.diff(plan, prepend=-1)))
        return most


def sums_before(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Sums of the values before each, and of all, along the last axis."""
    array = np.asarray(values)
    return np.concatenate([np.zeros_like(array[..., :1]), np.cumsum(array, axis=-1)], axis=-1)


def _activations(plan: Plan, graph: Graph) -> tuple[Bools, Bools, Bools, Bools]:
    """`recomputed`, `waits`, `moves` and `saves` of one plan, each `[layer]`."""
    again = np.zeros(graph.layers + 1, dtype=bool)
    sent = np.zeros(graph.layers, dtype=bool)
    for stage in plan.stages:
        begin, end = stage.phases[-1]
        chosen = fully_recomputed(plan, stage)
        again[stage.first_layer : begin] = True
        again[chosen.start : chosen.stop] = True
        sent[end - 1] = True
    begin, _ = plan.stages[-1].phases[-1]
    runs_later = np.arange(graph.layers) < begin
    runs_later[: graph.first_trained] = False
    saves = runs_later & ~again[:-1]
    waits = runs_later & ~(sent & again[:-1])
    return again[:-1], waits, waits & again[:-1] & again[1:] & ~sent, saves
