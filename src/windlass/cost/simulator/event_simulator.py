"""Event simulator: plays the programs of a plan and times every instruction.

A device computes one instruction after the other, in program order. Messages leave through a queue
of their own: a send starts when its value exists and the previous message has left, and the device
goes on. A receive waits for its send. A collective, a pass with tensor-parallel collectives and
whatever synchronizes all devices wait for the last participant. Transfers between memory tiers have
a queue of their own too.

All devices of a stage run the same program in the same time, so one stands for all of them: among
themselves they wait only for the exchange itself.

Where gradient reduction can overlap (`CommunicationCosts.overlaps_reduction`), layers are reduced
one after the other: the device goes on after the blocking part, and an instruction that needs a
reduced gradient (grad norm, update, or offloading it) waits for it.

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
from windlass.program.communication_groups import PeerMap
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import (
    GLOBAL_COLLECTIVES,
    MATCHING_RECEIVE,
    Instruction,
    InstructionKind,
    Program,
)
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan

_ANSWERING = frozenset(MATCHING_RECEIVE.values())
_TAKING: tuple[InstructionKind, ...] = ("update", "offload_grads")
"""Instructions that need a layer's reduced gradient."""


@dataclass(slots=True)
class _Lane:
    """The progress of one device."""

    program: Program
    stage: int
    far: OffloadQueue | None
    """Transfers between tiers; None if the plan offloads nothing."""
    at: int = 0
    now: float = 0.0
    sending: float = 0.0
    """Time at which its last message has left."""
    summing: float = 0.0
    """Time at which the last gradient has been reduced over replicas."""
    summed: dict[int | None, float] = field(default_factory=dict)
    """The same time for each layer."""
    spans: list[InstructionSpan] = field(default_factory=list)

    @property
    def next(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.at] if self.at < len(instructions) else None

    def starts(self, instruction: Instruction) -> float:
        return self.now if self.far is None else self.far.ready(instruction, self.now)

    def ready(self, instruction: Instruction) -> float:
        return max(self.starts(instruction), self.due(instruction))

    def due(self, instruction: Instruction) -> float:
        """Time at which the reduced gradients that an instruction needs exist."""
        if instruction.kind == "grad_norm":
            return self.summing
        return self.summed.get(instruction.layer, 0.0) if instruction.kind in _TAKING else 0.0

    def sum_up(self, layer: int | None, seconds: float) -> None:
        """Starts to reduce a layer's gradient in this many seconds on the links.

        The blocking part of a reduction takes turns with the reductions that are still running.
        """
        self.summing = self.summed[layer] = max(self.now, self.summing) + seconds

    def pass_by(self, start: float, end: float, *, then: float) -> None:
        self.spans.append(InstructionSpan(start, end))
        self.now = then
        self.at += 1

    def begin(self) -> float:
        """Starts the next step and returns its start time."""
        self.at, self.spans = 0, []
        return self.now


def simulate_programs(
    plan: Plan, graph: Graph, machine: Machine, costs: InstructionCosts, programs: Sequence[Program]
) -> tuple[tuple[InstructionSpan, ...], ...]:
    """Start and end of every instruction of each program, in seconds from the start of the step.

    All hosts are equally fast here; `Machine.pace` says how much longer everything takes. Transfers
    between tiers have the span in which they move, which may end after the step.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
        costs: costs of the plan's instructions.
        programs: programs of at least one device of each stage.

    Raises:
        PlanError: the programs deadlock.
        KeyError: the machine has no such tier or link, or states no rate for it.
    """
    stages = [mesh_coord(program.device, plan.parallel).stage for program in programs]
    by_stage = dict(zip(reversed(stages), reversed(programs), strict=True))
    clock = _Clock(plan, graph, machine, costs, [by_stage[at] for at in sorted(by_stage)])
    starts = [0.0] * len(clock.lanes)
    for _ in range(2 if plan.offloads else 1):
        starts = [lane.begin() for lane in clock.lanes]
        clock.step()
    spans = [
        tuple(InstructionSpan(span.start - begin, span.end - begin) for span in lane.spans)
        for begin, lane in zip(starts, clock.lanes, strict=True)
    ]
    return tuple(spans[stage] for stage in stages)


class _Wire(NamedTuple):
    """The channel that messages of one kind take, one after the other."""

    sender: int
    """Stage that sends."""
    receiver: int
    """Stage that receives."""
    name: str
    """Name of the channel, as in `Peers.lane`."""


