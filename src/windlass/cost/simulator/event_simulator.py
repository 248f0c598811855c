"""Event simulator: plays the programs of a plan and times every instruction.

A device computes one instruction after the other, in program order. Messages leave through a queue
of their own: a send starts when its value exists and the previous message has left, and the device
goes on. A receive waits for its send. A collective, a pass with tensor-parallel collectives and
whatever synchronizes all devices wait for the last participant. Transfers between memory tiers have
a queue of their own too.

All devices of a stage run the same program in the same time, so one stands for all of them: among
themselves they wait only for the exchange itself.

Where collectives over replicas can overlap (`CommunicationCosts.overlapped_seconds`), layers are
gathered one after the other, and reduced one after the other, in a lane each. The device goes on
after the blocking part. A pass waits for the weights that it computes with, and an instruction that
needs a reduced gradient (grad norm, update, or offloading it) for that.

On a bulk-synchronous machine a device that sends or receives does nothing else meanwhile.

With offloading, transfers overlap into the next step: two steps are simulated and the second,
steady one is reported.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.simulator.offload_queue import InstructionSpan, OffloadQueue
from windlass.errors import PlanError
from windlass.program import (
    GLOBAL_COLLECTIVES,
    GRADIENT_PASSES,
    MATCHING_RECEIVE,
    WEIGHT_PASSES,
    Instruction,
    InstructionKind,
    PeerMap,
    Program,
    memory_profile,
    mesh_coord,
    tied_owner_layers,
)
from windlass.schema import DeviceTimeline, Graph, Machine, Plan, Timeline

_RECEIVES = frozenset(MATCHING_RECEIVE.values())
_NEED_REDUCED_GRADS: tuple[InstructionKind, ...] = ("update", "offload_grads")
"""Instructions that need a layer's reduced gradient."""
_NEED_WEIGHTS: tuple[InstructionKind, ...] = (
    *WEIGHT_PASSES, *GRADIENT_PASSES, "send_tied_weights",
)  # fmt: skip
"""Instructions that need the full weights of a layer and of its tied owners."""


@dataclass(slots=True)
class _DeviceProgress:
    """The progress of one device."""

    program: Program
    stage: int
    tied_owners: Sequence[Sequence[int]]
    """The layers that own the tied weights of each layer."""
    alternates_reductions: bool
    """Whether a reduction starts only once the one before has ended."""
    offload_queue: OffloadQueue | None
    """Transfers between tiers; None if the plan offloads nothing."""
    index: int = 0
    time: float = 0.0
    sent_at: float = 0.0
    """Time at which its last message has left."""
    reduced_at: float = 0.0
    """Time at which the last gradient has been reduced over replicas."""
    layer_reduced_at: dict[int | None, float] = field(default_factory=dict)
    """The same time for each layer."""
    gathered_at: float = 0.0
    """Time at which the weights of the last layer have been gathered."""
    layer_gathered_at: dict[int | None, float] = field(default_factory=dict)
    """The same time for each layer."""
    spans: list[InstructionSpan] = field(default_factory=list)

    @property
    def next(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.index] if self.index < len(instructions) else None

    def start_time(self, instruction: Instruction) -> float:
        return (
            self.time
            if self.offload_queue is None
            else self.offload_queue.ready(instruction, self.time)
        )

    def ready_time(self, instruction: Instruction) -> float:
        return max(self.start_time(instruction), self.exchanged_time(instruction))

    def exchanged_time(self, instruction: Instruction) -> float:
        """Time at which the reduced gradients or gathered weights that one needs exist."""
        kind, layer, _ = instruction
        if kind == "grad_norm" or (kind == "reduce_grads" and self.alternates_reductions):
            return self.reduced_at
        if kind in _NEED_REDUCED_GRADS:
            return self.layer_reduced_at.get(layer, 0.0)
        if layer is None or not self.layer_gathered_at or kind not in _NEED_WEIGHTS:
            return 0.0
        needed = (layer, *self.tied_owners[layer])
        return max(self.layer_gathered_at.get(owner, 0.0) for owner in needed)

    def start_exchange(self, instruction: Instruction, begin: float, seconds: float) -> None:
        """Starts a gather or a reduction that takes this many seconds on the links.

        The blocking part of a reduction takes turns with the reductions that are still running.
        """
        layer = instruction.layer
        if instruction.kind == "unshard_weights":
            self.gathered_at = max(begin, self.gathered_at) + seconds
            self.layer_gathered_at[layer] = self.gathered_at
        else:
            self.reduced_at = max(begin, self.reduced_at) + seconds
            self.layer_reduced_at[layer] = self.reduced_at

    def record(self, start: float, end: float, *, then: float) -> None:
        self.spans.append(InstructionSpan(start, end))
        self.time = then
        self.index += 1

    def start_step(self) -> float:
        """Starts the next step and returns its start time."""
        self.index, self.spans = 0, []
        return self.time


