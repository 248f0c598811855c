"""A plan with everything predicted of it: the input of the plan's figures and page."""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.program import Program, layers_of_stage
from windlass.schema import DeviceTimeline, Graph, Machine, Plan, Prediction, TierPeak, Timeline


class PlanPhase(NamedTuple):
    """One phase of a plan. Each layer is in exactly one."""

    name: str
    """`stage 1, chunk 0, phase 2`, without what is the only one of its kind; chunks are those of
    an interleaved schedule."""
    layers: range


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """A plan and its prediction; every number is predicted."""

    plan: Plan
    graph: Graph
    machine: Machine
    prediction: Prediction
    programs: tuple[Program, ...]
    """The program of each stage's first rank."""
    timeline: Timeline
    """One lane for each stage, that of the stage's first rank."""
    stage_peaks: tuple[tuple[TierPeak, ...], ...]
    """Peaks, `[stage][tier]`, device memory first."""

    @property
    def title(self) -> str:
        """`gpt3-175b on ipu-pod256`, with `: does not fit` where that is so."""
        misfit = "" if self.prediction.fits else ": does not fit"
        return f"{self.graph.name} on {self.machine.name}{misfit}"

    def stage_timelines(self) -> tuple[tuple[int, DeviceTimeline], ...]:
        """Each stage with its timeline."""
        return tuple(enumerate(self.timeline.devices))

    def phases(self) -> tuple[PlanPhase, ...]:
        """All phases in the order of the layers, which is that of the forward pass."""
        return tuple(
            PlanPhase(self._phase_name(part, index), range(*bounds))
            for part, stage in enumerate(self.plan.stages)
            for index, bounds in enumerate(stage.phases)
        )

    def _phase_name(self, part: int, phase: int) -> str:
        stages = self.plan.parallel.pipeline
        words = [f"stage {part % stages}"] if stages > 1 else []
        words += [f"chunk {part // stages}"] if len(self.plan.stages) > stages else []
        if any(len(stage.phases) > 1 for stage in self.plan.stages):
            words.append(f"phase {phase}")
        return ", ".join(words)


def describe_layers(plan: Plan, stage: int) -> str:
    """`layers 0–11`, or `layers 0–5, 24–29` with virtual stages."""
    ranges: list[list[int]] = []
    for layer in layers_of_stage(plan, stage):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    words = ", ".join(f"{first}–{last}" if last > first else str(first) for first, last in ranges)
    return f"layer{'' if words.isdecimal() else 's'} {words}"
