"""Clock: when each instruction of each program starts and ends.

A device computes in one lane, in the order of its program. Messages leave on a lane of their own:
a send starts when its value is there and the one before it has left, and the device goes on. A
receive waits for its send; what replicas put together, a pass in which slices exchange and whatever
brings all devices together wait for the last. What moves between tiers has a lane of its own too.

All devices of a stage run the same program and take the same time, so that one stands for all of
them: among themselves nobody waits, but for the exchange itself.

Gradients are summed over replicas beside computing where they can be (`Links.sums_beside`), one
layer after the other: the device goes on once what it waits for of a reduction is over, and whoever
needs a sum (norm, update, or what takes it home) waits for it.

On a bulk-synchronous machine a device that sends or receives does nothing else meanwhile.

What a step leaves under way the next one finds there: of a plan that moves something between tiers
the second of two steps is told, the one that repeats.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.simulator.offload_queue import InstructionSpan, OffloadQueue
from windlass.errors import PlanError
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import (
    GLOBAL_COLLECTIVES,
    MATCHING_RECEIVE,
    Instruction,
    InstructionKind,
    Program,
)
from windlass.program.process_groups import PeerMap
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan

_ANSWERING = frozenset(MATCHING_RECEIVE.values())
_TAKING: tuple[InstructionKind, ...] = ("update", "offload_grads")
"""Those that take the sum of a layer's gradient."""


@dataclass(slots=True)
class _Lane:
    """How far one device is."""

    program: Program
    stage: int
    far: OffloadQueue | None
    """None where nothing moves between tiers."""
    at: int = 0
    now: float = 0.0
    sending: float = 0.0
    """When its last message has left."""
    summing: float = 0.0
    """When the last gradient has been summed over replicas."""
    summed: dict[int | None, float] = field(default_factory=dict)
    """The same by layer."""
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
        """When the sums that an instruction needs are there."""
        if instruction.kind == "grad_norm":
            return self.summing
        return self.summed.get(instruction.layer, 0.0) if instruction.kind in _TAKING else 0.0

    def sum_up(self, layer: int | None, seconds: float) -> None:
        """Begins to sum a gradient, in so many seconds on its links; what waits for it may not.

        Those of the sum that the device waits for take turns with sums that are under way.
        """
        self.summing = self.summed[layer] = max(self.now, self.summing) + seconds

    def pass_by(self, start: float, end: float, *, then: float) -> None:
        self.spans.append(InstructionSpan(start, end))
        self.now = then
        self.at += 1

    def begin(self) -> float:
        """Starts the next step; gives when that is."""
        self.at, self.spans = 0, []
        return self.now


def simulate_programs(
    plan: Plan, graph: Graph, machine: Machine, costs: InstructionCosts, programs: Sequence[Program]
) -> tuple[tuple[InstructionSpan, ...], ...]:
    """The span of each instruction, for each program, from the begin of the step.

    All hosts are equally fast here; `Machine.pace` tells how much longer all of it takes.

    Moves between tiers have the span in which they move, which may end after the step.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.
        costs: of the plan's instructions.
        programs: of at least one device of each stage.

    Raises:
        PlanError: the devices wait for each other for ever.
        KeyError: the machine has no such tier or link, or states no rate for it.
    """
    stages = [mesh_coord(program.device, plan.parallel).stage for program in programs]
    standing = dict(zip(reversed(stages), reversed(programs), strict=True))
    clock = _Clock(plan, graph, machine, costs, [standing[at] for at in sorted(standing)])
    begins = [0.0] * len(clock.lanes)
    for _ in range(2 if plan.offloads else 1):
        begins = [lane.begin() for lane in clock.lanes]
        clock.step()
    spans = [
        tuple(InstructionSpan(span.start - begin, span.end - begin) for span in lane.spans)
        for begin, lane in zip(begins, clock.lanes, strict=True)
    ]
    return tuple(spans[stage] for stage in stages)


class _Wire(NamedTuple):
    """What messages of one kind go over, one behind the other."""

    sender: int
    """Its stage."""
    receiver: int
    name: str
    """As `Peers.lane`."""


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
        self._in_turn = machine.rule == "bulk-synchronous"
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
        """One step of all devices."""
        moved = True
        while moved:
            moved = False
            for lane in self.lanes:
                while (instruction := lane.next) is not None and self._advance(lane, instruction):
                    moved = True
        for lane in self.lanes:
            if lane.next is not None:
                raise PlanError(
                    f"device {lane.program.device} waits for ever at instruction {lane.at} "
                    f"(`{lane.next.kind}`)"
                )

    def _advance(self, lane: _Lane, instruction: Instruction) -> bool:
        """Passes the lane's next instruction if it can start; False if it has to wait."""
        if self._peers.is_collective(instruction):
            return self._meet(lane, instruction)
        if instruction.kind in MATCHING_RECEIVE:
            self._send(lane, instruction)
        elif instruction.kind in _ANSWERING:
            return self._receive(lane, instruction)
        elif lane.far is not None:
            span, then = lane.far.pass_by(instruction, max(lane.now, lane.due(instruction)))
            lane.pass_by(*span, then=then)
        else:
            begin = max(lane.now, lane.due(instruction))
            end = begin + self._costs.total(instruction, lane.program.device)
            lane.pass_by(lane.now, end, then=end)
        return True

    def _send(self, lane: _Lane, instruction: Instruction) -> None:
        now = lane.ready(instruction)
        start = max(now, lane.sending)
        seconds = self._costs.exchange_seconds(instruction)
        lane.sending = start + seconds
        wire = self._wire(lane, instruction)
        if wire is not None:
            self._sent[wire].append((lane.sending, seconds))
        lane.pass_by(start, lane.sending, then=lane.sending if self._in_turn else now)

    def _receive(self, lane: _Lane, instruction: Instruction) -> bool:
        wire = self._wire(lane, instruction)
        if wire is None or not self._sent[wire]:
            return False
        there, seconds = self._sent[wire].popleft()
        here = lane.now + (seconds if self._in_turn else 0.0)
        end = max(here, there) + self._costs.total(instruction, lane.program.device)
        lane.pass_by(lane.now, end, then=end)
        return True

    def _wire(self, lane: _Lane, instruction: Instruction) -> _Wire | None:
        """What a message of a stage goes over; None if its layer lies on no boundary."""
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
        """Passes an instruction for all devices of its group once the last of them is there."""
        group = self.lanes if instruction.kind in GLOBAL_COLLECTIVES else [lane]
        if any(other.next is None or other.next != instruction for other in group):
            return False
        begin = max(other.ready(instruction) for other in group)
        exchange = self._costs.exchange_seconds(instruction)
        beside = self._costs.beside_seconds(instruction)
        for other in group:
            worked = self._costs.total(instruction, other.program.device)
            end = begin + exchange - beside + worked
            if beside:
                other.sum_up(instruction.layer, exchange)
            if other.far is not None:
                other.far.follow(instruction, end)
            other.pass_by(other.starts(instruction), end, then=end)
        return True