def simulate_programs(
    plan: Plan, graph: Graph, machine: Machine, costs: InstructionCosts, programs: Sequence[Program]
) -> tuple[tuple[InstructionSpan, ...], ...]:
    """Start and end of every instruction of each program, in seconds from the start of the step.

    All hosts are equally fast here; `Machine.pace` says how much longer everything takes. Transfers
    between tiers have the span in which they move, which may end after the step.

    Args:
        programs: programs of at least one device of each stage.

    Raises:
        PlanError: the programs deadlock.
        KeyError: the machine has no such tier or link, or states no rate for it.
    """
    stages = [mesh_coord(program.device, plan.parallel).stage for program in programs]
    by_stage = dict(zip(reversed(stages), reversed(programs), strict=True))
    in_order = [by_stage[stage] for stage in sorted(by_stage)]
    simulator = _Simulator(plan, graph, machine, costs, in_order)
    starts = [0.0] * len(simulator.devices)
    for _ in range(2 if plan.offloads else 1):
        starts = [device.start_step() for device in simulator.devices]
        simulator.step()
    spans = [
        tuple(InstructionSpan(span.start - begin, span.end - begin) for span in device.spans)
        for begin, device in zip(starts, simulator.devices, strict=True)
    ]
    return tuple(spans[stage] for stage in stages)


def simulate(plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]) -> Timeline:
    """Simulates one step: start and end of each instruction, and device memory over time.

    All times are at the pace of the slowest host, which the others wait for.

    Args:
        programs: programs lowered from the plan, of at least one device of each stage; each gives a
            timeline.
    """
    costs = InstructionCosts(plan, graph, machine)
    spans = simulate_programs(plan, graph, machine, costs, programs)
    pace = machine.straggler_factor(plan.parallel.devices)
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    lanes = tuple(
        DeviceTimeline(
            device=program.device,
            kinds=tuple(instruction.kind for instruction in program.instructions),
            layers=tuple(instruction.layer for instruction in program.instructions),
            micro_batches=tuple(instruction.micro_batch for instruction in program.instructions),
            starts=tuple(pace * span.start for span in times),
            ends=tuple(pace * span.end for span in times),
            memory_bytes=memory_profile(
                program, plan, graph, runtime_bytes=process_bytes
            ).bytes_by_instruction,
        )
        for program, times in zip(programs, spans, strict=True)
    )
    return Timeline(predicted=True, devices=lanes)


class _Channel(NamedTuple):
    """The channel that messages of one kind take, one after the other."""

    sender: int
    """Stage that sends."""
    receiver: int
    """Stage that receives."""
    name: str
    """Name of the channel, as in `PeerMap.channel`."""


