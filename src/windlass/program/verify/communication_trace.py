"""Communication traces: what the devices of a plan send, receive and do together, in order.

All ranks of a stage run one program on the same place of their mesh, and what a run does does not
depend on who is faster. So where a stage's programs are equal, its ranks proceed alike, and the
first of them stands for all: collectives within the stage wait for nobody.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from windlass.errors import PlanError
from windlass.program.communication_groups import Communicator, PeerMap, communication_group
from windlass.program.instruction import (
    GLOBAL_COLLECTIVES,
    MATCHING_RECEIVE,
    Instruction,
    InstructionKind,
    Program,
)
from windlass.schema import Graph, Plan

_RECEIVES = frozenset(MATCHING_RECEIVE.values())


class CommunicationEvent(NamedTuple):
    """One instruction that communicates: a message, or a collective."""

    instruction_index: int
    """Its index in the program."""
    instruction: Instruction
    communicator: Communicator | None
    """The communicator of a message; None for a collective."""
    group: tuple[int, ...]
    """The traced devices that take part in a collective; empty for a message."""

    @property
    def sends(self) -> bool:
        """Whether it is a message that its device sends."""
        return self.instruction.kind in MATCHING_RECEIVE

    def is_same_message(self, other: "CommunicationEvent") -> bool:
        """Whether two events are both ends of one message."""
        return self.instruction[1:] == other.instruction[1:]


CommunicationTraces = Mapping[int, Sequence[CommunicationEvent]]
"""The events of each traced device, by its rank."""


def communication_traces(
    programs: Sequence[Program], plan: Plan, graph: Graph
) -> CommunicationTraces:
    """The events of one device of each stage; of all devices if those of a stage differ.

    Raises:
        PlanError: a message is of a layer at no boundary of its stage.
    """
    width = plan.parallel.devices // plan.parallel.pipeline
    firsts = programs[::width]
    is_uniform = all(
        _is_equal(program, firsts[device // width]) for device, program in enumerate(programs)
    )
    traced = tuple(program.device for program in (firsts if is_uniform else programs))
    tracer = _Tracer(plan, graph, traced, is_uniform=is_uniform)
    return {device: tracer.trace(programs[device]) for device in traced}


def _is_equal(program: Program, other: Program) -> bool:
    """Whether two programs have the same instructions; lowering gives them one object."""
    mine, others = program.instructions, other.instructions
    return mine is others or mine == others


class _Tracer:
    def __init__(
        self, plan: Plan, graph: Graph, devices: tuple[int, ...], *, is_uniform: bool
    ) -> None:
        self._plan, self._peers = plan, PeerMap(plan, graph)
        self._devices, self._is_uniform = devices, is_uniform

    def trace(self, program: Program) -> list[CommunicationEvent]:
        events: list[CommunicationEvent] = []
        channels: dict[tuple[InstructionKind, int | None], Communicator] = {}
        for index, instruction in enumerate(program.instructions):
            kind, layer, _ = instruction
            if self._peers.is_collective(instruction):
                if group := self._group(instruction, program.device):
                    events.append(CommunicationEvent(index, instruction, None, group))
            elif kind in MATCHING_RECEIVE or kind in _RECEIVES:
                channel = channels.get((kind, layer))
                if channel is None:
                    channel = channels[kind, layer] = self._channel(
                        program.device, index, instruction
                    )
                events.append(CommunicationEvent(index, instruction, channel, ()))
        return events

    def _channel(self, device: int, index: int, instruction: Instruction) -> Communicator:
        communicator = self._peers.communicator(instruction, device)
        if communicator is None:
            raise PlanError(
                f"device {device}, instruction {index} ({instruction.kind} of layer "
                f"{instruction.layer}): the layer is at no boundary of its stage"
            )
        return communicator

    def _group(self, instruction: Instruction, device: int) -> tuple[int, ...]:
        if instruction.kind in GLOBAL_COLLECTIVES:
            return self._devices
        if self._is_uniform:
            return ()
        return communication_group(instruction, device, self._plan)


def describe_wait(device: int, event: CommunicationEvent) -> str:
    """Says for whom a device waits at an event."""
    kind, layer, _ = event.instruction
    if event.communicator is None:
        awaited = "the devices of its group"
    else:
        awaited = f"device {peer_of(device, event.communicator)}"
    of_layer = "" if layer is None else f" of layer {layer}"
    place = f"device {device}, instruction {event.instruction_index}"
    return f"{place} ({kind}{of_layer}) waits for {awaited} forever"


def wrong_order(device: int, event: CommunicationEvent, sent: CommunicationEvent) -> PlanError:
    """The error of a device that receives another message than it expects next."""
    _, layer, micro_batch = sent.instruction
    micro = "" if micro_batch is None else f", micro-batch {micro_batch}"
    communicator = event.communicator
    sender = None if communicator is None else communicator.ranks[0]
    return PlanError(
        f"device {device}, instruction {event.instruction_index} ({event.instruction}): "
        f"device {sender} sends layer {layer}{micro} first, at instruction {sent.instruction_index}"
    )


def peer_of(device: int, communicator: Communicator) -> int:
    """The device at the other end of a channel."""
    sender, receiver = communicator.ranks
    return receiver if device == sender else sender


def never_received(communicator: Communicator, event: CommunicationEvent) -> PlanError:
    """The error of a message that nobody receives."""
    sender, receiver = communicator.ranks
    return PlanError(
        f"device {sender}, instruction {event.instruction_index} ({event.instruction}): "
        f"device {receiver} never receives it"
    )
