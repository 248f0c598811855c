"""Deadlock check: every message is received in order, and no devices wait for each other.

A send leaves its tensor in a buffer and continues; a receive waits for it. So do the messages of
tied weights. A collective waits until every device of its group has reached it: instructions that
gather shards or reduce gradients and norm, passes with tensor-parallel collectives, and the end of
the step.
"""

from collections import deque
from collections.abc import Sequence

from windlass.errors import PlanError
from windlass.program.communication_groups import PeerMap, communication_group
from windlass.program.instruction import MATCHING_RECEIVE, Instruction, Program
from windlass.schema import Graph, Plan

_Queues = dict[tuple[int, int, str], deque[tuple[Instruction, int]]]
_MATCHING_SEND = {receive: send for send, receive in MATCHING_RECEIVE.items()}


def verify_communication(programs: Sequence[Program], plan: Plan, graph: Graph) -> None:
    """Simulates the communication of all devices.

    Raises:
        PlanError: a message is not received or arrives out of order, or devices wait for each
            other.
    """
    _CommunicationSimulator(programs, plan, graph).run()


class _CommunicationSimulator:
    def __init__(self, programs: Sequence[Program], plan: Plan, graph: Graph) -> None:
        self._programs, self._plan = programs, plan
        self._peers = PeerMap(plan, graph)
        self._position = [0] * len(programs)
        """Index of the next instruction of each device."""
        self._queues: _Queues = {}
        """Messages sent and not yet received, by sender, receiver and channel."""

    def run(self) -> None:
        has_progress = True
        while has_progress:
            has_progress = False
            for program in self._programs:
                while self._advance(program):
                    has_progress = True
        waiting = [p for p in self._programs if self._position[p.device] < len(p.instructions)]
        if waiting:
            raise PlanError("; ".join(self._describe_wait(program) for program in waiting[:4]))
        for (sender, receiver, _), queue in self._queues.items():
            if queue:
                instruction, index = queue[0]
                raise PlanError(
                    f"device {sender}, instruction {index} ({instruction}): device "
                    f"{receiver} never receives it"
                )

    def _advance(self, program: Program) -> bool:
        """Runs one device's next instruction; False if it has none or must wait."""
        device, index = program.device, self._position[program.device]
        if index == len(program.instructions):
            return False
        instruction = program.instructions[index]
        if self._peers.is_collective(instruction):
            return self._run_collective(instruction, device)
        if instruction.kind in MATCHING_RECEIVE:
            peer = self._peer(instruction, device, index)
            channel = self._peers.channel(instruction, device)
            self._queues.setdefault((device, peer, channel), deque()).append((instruction, index))
        elif instruction.kind in _MATCHING_SEND and not self._receive(instruction, device, index):
            return False
        self._position[device] = index + 1
        return True

    def _run_collective(self, instruction: Instruction, device: int) -> bool:
        group = communication_group(instruction, device, self._plan)
        if not all(self._is_at(member, instruction) for member in group):
            return False
        for member in group:
            self._position[member] += 1
        return True

    def _is_at(self, device: int, instruction: Instruction) -> bool:
        """Whether a device's next instruction is this one, for the same layer and micro-batch."""
        instructions, index = self._programs[device].instructions, self._position[device]
        return index < len(instructions) and instructions[index] == instruction

    def _peer(self, instruction: Instruction, device: int, index: int) -> int:
        peer = self._peers.peer_of(instruction, device)
        if peer is None:
            raise PlanError(
                f"device {device}, instruction {index} ({instruction.kind} of layer "
                f"{instruction.layer}): the layer is at no boundary of its stage"
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

    def _describe_wait(self, program: Program) -> str:
        index = self._position[program.device]
        instruction = program.instructions[index]
        if instruction.kind in _MATCHING_SEND:
            awaited = f"device {self._peers.peer_of(instruction, program.device)}"
        else:
            awaited = "the devices of its group"
        layer = "" if instruction.layer is None else f" of layer {instruction.layer}"
        return (
            f"device {program.device}, instruction {index} ({instruction.kind}{layer}) waits for "
            f"{awaited} forever"
        )