class _Simulator:
    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        machine: Machine,
        costs: InstructionCosts,
        programs: Sequence[Program],
    ) -> None:
        self._parallel, self._costs = plan.parallel, costs
        self._bulk_synchronous = machine.execution_model == "bulk-synchronous"
        self._peers = PeerMap(plan, graph)
        tied_owners = tied_owner_layers(graph)
        self._messages: dict[_Channel, deque[tuple[float, float]]] = defaultdict(deque)
        """Arrival of each sent message, and the seconds it took."""
        self._channels: dict[tuple[int, InstructionKind, int | None], _Channel | None] = {}
        """Channel of messages, by stage, instruction kind and layer."""
        self.devices = [
            _DeviceProgress(
                program,
                mesh_coord(program.device, plan.parallel).stage,
                tied_owners,
                costs.communication.alternates_reductions,
                OffloadQueue(plan, graph, machine, costs, program.device)
                if plan.offloads
                else None,
            )
            for program in programs
        ]

    def step(self) -> None:
        """Simulates one step of all devices."""
        advanced = True
        while advanced:
            advanced = False
            for device in self.devices:
                while (instruction := device.next) is not None and self._advance(
                    device, instruction
                ):
                    advanced = True
        for device in self.devices:
            if device.next is not None:
                raise PlanError(
                    f"device {device.program.device} waits forever at instruction {device.index} "
                    f"(`{device.next.kind}`)"
                )

    def _advance(self, device: _DeviceProgress, instruction: Instruction) -> bool:
        """Runs the device's next instruction if it can start; returns False if it has to wait."""
        if self._peers.is_collective(instruction):
            return self._run_together(device, instruction)
        if instruction.kind in MATCHING_RECEIVE:
            self._send(device, instruction)
        elif instruction.kind in _RECEIVES:
            return self._receive(device, instruction)
        elif device.offload_queue is not None:
            ready = max(device.time, device.exchanged_time(instruction))
            span, then = device.offload_queue.schedule(instruction, ready)
            device.record(*span, then=then)
        else:
            begin = max(device.time, device.exchanged_time(instruction))
            work = self._costs.seconds(instruction, device.program.device)
            end = begin + work + self._costs.communication_seconds(instruction)
            device.record(device.time, end, then=end)
        return True

    def _send(self, device: _DeviceProgress, instruction: Instruction) -> None:
        ready, free = device.ready_time(instruction), device.start_time(instruction)
        start = max(ready, device.sent_at)
        seconds = self._costs.communication_seconds(instruction)
        device.sent_at = start + seconds
        channel = self._channel(device, instruction)
        if channel is not None:
            self._messages[channel].append((device.sent_at, seconds))
        # A device that waits for the weights it sends does so in the send.
        begin = free if free < ready else start
        device.record(
            begin, device.sent_at, then=device.sent_at if self._bulk_synchronous else ready
        )

    def _receive(self, device: _DeviceProgress, instruction: Instruction) -> bool:
        channel = self._channel(device, instruction)
        if channel is None or not self._messages[channel]:
            return False
        arrival, seconds = self._messages[channel].popleft()
        ready = device.time + (seconds if self._bulk_synchronous else 0.0)
        end = max(ready, arrival) + self._costs.seconds(instruction, device.program.device)
        device.record(device.time, end, then=end)
        return True

    def _channel(self, device: _DeviceProgress, instruction: Instruction) -> _Channel | None:
        """The channel of a message; None if its layer lies on no stage boundary."""
        key = device.stage, instruction.kind, instruction.layer
        if key not in self._channels:
            rank = device.program.device
            peer = self._peers.peer_of(instruction, rank)
            if peer is None:
                self._channels[key] = None
            else:
                ends = device.stage, mesh_coord(peer, self._parallel).stage
                sends = instruction.kind in MATCHING_RECEIVE
                name = self._peers.channel(instruction, rank)
                self._channels[key] = _Channel(*(ends if sends else ends[::-1]), name)
        return self._channels[key]

    def _run_together(self, device: _DeviceProgress, instruction: Instruction) -> bool:
        """Runs an instruction of a whole group once its last member has arrived."""
        group = self.devices if instruction.kind in GLOBAL_COLLECTIVES else [device]
        if any(other.next is None or other.next != instruction for other in group):
            return False
        begin = max(other.ready_time(instruction) for other in group)
        exchange = self._costs.communication_seconds(instruction)
        overlapped = self._costs.overlapped_seconds(instruction)
        for other in group:
            work = self._costs.seconds(instruction, other.program.device)
            end = begin + exchange - overlapped + work
            if overlapped:
                other.start_exchange(instruction, begin, exchange)
            if other.offload_queue is not None:
                other.offload_queue.schedule_result(instruction, end)
            other.record(other.start_time(instruction), end, then=end)
        return True
