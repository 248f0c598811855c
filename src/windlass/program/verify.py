"""Verification: a program is proved before it runs, or refused with device, instruction and value.

Proved are: nothing is read before it is there or after it is gone, nothing is made or freed twice,
nothing stays behind, all of the plan's work is done once, every message sent is received and in
order, no devices wait for each other in a circle, and no tier overflows.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from windlass.errors import PlanError
from windlass.program.effects import Effect, Effects, Value
from windlass.program.exchange import verify_exchange
from windlass.program.instruction import Instruction, Program
from windlass.program.layout import place_of
from windlass.program.occupancy import occupancy
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan
from windlass.units import show_bytes


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
    proved: set[tuple[int, tuple[Instruction, ...]]] = set()
    for program in programs:
        stage = place_of(program.device, plan.cut).stage
        if (stage, program.instructions) in proved:
            continue  # replicas run the same program; proving one proves all
        proved.add((stage, program.instructions))
        effects = stages.setdefault(stage, Effects(plan, graph, stage))
        _verify_work(program, plan, effects)
        _verify_values(program, effects)
        _verify_capacity(program, plan, graph, capacities)
    verify_exchange(programs, plan)


def _verify_work(program: Program, plan: Plan, effects: Effects) -> None:
    """All that the plan asks for is done, once, and nothing else; in whatever order."""
    due: Counter[Instruction] = Counter(_due(plan, effects))
    for index, instruction in enumerate(program.instructions):
        if instruction not in due:
            raise _fault(program, index, "the plan asks for no such instruction here")
        due[instruction] -= 1
        if due[instruction] < 0:
            raise _fault(program, index, "it runs a second time")
    for instruction, times in due.items():
        if times > 0:
            raise PlanError(f"device {program.device} never runs {show_instruction(instruction)}")
    _verify_turns(program, plan, effects)


def _verify_turns(program: Program, plan: Plan, effects: Effects) -> None:
    """Gradients are whole before they are reduced, normed and used."""
    normed: int | None = None
    reduced: dict[int, int] = {}
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "norm":
            normed = index
        elif normed is not None and kind in ("backward", "reduce"):
            raise _fault(program, index, f"the norm was taken before, at instruction {normed}")
        elif normed is None and kind == "update" and plan.clip:
            raise _fault(program, index, "it needs the norm, which is not yet taken")
        elif kind == "reduce" and layer is not None:
            reduced[layer] = index
        elif kind == "backward" and layer is not None:
            for target in effects.targets(layer):
                if target in reduced:
                    raise _fault(
                        program,
                        index,
                        f"the gradient of layer {target} was reduced before, at instruction "
                        f"{reduced[target]}",
                    )


def _due(plan: Plan, effects: Effects) -> Iterator[Instruction]:
    again = set(effects.recomputed)
    for micro in range(plan.batch.accumulation):
        if effects.takes_tokens:
            yield Instruction("load", None, micro)
        for layer in effects.layers:
            yield Instruction("forward", layer, micro)
            yield Instruction("backward", layer, micro)
            if layer in again:
                yield Instruction("recompute", layer, micro)
        for layer in effects.boundaries:
            yield Instruction("send", layer, micro)
            yield Instruction("receive", layer, micro)
    for layer in effects.layers:
        yield Instruction("update", layer)
        if plan.cut.replicas > 1:
            yield Instruction("reduce", layer)
    if plan.clip:
        yield Instruction("norm")
    yield Instruction("sync")


def _verify_values(program: Program, effects: Effects) -> None:
    """Walks the program with the set of values that are there."""
    resident = set(effects.resident)
    alive, freed = set(resident), dict[Value, int]()
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
    left = alive - resident
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
    over = full.peak_bytes - capacity
    most = max(full.by_class.items(), key=lambda item: item[1])
    raise _fault(
        program,
        full.peak,
        f"`{full.tier}` overflows by {over} bytes: {show_bytes(full.peak_bytes)} are needed, "
        f"{show_bytes(capacity)} are there; most is {most[0]} with {show_bytes(most[1])}",
    )


def _fault(program: Program, index: int, what: str) -> PlanError:
    shown = show_instruction(program.instructions[index])
    return PlanError(f"device {program.device}, instruction {index} ({shown}): {what}")


def show_instruction(instruction: Instruction) -> str:
    """`forward of layer 3, micro-batch 0`."""
    layer = "" if instruction.layer is None else f" of layer {instruction.layer}"
    micro = "" if instruction.micro is None else f", micro-batch {instruction.micro}"
    return f"{instruction.kind}{layer}{micro}"
