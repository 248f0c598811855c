"""The same question to every engine: its best plan, step and peak, or what stands in the way."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import RenderableType

from windlass.answer import Answers, word_table
from windlass.api.engines.engine_handover import hand_over
from windlass.engines import engine_versions, load_engine
from windlass.errors import WindlassError
from windlass.jobs import PlanOptions, Progress, build_plan
from windlass.program import describe_degrees
from windlass.units import format_bytes, format_seconds

EVERY_ENGINE = "all"
"""Name of a stack that asks for the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The best plan that one engine can say."""

    engine: str
    """Name and version."""
    plan: str | None = None
    step_seconds: float | None = None
    tokens_per_second_per_device: float | None = None
    peak_bytes: int | None = None
    obstacle: str = ""
    """What the planner's own choice had that the engine cannot say, or why there is no plan."""

    def row(self) -> tuple[str, ...]:
        """Its cells."""
        if self.step_seconds is None or self.peak_bytes is None:
            return self.engine, "–", "–", "–", self.obstacle
        speed = f"{self.tokens_per_second_per_device:.0f}"
        step, peak = format_seconds(self.step_seconds), format_bytes(self.peak_bytes)
        return self.engine, step, speed, peak, ". ".join(filter(None, (self.plan, self.obstacle)))


class EngineTable(Answers[EnginePlan]):
    """The plans of all engines, fastest first."""

    def lines(self) -> Iterator[RenderableType]:
        """A row for each."""
        heads = ("engine", "step", "tokens/s/GPU", "peak", "plan, or what stands in the way")
        yield word_table(heads, (each.row() for each in self))
        yield "predicted; `windlass export PLAN --to ENGINE -o DIR` hands one over"


def plan_on_engines(
    model: str | None,
    overrides: tuple[str, ...],
    options: PlanOptions,
    *,
    machine: str | None,
    progress: Progress | None,
) -> EngineTable:
    """The best plan for each engine.

    Args:
        model: the model's name.
        overrides: `key=value`.
        options: what else was asked for; its stack is replaced by each engine's.
        machine: the machine.
        progress: called with how far each search is.
    """
    found = [
        _planned(name, model, overrides, options, machine, progress) for name in engine_versions()
    ]
    return EngineTable(sorted(found, key=lambda each: (each.step_seconds or 1e300, each.engine)))


def _planned(
    name: str,
    model: str | None,
    overrides: tuple[str, ...],
    options: PlanOptions,
    machine: str | None,
    progress: Progress | None,
) -> EnginePlan:
    engine = load_engine(name)
    try:
        planned = build_plan(
            model, overrides, replace(options, stack=name), machine=machine, progress=progress
        )
        handover = hand_over(planned, engine, nearest=True)
    except WindlassError as error:
        return EnginePlan(engine=engine.label, obstacle=str(error).partition("\n")[0])
    plan, prediction = handover.plan, handover.prediction
    return EnginePlan(
        engine=engine.label, plan=describe_degrees(plan), step_seconds=prediction.step_seconds,
        tokens_per_second_per_device=prediction.tokens_per_second / plan.parallel.devices,
        peak_bytes=prediction.peaks[0].peak_bytes, obstacle="; ".join(handover.changes),
    )  # fmt: skip
