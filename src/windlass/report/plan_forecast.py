"""Forecast: all that is known of a plan before it runs, as its pictures need it."""

from dataclasses import dataclass

from windlass.program.device_mesh import layers_of_stage
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import DeviceTimeline, Prediction, TierPeak, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """A plan with its prediction, every number of which is predicted."""

    plan: Plan
    graph: Graph
    machine: Machine
    prediction: Prediction
    timeline: Timeline
    """One lane for each stage: its first device stands for all."""
    stage_peaks: tuple[tuple[TierPeak, ...], ...]
    """For each stage the fullest moment of each tier, the near one first."""

    @property
    def title(self) -> str:
        """`gpt3-175b on ipu-pod256`, and whether that does not fit."""
        misfit = "" if self.prediction.fits else ": does not fit"
        return f"{self.graph.name} on {self.machine.name}{misfit}"

    def stage_timelines(self) -> tuple[tuple[int, DeviceTimeline], ...]:
        """Each stage with its lane."""
        return tuple(enumerate(self.timeline.devices))

    def phase_ranges(self) -> tuple[tuple[int, int, tuple[int, int]], ...]:
        """Stage, phase, and the half-open range of its layers, in the order of the chain."""
        stages = self.plan.parallel.pipeline
        return tuple(
            (chunk % stages, phase, bounds)
            for chunk, part in enumerate(self.plan.stages)
            for phase, bounds in enumerate(part.phases)
        )


def describe_layers(plan: Plan, stage: int) -> str:
    """`layers 0–11`, or `layers 0–5, 24–29` where chunks interleave."""
    runs: list[list[int]] = []
    for layer in layers_of_stage(plan, stage):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    words = ", ".join(f"{first}–{last}" if last > first else str(first) for first, last in runs)
    return f"layer{'' if words.isdecimal() else 's'} {words}"
