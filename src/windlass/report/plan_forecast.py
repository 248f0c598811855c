"""A plan with everything predicted of it: the input of the plan's figures and page."""

from dataclasses import dataclass

from windlass.program import Program, layers_of_stage
from windlass.schema import DeviceTimeline, Graph, Machine, Plan, Prediction, TierPeak, Timeline


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

    def phase_ranges(self) -> tuple[tuple[int, int, tuple[int, int]], ...]:
        """Stage, phase and half-open range of layers of each phase, in the order of the layers."""
        stages = self.plan.parallel.pipeline
        return tuple(
            (chunk % stages, phase, bounds)
            for chunk, stage in enumerate(self.plan.stages)
            for phase, bounds in enumerate(stage.phases)
        )


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
