"""Clock: when each instruction of each program starts and ends.

A device computes in one lane, in the order of its program. Messages leave on a lane of their own:
a send starts when its value is there and the one before it has left, and the device goes on. A
receive waits for its send; a reduction, and whatever brings all devices together, for the last.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from windlass.cost.step import StepCost
from windlass.errors import PlanError
from windlass.program.exchange import group_of, peer_of
from windlass.program.instruction import Instruction, Program
from windlass.spec.plan import Plan

_TOGETHER = ("reduce", "norm", "sync")


class Span(NamedTuple):
    """Seconds of the step at which an instruction starts and ends."""

    start: float
    end: float


@dataclass(slots=True)
class _Lane:
    """How far one device is."""

    program: Program
    at: int = 0
    now: float = 0.0
    sending: float = 0.0
    """When its last message has left."""
    spans: list[Span] = field(default_factory=list)

    @property
    def next(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.at] if self.at < len(instructions) else None

    def pass_by(self, start: float, end: float, *, then: float) -> None:
        self.spans.append(Span(start, end))
        self.now = then
        self.at += 1


def run_clock(
    plan: Plan, costs: StepCost, programs: Sequence[Program]
) -> tuple[tuple[Span, ...], ...]:
    """The span of each instruction, for each program.

    Raises:
        PlanError: the devices wait for each other for ever.
    """
    lanes = [_Lane(program) for program in programs]
    sent: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for lane in lanes:
            while lane.next is not None and _advance(lane, lanes, sent, plan, costs):
                moved = True
    for lane in lanes:
        if lane.next is not None:
            raise PlanError(
                f"device {lane.program.device} waits for ever at instruction {lane.at} "
                f"(`{lane.next.kind}`)"
            )
    return tuple(tuple(lane.spans) for lane in lanes)


def _advance(
    lane: _Lane,
    lanes: Sequence[_Lane],
    sent: dict[tuple[int, int], deque[float]],
    plan: Plan,
    costs: StepCost,
) -> bool:
    """Passes the lane's next instruction if it can start; False if it has to wait."""
    instruction = lane.next
    if instruction is None:
        return False
    device = lane.program.device
    if instruction.kind in _TOGETHER and len(lanes) > 1:
        return _meet(lane, lanes, instruction, plan, costs)
    if instruction.kind == "send":
        start = max(lane.now, lane.sending)
        lane.sending = start + costs.exchange_seconds(instruction)
        peer = peer_of(instruction, device, plan)
        if peer is not None:
            sent[device, peer].append(lane.sending)
        lane.pass_by(start, lane.sending, then=lane.now)
        return True
    if instruction.kind == "receive":
        peer = peer_of(instruction, device, plan)
        queue = sent[device if peer is None else peer, device]
        if not queue:
            return False
        arrived = max(lane.now, queue.popleft())
        lane.pass_by(lane.now, arrived, then=arrived)
        return True
    end = lane.now + costs.of(instruction, device).total
    lane.pass_by(lane.now, end, then=end)
    return True


def _meet(
    lane: _Lane, lanes: Sequence[_Lane], instruction: Instruction, plan: Plan, costs: StepCost
) -> bool:
    """Passes an instruction for all devices of its group once the last of them is there."""
    group = [lanes[at] for at in group_of(instruction, lane.program.device, plan)]
    if any(other.next is None or other.next[:2] != instruction[:2] for other in group):
        return False
    begin = max(other.now for other in group)
    exchange = costs.exchange_seconds(instruction)
    for other in group:
        end = begin + exchange + costs.of(instruction, other.program.device).total
        other.pass_by(other.now, end, then=end)
    return True
