"""Streamed: when the instructions of a device start and end whose layers come and go.

The device computes in one lane. What moves between tiers goes through another, one after the other
in the order that the program begins it, and whoever needs a layer waits for it.

On a CPU the updates of moving layers take the cores from the computing, so they count in both. On a
bulk-synchronous machine without compute units set apart for moves, the device waits for each.
"""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.cost.instruction_time import InstructionCosts
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import (
    GRADIENT_PASSES,
    TRANSFER_KINDS,
    WEIGHT_PASSES,
    Instruction,
    InstructionKind,
    Program,
)
from windlass.program.memory.effects import Effects
from windlass.program.memory.tier_traffic import Traffic, together
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan

_PASSES: tuple[InstructionKind, ...] = (*WEIGHT_PASSES, *GRADIENT_PASSES)


class InstructionSpan(NamedTuple):
    """Seconds of the step at which an instruction starts and ends."""

    start: float
    end: float


def first_step_seconds(
    plan: Plan, graph: Graph, machine: Machine, costs: InstructionCosts, program: Program
) -> float:
    """Seconds of a first step with what settles it, until all has moved.

    Raises:
        KeyError: the machine has no such tier, or states no rate for it.
    """
    lane, now = OffloadQueue(plan, graph, machine, costs, program.device), 0.0
    lane.stored = False
    for instruction in program.instructions:
        _, now = lane.pass_by(instruction, now)
    lane.stored = True
    for instruction in program.flush_deferred_updates:
        _, now = lane.pass_by(instruction, now)
    return max(now, lane.moved)


def step_seconds(program: Program, spans: tuple[InstructionSpan, ...]) -> float:
    """When the last instruction has passed that is no move."""
    return max(
        span.end
        for instruction, span in zip(program.instructions, spans, strict=True)
        if instruction.kind not in TRANSFER_KINDS
    )


def transfer_seconds(program: Program, spans: tuple[InstructionSpan, ...]) -> float:
    """How long the lane of moves is busy."""
    return sum(
        span.end - span.start
        for instruction, span in zip(program.instructions, spans, strict=True)
        if instruction.kind in TRANSFER_KINDS
    )


class OffloadQueue:
    """What one device has under way between its tiers.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.
        costs: of the plan's instructions.
        device: which of the plan's devices.
    """

    def __init__(
        self, plan: Plan, graph: Graph, machine: Machine, costs: InstructionCosts, device: int
    ) -> None:
        self._costs, self._device = costs, device
        self._traffic = Traffic(plan, graph)
        self._effects = Effects(plan, graph, mesh_coord(device, plan.parallel).stage)
        self._tiers = {tier.name: tier for tier in machine.device.tiers}
        self._shares_cores = machine.device.kind == "cpu"
        self._moves_beside = machine.moves_beside
        self._moves_updates = plan.is_offloaded("optimizer")
        self.moved = 0.0
        """When all that was begun has moved."""
        self._put_home = 0.0
        """When the last gradient has gone home."""
        self._there: dict[int, float] = {}
        """When each layer has come."""
        self._back: dict[tuple[int, int | None], float] = {}
        """When each output has come back, by layer and micro-batch."""
        self._gone = 0.0
        """When the last output has gone home."""
        self.stored = True
        """Whether gradients wait at home for the updates that are put off."""

    def ready(self, instruction: Instruction, now: float) -> float:
        """When an instruction can start that itself moves nothing between tiers."""
        kind, layer, micro = instruction
        if kind == "grad_norm":
            return max(now, self._put_home)
        if layer is None:
            return now
        if kind in _PASSES:
            needed = self._effects.targets(layer)
            now = max(now, self._back.get((layer - 1, micro), 0.0))
            return max(now, *(self._there.get(owner, 0.0) for owner in needed))
        if kind == "send_tied_weights":
            layer = self._effects.holding.lends[layer].owner_layer
        if kind in (
            "free_weights",
            "free_shard",
            "unshard_weights",
            "all_gather_params",
            "send_tied_weights",
        ):
            return max(now, self._there.get(layer, 0.0))
        return now

    def pass_by(self, instruction: Instruction, now: float) -> tuple[InstructionSpan, float]:
        """The span of an instruction, and when the device goes on; a move goes on beside it.

        Raises:
            KeyError: the machine has no such tier, or states no rate for it.
        """
        kind = instruction.kind
        if kind in TRANSFER_KINDS and (kind != "update" or self._moves_updates):
            return self._move(instruction, now)
        start = self.ready(instruction, now)
        end = start + self._costs.total(instruction, self._device)
        return InstructionSpan(start, end), end

    def follow(self, instruction: Instruction, end: float) -> None:
        """Sends home what an exchange that ended has brought."""
        seconds = self._moving(instruction)
        if seconds:
            self.moved = max(self.moved, end) + seconds

    def _move(self, instruction: Instruction, now: float) -> tuple[InstructionSpan, float]:
        kind, layer, micro = instruction
        if kind == "offload_grads":
            now = max(now, self._put_home)
        elif kind == "offload_activation":
            now = max(now, self._gone)
        start = max(now, self.moved)
        end = start + self._moving(instruction)
        if kind == "update" and (self.stored or layer not in self._effects.put_off):
            work = self._costs.total(instruction, self._device)
            end = max(end, start + work)
            now += work if self._shares_cores else 0.0
        self.moved = end
        if kind == "offload_grads":
            self._put_home = end
        elif kind == "offload_activation":
            self._gone = end
        elif kind == "reload_activation" and layer is not None:
            self._back[layer, micro] = end
        elif layer is not None:
            self._there[layer] = end
        return InstructionSpan(start, end), now if self._moves_beside else end

    def _moving(self, instruction: Instruction) -> float:
        return sum(
            self._tiers[tier].moving_seconds(moved.read, moved.written)
            for tier, moved in self._traffic.of(instruction, stored=self.stored).items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepCost:
    """What one step takes that no other follows."""

    seconds: float
    read_bytes: int
    written_bytes: int


def first_step_cost(plan: Plan, graph: Graph, machine: Machine, program: Program) -> FirstStepCost:
    """What the first step and its settling take together.

    A step that repeats does the updates of the one before beside its own computing; here they come
    after it, and nothing covers them.

    Args:
        plan: of one stage.
        graph: that it cuts.
        machine: that it runs on.
        program: lowered from the plan.

    Raises:
        KeyError: the machine states no rate for the plan's precision, or for a tier.
    """
    costs = InstructionCosts(plan, graph, machine)
    if not plan.offloads:
        seconds = sum(costs.of(instruction).total for instruction in program.instructions)
        return FirstStepCost(seconds=seconds, read_bytes=0, written_bytes=0)
    traffic = Traffic(plan, graph)
    first = together(traffic.total(program.instructions, stored=False))
    moved = first.plus(together(traffic.total(program.flush_deferred_updates)))
    return FirstStepCost(
        seconds=first_step_seconds(plan, graph, machine, costs, program),
        read_bytes=moved.read,
        written_bytes=moved.written,
    )
