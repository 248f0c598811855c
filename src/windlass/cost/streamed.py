"""Streamed: when each instruction of a program starts and ends whose layers come and go.

The device computes in one lane. What moves between tiers goes through another, one after the other
in the order that the program begins it, and whoever needs a layer waits for it. What a step leaves
under way the next one finds there, so the second of two steps is the one that repeats.

On a CPU the updates of moving layers take the cores from the computing, so they count in both.
"""

from dataclasses import dataclass, field

from windlass.cost.clock import Span
from windlass.cost.step import StepCost
from windlass.program.effects import Effects
from windlass.program.instruction import Instruction, Program
from windlass.program.phases import put_off
from windlass.program.traffic import Traffic
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine, Tier
from windlass.spec.plan import Plan

_MOVES = ("fetch", "update", "store", "keep", "restore")
_PASSES = ("forward", "recompute", "backward")


@dataclass(slots=True)
class _Lanes:
    """How far both lanes are, and when each layer is there."""

    now: float = 0.0
    far: float = 0.0
    """When all that was begun has moved."""
    stored: float = 0.0
    """When the last gradient has gone home."""
    there: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


def run_streamed(
    plan: Plan, graph: Graph, machine: Machine, costs: StepCost, program: Program
) -> tuple[Span, ...]:
    """The span of each instruction of a step that repeats, from its begin.

    Moves have the span in which they move, which may end after the step.

    Raises:
        KeyError: the machine has no such tier, or states no rate for it.
    """
    clock = _Clock(plan, graph, machine, costs)
    lanes = _Lanes()
    for _ in range(2):
        begin, lanes.spans = lanes.now, []
        for instruction in program.instructions:
            clock.pass_by(lanes, instruction)
    return tuple(Span(span.start - begin, span.end - begin) for span in lanes.spans)


def run_once(
    plan: Plan, graph: Graph, machine: Machine, costs: StepCost, program: Program
) -> float:
    """Seconds of a first step with what settles it, until all has moved.

    Raises:
        KeyError: the machine has no such tier, or states no rate for it.
    """
    clock = _Clock(plan, graph, machine, costs)
    lanes = _Lanes()
    clock.stored = False
    for instruction in program.instructions:
        clock.pass_by(lanes, instruction)
    clock.stored = True
    for instruction in program.settle:
        clock.pass_by(lanes, instruction)
    return max(lanes.now, lanes.far)


def step_seconds(program: Program, spans: tuple[Span, ...]) -> float:
    """When the last instruction has passed that is no move."""
    return max(
        span.end
        for instruction, span in zip(program.instructions, spans, strict=True)
        if instruction.kind not in _MOVES
    )


def moving_seconds(program: Program, spans: tuple[Span, ...]) -> float:
    """How long the lane of moves is busy."""
    return sum(
        span.end - span.start
        for instruction, span in zip(program.instructions, spans, strict=True)
        if instruction.kind in _MOVES
    )


class _Clock:
    def __init__(self, plan: Plan, graph: Graph, machine: Machine, costs: StepCost) -> None:
        self._costs = costs
        self._traffic = Traffic(plan, graph)
        self._effects = Effects(plan, graph)
        self._tiers = {tier.name: tier for tier in machine.device.tiers}
        self._shares_cores = machine.device.kind == "cpu"
        self._moves_updates = plan.far("optimizer")
        self._put_off = frozenset(put_off(plan, graph))
        self.stored = True
        """Whether gradients wait at home for the updates that are put off."""

    def pass_by(self, lanes: _Lanes, instruction: Instruction) -> None:
        kind, layer, _ = instruction
        start = lanes.now
        if kind in _MOVES and (kind != "update" or self._moves_updates):
            self._move(lanes, instruction)
            return
        if kind in _PASSES and layer is not None:
            needed = self._effects.targets(layer)
            start = max(start, *(lanes.there.get(owner, 0.0) for owner in needed))
        elif kind == "release" and layer is not None:
            start = max(start, lanes.there.get(layer, 0.0))
        elif kind == "norm":
            start = max(start, lanes.stored)
        lanes.now = start + self._costs.of(instruction).total
        lanes.spans.append(Span(start, lanes.now))

    def _move(self, lanes: _Lanes, instruction: Instruction) -> None:
        kind, layer, _ = instruction
        if kind == "store":
            lanes.now = max(lanes.now, lanes.stored)
        start = max(lanes.now, lanes.far)
        end = start + sum(
            moved.read / self._rate(tier, "read") + moved.written / self._rate(tier, "write")
            for tier, moved in self._traffic.of(instruction, stored=self.stored).items()
        )
        if kind == "update" and (self.stored or layer not in self._put_off):
            work = self._costs.of(instruction).total
            end = max(end, start + work)
            lanes.now += work if self._shares_cores else 0.0
        lanes.far = end
        if kind == "store":
            lanes.stored = end
        elif layer is not None and kind != "keep":
            lanes.there[layer] = end
        lanes.spans.append(Span(start, end))

    def _rate(self, name: str, direction: str) -> float:
        tier: Tier = self._tiers[name]
        rate = tier.read if direction == "read" else tier.write
        if not rate:
            raise KeyError(f"tier `{name}` states no rate for {direction}")
        return rate
