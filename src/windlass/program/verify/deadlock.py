"""Exchange: whether what the devices send and put together meets, in order and without a circle.

A send leaves its value in a buffer and goes on; a receive waits for it. So do what is lent and
handed over. What puts shards, gradients or the norm together, passes in which the slices of a layer
exchange, and the end of the step, wait until every device of their group is there.
"""

from collections import deque
from collections.abc import Sequence

from windlass.errors import PlanError
from windlass.program.instruction import MATCHING_RECEIVE, Instruction, Program
from windlass.program.communication_groups import PeerMap, communication_group
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

_Queues = dict[tuple[int, int, str], deque[tuple[Instruction, int]]]
_ANSWERING = {answer: kind for kind, answer in MATCHING_RECEIVE.items()}


def verify_communication(programs: Sequence[Program], plan: Plan, graph: Graph) -> None:
    """Plays the exchanges of all devices through.

    Raises:
        PlanError: a message that is not received or comes out of order, or devices that wait for
            each other.
    """
    _Play(programs, plan, graph).through()


class _Play:
    def __init__(self, programs: Sequence[Program], plan: Plan, graph: Graph) -> None:
        self._programs, self._plan = programs, plan
        self._peers = PeerMap(plan, graph)
        self._at = [0] * len(programs)
        self._queues: _Queues = {}

    def through(self) -> None:
        moved = True
        while moved:
            moved = False
            for program in self._programs:
                while self._advance(program):
                    moved = True
        waiting = [p for p in self._programs if self._at[p.device] < len(p.instructions)]
        if waiting:
            raise PlanError("; ".join(self._waits(program) for program in waiting[:4]))
        for (sender, receiver, _), queue in self._queues.items():
            if queue:
                instruction, index = queue[0]
                raise PlanError(
                    f"device {sender}, instruction {index} ({instruction}): device "
                    f"{receiver} never receives it"
                )

    def _advance(self, program: Program) -> bool:
        """Takes one device one instruction further; False if it is at its end or must wait."""
        device, index = program.device, self._at[program.device]
        if index == len(program.instructions):
            return False
        instruction = program.instructions[index]
        if self._peers.is_collective(instruction):
            return self._meet(instruction, device)
        if instruction.kind in MATCHING_RECEIVE:
            peer = self._peer(instruction, device, index)
            lane = self._peers.channel(instruction, device)
            self._queues.setdefault((device, peer, lane), deque()).append((instruction, index))
        elif instruction.kind in _ANSWERING and not self._receive(instruction, device, index):
            return False
        self._at[device] = index + 1
        return True

    def _meet(self, instruction: Instruction, device: int) -> bool:
        group = communication_group(instruction, device, self._plan)
        if not all(self._stands_at(member, instruction) for member in group):
            return False
        for member in group:
            self._at[member] += 1
        return True

    def _stands_at(self, device: int, instruction: Instruction) -> bool:
        """Whether a device is at the same exchange, of the same layer and micro-batch."""
        instructions, index = self._programs[device].instructions, self._at[device]
        return index < len(instructions) and instructions[index] == instruction

    def _peer(self, instruction: Instruction, device: int, index: int) -> int:
        peer = self._peers.peer_of(instruction, device)
        if peer is None:
            raise PlanError(
                f"device {device}, instruction {index} ({instruction.kind} of layer "
                f"{instruction.layer}): the layer lies on no boundary of its stage"
            )
        return peer

    def _receive(self, instruction: Instruction, device: int, index: int) -> bool:
        peer = self._peer(instruction, device, index)
        queue = self._queues.get((peer, device, self._peers.channel(instruction, device)))
        if not queue:
            return False
        sent, sent_index = queue.popleft()
        if (sent.layer, sent.micro_batch) != (instruction.layer, instruction.micro_batch):
            micro = "" if sent.micro_batch is None else f", micro-batch {sent.micro_batch}"
            raise PlanError(
                f"device {device}, instruction {index} ({instruction}): device {peer} sends "
                f"layer {sent.layer}{micro} first, at instruction {sent_index}"
            )
        return True

    def _waits(self, program: Program) -> str:
        index = self._at[program.device]
        instruction = program.instructions[index]
        if instruction.kind in _ANSWERING:
            whom = f"device {self._peers.peer_of(instruction, program.device)}"
        else:
            whom = "the devices of its group"
        layer = "" if instruction.layer is None else f" of layer {instruction.layer}"
        return (
            f"device {program.device}, instruction {index} ({instruction.kind}{layer}) waits for "
            f"{whom} for ever"
        )