class _Clock:
    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        machine: Machine,
        costs: InstructionCosts,
        programs: Sequence[Program],
    ) -> None:
        self._cut, self._costs = plan.parallel, costs
        self._in_turn = machine.execution_model == "bulk-synchronous"
        self._peers = PeerMap(plan, graph)
        self._sent: dict[_Wire, deque[tuple[float, float]]] = defaultdict(deque)
        """When what went out is there, and how long it was under way."""
        self._wires: dict[tuple[int, InstructionKind, int | None], _Wire | None] = {}
        """What messages go over, by stage, instruction and layer."""
        self.lanes = [
            _Lane(
                program,
                mesh_coord(program.device, plan.parallel).stage,
                OffloadQueue(plan, graph, machine, costs, program.device)
                if plan.offloads
                else None,
            )
            for program in programs
        ]

    def step(self) -> None:
        """Simulates one step of all devices."""
        moved = True
        while moved:
            moved = False
            for lane in self.lanes:
                while (instruction := lane.next) is not None and self._advance(lane, instruction):
                    moved = True
        for lane in self.lanes:
            if lane.next is not None:
                raise PlanError(
                    f"device {lane.program.device} waits forever at instruction {lane.at} "
                    f"(`{lane.next.kind}`)"
                )

    def _advance(self, lane: _Lane, instruction: Instruction) -> bool:
        """Runs the device's next instruction if it can start; returns False if it has to wait."""
        if self._peers.is_collective(instruction):
            return self._meet(lane, instruction)
        if instruction.kind in MATCHING_RECEIVE:
            self._send(lane, instruction)
        elif instruction.kind in _ANSWERING:
            return self._receive(lane, instruction)
        elif lane.far is not None:
            span, then = lane.far.schedule(instruction, max(lane.now, lane.due(instruction)))
            lane.pass_by(*span, then=then)
        else:
            begin = max(lane.now, lane.due(instruction))
            end = begin + self._costs.seconds(instruction, lane.program.device)
            lane.pass_by(lane.now, end, then=end)
        return True

    def _send(self, lane: _Lane, instruction: Instruction) -> None:
        now = lane.ready(instruction)
        start = max(now, lane.sending)
        seconds = self._costs.communication_seconds(instruction)
        lane.sending = start + seconds
        wire = self._wire(lane, instruction)
        if wire is not None:
            self._sent[wire].append((lane.sending, seconds))
        lane.pass_by(start, lane.sending, then=lane.sending if self._in_turn else now)

    def _receive(self, lane: _Lane, instruction: Instruction) -> bool:
        wire = self._wire(lane, instruction)
        if wire is None or not self._sent[wire]:
            return False
        arrival, seconds = self._sent[wire].popleft()
        ready = lane.now + (seconds if self._in_turn else 0.0)
        end = max(ready, arrival) + self._costs.seconds(instruction, lane.program.device)
        lane.pass_by(lane.now, end, then=end)
        return True

    def _wire(self, lane: _Lane, instruction: Instruction) -> _Wire | None:
        """The channel of a message; None if its layer lies on no stage boundary."""
        key = lane.stage, instruction.kind, instruction.layer
        if key not in self._wires:
            device = lane.program.device
            peer = self._peers.peer_of(instruction, device)
            if peer is None:
                self._wires[key] = None
            else:
                ends = lane.stage, mesh_coord(peer, self._cut).stage
                sends = instruction.kind in MATCHING_RECEIVE
                name = self._peers.channel(instruction, device)
                self._wires[key] = _Wire(*(ends if sends else ends[::-1]), name)
        return self._wires[key]

    def _meet(self, lane: _Lane, instruction: Instruction) -> bool:
        """Runs an instruction of a whole group once its last member has arrived."""
        group = self.lanes if instruction.kind in GLOBAL_COLLECTIVES else [lane]
        if any(other.next is None or other.next != instruction for other in group):
            return False
        begin = max(other.ready(instruction) for other in group)
        exchange = self._costs.communication_seconds(instruction)
        overlapped = self._costs.overlapped_seconds(instruction)
        for other in group:
            work = self._costs.seconds(instruction, other.program.device)
            end = begin + exchange - overlapped + work
            if overlapped:
                other.sum_up(instruction.layer, exchange)
            if other.far is not None:
                other.far.schedule_result(instruction, end)
            other.pass_by(other.starts(instruction), end, then=end)
        return True
