"""Exchange: whether what the devices send and reduce together meets, in order and without a circle.

A send leaves its value in a buffer and goes on; a receive waits for it. Reductions, the norm and
the end of the step wait until every device of their group is there.
"""

from collections import deque
from collections.abc import Sequence

from windlass.errors import PlanError
from windlass.program.instruction import Instruction, Program
from windlass.program.layout import Place, device_of, place_of
from windlass.spec.plan import Plan

_Queues = dict[tuple[int, int], deque[tuple[Instruction, int]]]


def peer_of(instruction: Instruction, device: int, plan: Plan) -> int | None:
    """The device at the other end of a send or receive; None if the layer lies on no boundary."""
    place = place_of(device, plan.cut)
    stage = plan.stages[place.stage]
    if instruction.layer == stage.last - 1 and place.stage + 1 < plan.cut.pipeline:
        other = place.stage + 1
    elif instruction.layer == stage.first - 1:
        other = place.stage - 1
    else:
        return None
    return device_of(Place(other, place.slice, place.replica), plan.cut)


def group_of(instruction: Instruction, device: int, plan: Plan) -> range | tuple[int, ...]:
    """The devices that an instruction brings together: replicas for a reduction, else all."""
    if instruction.kind != "reduce":
        return range(plan.cut.devices)
    place = place_of(device, plan.cut)
    return tuple(
        device_of(place._replace(replica=replica), plan.cut) for replica in range(plan.cut.replicas)
    )


def verify_exchange(programs: Sequence[Program], plan: Plan) -> None:
    """Plays the exchanges of all devices through.

    Raises:
        PlanError: a message that is not received or comes out of order, or devices that wait for
            each other.
    """
    at = [0] * len(programs)
    queues: _Queues = {}
    moved = True
    while moved:
        moved = False
        for program in programs:
            while _advance(program, at, programs, plan, queues):
                moved = True
    waiting = [p for p in programs if at[p.device] < len(p.instructions)]
    if waiting:
        raise PlanError("; ".join(_waits(program, at, plan) for program in waiting[:4]))
    for (sender, receiver), queue in queues.items():
        if queue:
            instruction, index = queue[0]
            raise PlanError(
                f"device {sender}, instruction {index} (send of layer {instruction.layer}, "
                f"micro-batch {instruction.micro}): device {receiver} never receives it"
            )


def _advance(
    program: Program, at: list[int], programs: Sequence[Program], plan: Plan, queues: _Queues
) -> bool:
    """Takes one device one instruction further; False if it is at its end or must wait."""
    device, index = program.device, at[program.device]
    if index == len(program.instructions):
        return False
    instruction = program.instructions[index]
    if instruction.kind in ("reduce", "norm", "sync"):
        group = group_of(instruction, device, plan)
        if not all(_stands_at(programs[member], at[member], instruction) for member in group):
            return False
        for member in group:
            at[member] += 1
        return True
    if instruction.kind in ("send", "receive"):
        peer = peer_of(instruction, device, plan)
        if peer is None:
            raise PlanError(
                f"device {device}, instruction {index} ({instruction.kind} of layer "
                f"{instruction.layer}): the layer lies on no boundary of its stage"
            )
        if instruction.kind == "send":
            queues.setdefault((device, peer), deque()).append((instruction, index))
        elif not _receive(device, index, instruction, peer, queues):
            return False
    at[device] = index + 1
    return True


def _stands_at(program: Program, index: int, instruction: Instruction) -> bool:
    """Whether a device is at the same exchange; a reduction's layer must be the same too."""
    if index == len(program.instructions):
        return False
    other = program.instructions[index]
    return other.kind == instruction.kind and other.layer == instruction.layer


def _receive(device: int, index: int, instruction: Instruction, peer: int, queues: _Queues) -> bool:
    queue = queues.get((peer, device))
    if not queue:
        return False
    sent, sent_index = queue.popleft()
    if (sent.layer, sent.micro) != (instruction.layer, instruction.micro):
        raise PlanError(
            f"device {device}, instruction {index} (receive of layer {instruction.layer}, "
            f"micro-batch {instruction.micro}): device {peer} sends layer {sent.layer}, "
            f"micro-batch {sent.micro} first, at instruction {sent_index}"
        )
    return True


def _waits(program: Program, at: list[int], plan: Plan) -> str:
    index = at[program.device]
    instruction = program.instructions[index]
    if instruction.kind == "receive":
        whom = f"device {peer_of(instruction, program.device, plan)}"
    else:
        whom = "the devices of its group"
    layer = "" if instruction.layer is None else f" of layer {instruction.layer}"
    return (
        f"device {program.device}, instruction {index} ({instruction.kind}{layer}) waits for "
        f"{whom} for ever"
    )
