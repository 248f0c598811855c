"""Verification: a program is proved before it runs, or refused with device, instruction and value.

Proved are: nothing is read before it is there or after it is gone, nothing is made or freed twice,
nothing stays behind, all of the plan's work is done once, every message sent is received and in
order, no devices wait for each other in a circle, and no tier overflows. Where updates are put off,
they are proved as in a run that is under way: each finds the gradient that the step before stored.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from windlass.errors import PlanError
from windlass.program.effects import Effect, Effects, Value
from windlass.program.exchange import verify_exchange
from windlass.program.far import far_bytes
from windlass.program.instruction import Instruction, Program
from windlass.program.layout import place_of
from windlass.program.occupancy import occupancy
from windlass.program.phases import owning, travelling
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan
from windlass.units import show_bytes

_Class = TypeVar("_Class", bound=str)


def verify(
    programs: Sequence[Program], plan: Plan, graph: Graph, capacities: Mapping[str, int]
) -> None:
    """Proves the programs of one step, one for each device.

    Args:
        programs: in the order of their devices.
        plan: that they were lowered from.
        graph: that the plan cuts.
        capacities: bytes that each tier has for tensors, what the process itself holds already
            taken off; a tier that is not named is not checked.

    Raises:
        PlanError: the first fault found.
    """
    if [program.device for program in programs] != list(range(plan.cut.devices)):
        raise PlanError(
            f"the plan takes {plan.cut.devices} devices, but there are {len(programs)} programs; "
            "give one for each device, in order"
        )
    stages: dict[int, Effects] = {}
    proved: set[tuple[int, tuple[Instruction, ...], tuple[Instruction, ...]]] = set()
    for program in programs:
        stage = place_of(program.device, plan.cut).stage
        if (stage, program.instructions, program.settle) in proved:
            continue  # replicas run the same program; proving one proves all
        proved.add((stage, program.instructions, program.settle))
        effects = stages.setdefault(stage, Effects(plan, graph, stage))
        moves = frozenset(owning(graph) if plan.far("weights") else ())
        _verify_work(program, Counter(_due(plan, graph, effects)), moves)
        _verify_turns(program, plan, effects)
        _verify_put_off(program, effects)
        _verify_values(program, effects, set(effects.resident))
        _verify_capacity(program, plan, graph, capacities)
        _verify_settle(program, effects)
    _verify_far_capacity(plan, graph, capacities)
    verify_exchange(programs, plan)


def _verify_work(program: Program, due: Counter[Instruction], moves: frozenset[int]) -> None:
    """All that is due is done, once, and nothing else; in whatever order.

    Args:
        program: its instructions.
        due: what is to be done.
        moves: layers whose weights may come and go; how often, the values decide.
    """
    for index, instruction in enumerate(program.instructions):
        if instruction.kind in ("fetch", "release") and instruction.layer in moves:
            continue
        if instruction not in due:
            raise _fault(program, index, "the plan asks for no such instruction here")
        due[instruction] -= 1
        if due[instruction] < 0:
            raise _fault(program, index, "it runs a second time")
    for instruction, times in due.items():
        if times > 0:
            raise PlanError(f"device {program.device} never runs {show_instruction(instruction)}")


def _verify_turns(program: Program, plan: Plan, effects: Effects) -> None:
    """Gradients are whole before they are reduced, normed, used or sent home."""
    normed: int | None = None
    done: dict[int, tuple[str, int]] = {}
    ends = {"reduce": "reduced", "store": "stored"}
    if effects.departing and not plan.deferred:
        ends["update"] = "used"
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "norm":
            normed = index
        elif normed is not None and kind in ("backward", "reduce", "store"):
            raise _fault(program, index, f"the norm was taken before, at instruction {normed}")
        elif normed is None and kind == "update" and plan.clip and layer not in effects.put_off:
            raise _fault(program, index, "it needs the norm, which is not yet taken")
        elif kind in ends and layer is not None:
            done[layer] = (ends[kind], index)
        elif kind == "backward" and layer is not None:
            for target in effects.targets(layer):
                if target in done:
                    how, at = done[target]
                    raise _fault(
                        program,
                        index,
                        f"the gradient of layer {target} was {how} before, at instruction {at}",
                    )


def _verify_put_off(program: Program, effects: Effects) -> None:
    """What the step before has put off is made up for before the weights are used."""
    updated: set[int] = set()
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "update" and layer is not None:
            updated.add(layer)
        elif kind == "fetch" and layer in effects.put_off - updated:
            raise _fault(program, index, "the update that the step before put off comes first")


def _verify_settle(program: Program, effects: Effects) -> None:
    """Settling makes up for all that was put off, and leaves the near tier as it was.

    It holds the weights of the first phase and of one layer. A step holds either of them together
    with their gradients, which are no smaller, so that settling fits wherever a step does.
    """
    settling = program.model_copy(update={"instructions": program.settle})
    due = Counter(Instruction("update", layer) for layer in effects.put_off)
    waiting = (value for value in effects.resident if value.name == "gradients at home")
    try:
        _verify_work(settling, due, effects.put_off)
        _verify_put_off(settling, effects)
        _verify_values(settling, effects, set(effects.resident).difference(waiting))
    except PlanError as fault:
        raise PlanError(f"in settling: {fault}") from fault


def _due(plan: Plan, graph: Graph, effects: Effects) -> Iterator[Instruction]:
    travels = travelling(plan, graph)
    for micro in range(plan.batch.accumulation):
        yield from _due_of_micro(effects, travels, micro)
    for layer in owning(graph) if plan.streamed else effects.layers:
        yield Instruction("update", layer)
        if plan.cut.replicas > 1:
            yield Instruction("reduce", layer)
    for layer in effects.put_off:
        yield Instruction("store", layer)
    if plan.clip:
        yield Instruction("norm")
    yield Instruction("sync")


def _due_of_micro(effects: Effects, travels: tuple[int, ...], micro: int) -> Iterator[Instruction]:
    if effects.takes_tokens:
        yield Instruction("load", None, micro)
    for layer in effects.layers:
        yield Instruction("forward", layer, micro)
        yield Instruction("backward", layer, micro)
    for layer in effects.recomputed:
        yield Instruction("recompute", layer, micro)
    for layer in effects.boundaries:
        yield Instruction("send", layer, micro)
        yield Instruction("receive", layer, micro)
    for layer in travels:
        yield Instruction("keep", layer, micro)
        yield Instruction("restore", layer, micro)


def _verify_values(program: Program, effects: Effects, after: set[Value]) -> None:
    """Walks the program with the set of values that are there, and ends with those `after` it."""
    alive, freed = set(effects.resident), dict[Value, int]()
    made_at: dict[Value, int] = {}
    summed: set[int] = set()
    for index, instruction in enumerate(program.instructions):
        effect = effects.of(instruction, summed)
        _verify_effect(program, index, effect, alive, freed)
        for value in effect.makes:
            if value in alive:
                raise _fault(program, index, f"it makes {value}, which is there already")
            made_at[value] = index
            if value.name == "gradients" and value.layer is not None:
                summed.add(value.layer)
        alive.update(effect.makes)
        for value in effect.frees:
            alive.remove(value)
            freed[value] = index
            if value.name == "gradients" and value.layer is not None:
                summed.discard(value.layer)
    for value in effects.resident:
        if value in after - alive:
            raise _fault(program, freed[value], f"it frees {value}, which the next step needs")
    left = alive - after
    if left:
        value = min(left, key=made_at.__getitem__)
        raise _fault(program, made_at[value], f"it makes {value}, which is never freed")


def _verify_effect(
    program: Program, index: int, effect: Effect, alive: set[Value], freed: Mapping[Value, int]
) -> None:
    """All that an instruction reads is there; what it frees it reads as well."""
    for value in effect.reads:
        if value in alive:
            continue
        verb = "frees" if value in effect.frees else "reads"
        if value in freed:
            raise _fault(
                program, index, f"it {verb} {value}, which instruction {freed[value]} has freed"
            )
        raise _fault(program, index, f"it {verb} {value}, which is not there yet")


def _verify_capacity(
    program: Program, plan: Plan, graph: Graph, capacities: Mapping[str, int]
) -> None:
    full = occupancy(program, plan, graph)
    capacity = capacities.get(full.tier)
    if capacity is None or full.peak_bytes <= capacity:
        return
    raise _fault(program, full.peak, _overflow(full.tier, full.by_class, capacity))


def _verify_far_capacity(plan: Plan, graph: Graph, capacities: Mapping[str, int]) -> None:
    for tier, by_class in far_bytes(plan, graph).items():
        if tier in capacities and sum(by_class.values()) > capacities[tier]:
            raise PlanError(_overflow(tier, by_class, capacities[tier]))


def _overflow(tier: str, by_class: Mapping[_Class, int], capacity: int) -> str:
    needed = sum(by_class.values())
    most = max(by_class.items(), key=lambda item: item[1])
    return (
        f"`{tier}` overflows by {needed - capacity} bytes: {show_bytes(needed)} are needed, "
        f"{show_bytes(capacity)} are there; most is {most[0]} with {show_bytes(most[1])}"
    )


def _fault(program: Program, index: int, what: str) -> PlanError:
    shown = show_instruction(program.instructions[index])
    return PlanError(f"device {program.device}, instruction {index} ({shown}): {what}")


def show_instruction(instruction: Instruction) -> str:
    """`forward of layer 3, micro-batch 0`."""
    layer = "" if instruction.layer is None else f" of layer {instruction.layer}"
    micro = "" if instruction.micro is None else f", micro-batch {instruction.micro}"
    return f"{instruction.kind}{layer}{micro}"
