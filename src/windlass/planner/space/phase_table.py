"""Phase table: plans that differ in their phases only, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from windlass.cost import Bools, Floats, Ints
from windlass.program import fully_recomputed, last_phase_begin
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
    """First layer of its stage, or of its model chunk, `[phase]`."""
    stage_end: Ints
    """The layer after that one's last, `[phase]`."""
    device: Ints
    """Pipeline rank that runs it, `[phase]`."""
    resident_begin: Ints
    """First layer of the first phase of its device, which stays, `[phase]`."""
    resident_end: Ints
    """The layer after that phase, `[phase]`."""
    turns: Bools
    """Whether it is the last of its device, whose weights stay until they run back, `[phase]`."""
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
        """The table of a plan with other stages."""
        ranks = plan.parallel.pipeline
        rows = [
            (
                row, *phase, stage.first_layer, stage.end_layer, at % ranks,
                *each[at % ranks].phases[0],
                at + ranks >= len(each) and phase == stage.phases[-1],
            )
            for row, each in enumerate(stages)
            for at, stage in enumerate(each)
            for phase in stage.phases
        ]  # fmt: skip
        columns = np.array(rows, dtype=np.int64).reshape(-1, 9).T
        masks = [_activations(with_chunks(plan, each), graph) for each in stages]
        shape = -1, 4, graph.layers
        recomputed, waits, moves, saves = np.array(masks).reshape(shape).swapaxes(0, 1)
        plans, begin, end, stage_begin, stage_end, device, *resident, turns = columns
        return cls(
            stages=tuple(stages),
            plan=plans,
            begin=begin,
            end=end,
            stage_begin=stage_begin,
            stage_end=stage_end,
            device=device,
            resident_begin=resident[0],
            resident_end=resident[1],
            turns=turns.astype(bool),
            recomputed=recomputed,
            waits=waits,
            moves=moves,
            saves=saves,
        )

    @property
    def stays(self) -> Bools:
        """Whether it is the first of its device, whose weights stay between steps, `[phase]`."""
        return np.asarray(self.begin == self.resident_begin)

    def most(self, values: Numbers) -> Numbers:
        """The largest value of each plan's phases, `[plan]`."""
        starts = np.flatnonzero(np.diff(self.plan, prepend=-1))
        most: Numbers = np.maximum.reduceat(values, starts)
        return most

    def by_device(self, values: Floats | Ints) -> Floats:
        """Sums over the phases of each device, `[plan, device]`."""
        count = int(self.device.max()) + 1
        place = self.plan * count + self.device
        sums = np.bincount(place, values, len(self.stages) * count)
        return np.asarray(sums.reshape(-1, count))

    def before_on_device(self, values: Ints) -> Ints:
        """Sums over the phases that a device runs forward before each, `[phase]`."""
        order = np.lexsort((self.begin, self.device, self.plan))
        sums = np.cumsum(values[order]) - values[order]
        first = np.flatnonzero(self.stays[order])
        before = np.empty_like(sums)
        before[order] = sums - np.repeat(sums[first], np.diff([*first, len(sums)]))
        return before


def with_chunks(plan: Plan, stages: tuple[Stage, ...]) -> Plan:
    """The plan with other stages, or with several model chunks on each."""
    virtual = len(stages) // plan.parallel.pipeline
    parallel = plan.parallel
    if virtual != parallel.virtual_stages:
        parallel = parallel.model_copy(update={"virtual_stages": virtual})
    return plan.model_copy(update={"parallel": parallel, "stages": stages})


def sums_before(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Sums of the values before each, and of all, along the last axis."""
    array = np.asarray(values)
    return np.concatenate([np.zeros_like(array[..., :1]), np.cumsum(array, axis=-1)], axis=-1)


def _activations(plan: Plan, graph: Graph) -> tuple[Bools, Bools, Bools, Bools]:
    """`recomputed`, `waits`, `moves` and `saves` of one plan, each `[layer]`."""
    again = np.zeros(graph.layers + 1, dtype=bool)
    sent = np.zeros(graph.layers, dtype=bool)
    for stage in plan.stages:
        chosen = fully_recomputed(plan, stage)
        again[stage.first_layer : last_phase_begin(plan, stage)] = True
        again[chosen.start : chosen.stop] = True
        sent[stage.end_layer - 1] = True
    begin, _ = plan.stages[-1].phases[-1]
    runs_later = np.arange(graph.layers) < begin
    runs_later[: graph.first_trained] = False
    saves = runs_later & ~again[:-1]
    waits = runs_later & ~(sent & again[:-1])
    return again[:-1], waits, waits & again[:-1] & again[1:] & ~sent, saves
