"""Transfers between memory tiers of one device with offloading.

The device computes instructions in order. Transfers go through a queue of their own, in the order
in which the program starts them, and an instruction that needs a layer waits for its transfer.

On a CPU the update of an offloaded layer takes the cores from other work, so it counts in both. On
a bulk-synchronous machine without compute units reserved for transfers, the device waits for each
one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.cost.instruction_time import InstructionCosts
from windlass.program import (
    GRADIENT_PASSES,
    TRANSFER_KINDS,
    WEIGHT_PASSES,
    Instruction,
    InstructionEffects,
    InstructionKind,
    Program,
    TierTraffic,
    mesh_coord,
    sum_tiers,
)
from windlass.schema import Graph, Machine, Plan

_USE_WEIGHTS: tuple[InstructionKind, ...] = (
    "free_weights", "free_shard", "unshard_weights", "all_gather_params", "send_tied_weights",
)  # fmt: skip
_PASSES: tuple[InstructionKind, ...] = (*WEIGHT_PASSES, *GRADIENT_PASSES)


class InstructionSpan(NamedTuple):
    """Start and end of an instruction, in seconds of the step."""

    start: float
    end: float


def step_seconds(program: Program, spans: tuple[InstructionSpan, ...]) -> float:
    """End of the last instruction that is not a transfer."""
    return max(
        span.end
        for instruction, span in zip(program.instructions, spans, strict=True)
        if instruction.kind not in TRANSFER_KINDS
    )


def transfer_seconds(program: Program, spans: tuple[InstructionSpan, ...]) -> float:
    """Seconds in which the transfer queue is busy."""
    return sum(
        span.end - span.start
        for instruction, span in zip(program.instructions, spans, strict=True)
        if instruction.kind in TRANSFER_KINDS
    )


class OffloadQueue:
    """The transfers between tiers that one device has started."""

    def __init__(
        self, plan: Plan, graph: Graph, machine: Machine, costs: InstructionCosts, device: int
    ) -> None:
        self._costs, self._device = costs, device
        self._traffic = TierTraffic(plan, graph)
        self._effects = InstructionEffects(plan, graph, mesh_coord(device, plan.parallel).stage)
        self._tiers = {tier.name: tier for tier in machine.device.tiers}
        self._shares_cores = machine.device.kind == "cpu"
        self._overlaps = machine.overlaps_transfers
        self._updates_transfer = plan.is_offloaded("optimizer")
        gathers = plan.sharding.optimizer > plan.sharding.parameters
        self._updates_device_grads = (
            self._shares_cores and not gathers and not plan.is_offloaded("gradients")
        )
        self._moved: dict[tuple[InstructionKind, int | None, bool], float] = {}
        """Seconds of transfers that are known, by kind, layer and whether gradients wait."""
        self.idle_at = 0.0
        """Time at which all transfers that were started have ended."""
        self._grads_offloaded_at = 0.0
        """Time at which the last gradient has been offloaded."""
        self._device_grads_used_at = 0.0
        """Time at which the last update has used gradients in device memory, where only those of
        one layer wait."""
        self._layer_ready_at: dict[int, float] = {}
        """Time at which each layer's weights have arrived."""
        self._output_ready_at: dict[tuple[int, int | None], float] = {}
        """Time at which each output has been reloaded, by layer and micro-batch."""
        self._output_offloaded_at = 0.0
        """Time at which the last output has been offloaded."""
        self.has_offloaded_grads = True
        """Whether the previous step's gradients are offloaded and wait for deferred updates."""

    def ready(self, instruction: Instruction, now: float) -> float:
        """Time at which an instruction can start that moves nothing between tiers itself."""
        kind, layer, micro = instruction
        if kind == "grad_norm":
            return max(now, self._grads_offloaded_at)
        if layer is None:
            return now
        if kind in _PASSES:
            needed = self._effects.gradient_targets(layer)
            now = max(now, self._output_ready_at.get((layer - 1, micro), 0.0))
            return max(now, *(self._layer_ready_at.get(owner, 0.0) for owner in needed))
        if kind == "send_tied_weights":
            layer = self._effects.tensors.tied_as_owner[layer].owner_layer
        if kind in _USE_WEIGHTS:
            return max(now, self._layer_ready_at.get(layer, 0.0))
        return now

    def schedule(self, instruction: Instruction, now: float) -> tuple[InstructionSpan, float]:
        """The span of an instruction, and when the device goes on: a transfer runs beside it.

        Args:
            instruction: the next one in the program.
            now: time at which the device reaches it.

        Raises:
            KeyError: the machine has no such tier, or states no rate for it.
        """
        kind = instruction.kind
        if kind in TRANSFER_KINDS and (kind != "update" or self._updates_transfer):
            return self._transfer(instruction, now)
        start = self.ready(instruction, now)
        work = self._costs.seconds(instruction, self._device)
        end = start + work + self._costs.communication_seconds(instruction)
        return InstructionSpan(start, end), end

    def schedule_result(self, instruction: Instruction, end: float) -> None:
        """Queues the transfer of a collective's result, which exists at `end`."""
        seconds = self._transfer_seconds(instruction)
        if seconds:
            self.idle_at = max(self.idle_at, end) + seconds

    def _transfer(self, instruction: Instruction, now: float) -> tuple[InstructionSpan, float]:
        kind, layer, micro = instruction
        if kind == "offload_grads":
            now = max(now, self._grads_offloaded_at)
        elif kind == "update" and self._updates_device_grads:
            now = max(now, self._device_grads_used_at)
        elif kind == "offload_activation":
            now = max(now, self._output_offloaded_at)
        start = max(now, self.idle_at)
        end = start + self._transfer_seconds(instruction)
        if kind == "update" and (
            self.has_offloaded_grads or layer not in self._effects.deferred_updates
        ):
            work = self._costs.seconds(instruction, self._device)
            end = max(end, start + work)
            now += work if self._shares_cores else 0.0
            self._device_grads_used_at = end
        self.idle_at = end
        if kind == "offload_grads":
            self._grads_offloaded_at = end
        elif kind == "offload_activation":
            self._output_offloaded_at = end
        elif kind == "reload_activation" and layer is not None:
            self._output_ready_at[layer, micro] = end
        elif layer is not None:
            self._layer_ready_at[layer] = end
        return InstructionSpan(start, end), now if self._overlaps else end

    def _transfer_seconds(self, instruction: Instruction) -> float:
        key = instruction.kind, instruction.layer, self.has_offloaded_grads
        if key not in self._moved:
            self._moved[key] = sum(
                self._tiers[tier].transfer_seconds(moved.read, moved.written)
                for tier, moved in self._traffic.instruction_traffic(
                    instruction, stored=self.has_offloaded_grads
                ).items()
            )
        return self._moved[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepCost:
    """Cost of a single step that no other step follows."""

    seconds: float
    read_bytes: int
    written_bytes: int


def first_step_cost(plan: Plan, graph: Graph, machine: Machine, program: Program) -> FirstStepCost:
    """Cost of a first step and of flushing its deferred updates.

    In steady state the updates of the step before overlap with a step's computation; here they come
    after it, and nothing hides them.

    Args:
        plan: a plan of one stage.
        program: the program lowered from the plan.

    Raises:
        KeyError: the machine states no rate for the plan's precision, or for a tier.
    """
    costs = InstructionCosts(plan, graph, machine)
    if not plan.offloads:
        seconds = sum(costs.terms(instruction).total for instruction in program.instructions)
        return FirstStepCost(seconds=seconds, read_bytes=0, written_bytes=0)
    traffic = TierTraffic(plan, graph)
    first = sum_tiers(traffic.total(program.instructions, stored=False))
    moved = first.plus(sum_tiers(traffic.total(program.flush_deferred_updates)))
    queue, now = OffloadQueue(plan, graph, machine, costs, program.device), 0.0
    queue.has_offloaded_grads = False
    for instruction in program.instructions:
        _, now = queue.schedule(instruction, now)
    queue.has_offloaded_grads = True
    for instruction in program.flush_deferred_updates:
        _, now = queue.schedule(instruction, now)
    return FirstStepCost(
        seconds=max(now, queue.idle_at),
        read_bytes=moved.read,
        written_bytes=moved.written,
    )
