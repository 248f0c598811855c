"""Verification: a program is proved before it runs, or refused with device, instruction and value.

Proved are: nothing is read before it is there or after it is gone, nothing is made or freed twice,
nothing stays behind, all of the plan's work is done once, gradients are whole and reduced before
they are used, no weights are read that others have updated a part of, every message sent is
received and in order, no devices wait for each other in a circle, and no tier overflows. Where
updates are put off, they are proved as in a run that is under way: each finds the gradient that the
step before stored.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from windlass.errors import PlanError
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import GRADIENT_PASSES, Instruction, InstructionKind, Program
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.liveness import memory_profile
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.program.memory.values import GRADIENT_SUMS, Effect, TensorId
from windlass.program.phases import owned_layers, offloaded_activation_layers
from windlass.program.verify.deadlock import verify_communication
from windlass.program.zero_sharding import updates_per_shard
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.units import format_bytes

_Class = TypeVar("_Class", bound=str)

_ENDS: dict[InstructionKind, str] = {"reduce_grads": "reduced", "offload_grads": "stored", "update": "used"}
_BEFORE_NORM: tuple[InstructionKind, ...] = (
    *GRADIENT_PASSES,
    "accumulate_tied_grads",
    "reduce_grads",
    "offload_grads",
)


def verify_programs(
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
    if [program.device for program in programs] != list(range(plan.parallel.devices)):
        raise PlanError(
            f"the plan takes {plan.parallel.devices} devices, but there are {len(programs)} programs; "
            "give one for each device, in order"
        )
    stages: dict[int, InstructionEffects] = {}
    proved: set[tuple[int, tuple[Instruction, ...], tuple[Instruction, ...]]] = set()
    for program in programs:
        stage = mesh_coord(program.device, plan.parallel).stage
        if (stage, program.instructions, program.flush_deferred_updates) in proved:
            continue  # replicas and slices run the same program; proving one proves all
        proved.add((stage, program.instructions, program.flush_deferred_updates))
        effects = stages.setdefault(stage, InstructionEffects(plan, graph, stage))
        moves = _moves(plan, owned_layers(plan, graph, stage))
        _verify_work(program, Counter(_due(plan, graph, stage, effects)), moves)
        _verify_turns(program, plan, effects)
        _verify_put_off(program, effects)
        _verify_fresh(program, plan, effects)
        _verify_values(program, effects, set(effects.resident_tensors))
        _verify_capacity(program, plan, graph, capacities)
        _verify_settle(program, plan, effects)
    _verify_far_capacity(plan, graph, capacities)
    verify_communication(programs, plan, graph)


def _moves(plan: Plan, layers: Iterable[int]) -> frozenset[tuple[InstructionKind, int]]:
    """What may bring weights near, make them whole and free them; how often, the values decide."""
    kinds: list[InstructionKind] = []
    if plan.is_offloaded("parameters"):
        kinds += ("prefetch_weights", "free_weights")
    if plan.sharding.parameters > 1:
        kinds += ("unshard_weights", "free_weights")
        kinds += ("free_shard",) if plan.is_offloaded("parameters") else ()
    return frozenset((kind, layer) for kind in kinds for layer in layers)


def _verify_work(
    program: Program, due: Counter[Instruction], moves: frozenset[tuple[InstructionKind, int]]
) -> None:
    """All that is due is done, once, and nothing else; in whatever order.

    Args:
        program: its instructions.
        due: what is to be done.
        moves: what may be done besides, however often.
    """
    for index, instruction in enumerate(program.instructions):
        if instruction[:2] in moves:
            continue
        if instruction not in due:
            raise _fault(program, index, "the plan asks for no such instruction here")
        due[instruction] -= 1
        if due[instruction] < 0:
            raise _fault(program, index, "it runs a second time")
    for instruction, times in due.items():
        if times > 0:
            raise PlanError(f"device {program.device} never runs {instruction}")


def _verify_turns(program: Program, plan: Plan, effects: InstructionEffects) -> None:
    """Gradients are whole before they are handed over, reduced, normed, used or sent home."""
    normed: int | None = None
    done: dict[int, tuple[str, int]] = {}
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "grad_norm":
            normed = index
        elif normed is not None and kind in _BEFORE_NORM:
            raise _fault(program, index, f"the norm was taken before, at instruction {normed}")
        elif normed is None and kind == "update" and plan.clip and layer not in effects.deferred_updates:
            raise _fault(program, index, "it needs the norm, which is not yet taken")
        if layer is None:
            continue
        for target in _changed(kind, layer, effects):
            if target in done:
                how, at = done[target]
                raise _fault(
                    program,
                    index,
                    f"the gradient of layer {target} was {how} before, at instruction {at}",
                )
        if kind == "send_tied_grads":
            done[effects.tensors.tied_as_user[layer].owner_layer] = ("handed over", index)
        elif kind in _ENDS and (kind != "update" or layer not in effects.deferred_updates):
            done[layer] = (_ENDS[kind], index)


def _changed(kind: InstructionKind, layer: int, effects: InstructionEffects) -> tuple[int, ...]:
    """The layers whose gradient an instruction changes, so that none may be final before it."""
    if kind in GRADIENT_PASSES:
        return effects.gradient_targets(layer)
    if kind == "accumulate_tied_grads":
        return (effects.tensors.tied_as_owner[layer].owner_layer,)
    return (layer,) if kind == "reduce_grads" else ()


def _verify_fresh(program: Program, plan: Plan, effects: InstructionEffects) -> None:
    """What others have updated is not read from an own copy until it has come.

    An update changes a device's own part of the weights it holds. What it holds beyond that is old
    until `spread`, and whole weights that were gathered before are old until they are again.
    """
    old: dict[TensorId, int] = {}
    if plan.sharding.optimizer == 1:
        return
    for index, instruction in enumerate(program.instructions):
        kind, layer, _ = instruction
        effect = effects.effect_of(instruction, frozenset())
        for value in effect.reads:
            if value in old and kind not in (
                "all_gather_params",
                "free_weights",
                "free_shard",
                "update",
            ):
                raise _fault(
                    program, index, f"it reads {value}, of which others have updated a part at "
                    f"instruction {old[value]} and which has not come since",
                )  # fmt: skip
        for value in (*effect.makes, *effect.frees):
            old.pop(value, None)
        if layer is None:
            continue
        held, whole = effects.tensors.weights_between_passes(layer), TensorId("weights", layer)
        if kind == "all_gather_params":
            old.pop(held, None)
        elif kind == "update":
            old |= dict.fromkeys({whole} if updates_per_shard(plan) == 1 else {held, whole}, index)


def _verify_put_off(program: Program, effects: InstructionEffects) -> None:
    """What the step before has put off is made up for before the weights are used."""
    updated: set[int] = set()
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "update" and layer is not None:
            updated.add(layer)
        elif kind == "prefetch_weights" and layer in effects.deferred_updates - updated:
            raise _fault(program, index, "the update that the step before put off comes first")


def _verify_settle(program: Program, plan: Plan, effects: InstructionEffects) -> None:
    """Settling makes up for all that was put off, and leaves the near tier as it was.

    It holds the weights of the first phase and of one layer. A step holds either of them together
    with their gradients, which are no smaller, so that settling fits wherever a step does.
    """
    settling = program.model_copy(update={"instructions": program.flush_deferred_updates})
    kinds: tuple[InstructionKind, ...] = ("update", "all_gather_params") if updates_per_shard(plan) > 1 else ("update",)
    due = Counter(Instruction(kind, layer) for kind in kinds for layer in effects.deferred_updates)
    waiting = (value for value in effects.resident_tensors if value.name == "gradients at home")
    try:
        _verify_work(settling, due, _moves(plan, effects.deferred_updates))
        _verify_put_off(settling, effects)
        _verify_values(settling, effects, set(effects.resident_tensors).difference(waiting))
    except PlanError as fault:
        raise PlanError(f"in settling: {fault}") from fault


def _due(plan: Plan, graph: Graph, stage: int, effects: InstructionEffects) -> Iterator[Instruction]:
    travels, owns = offloaded_activation_layers(plan, stage), owned_layers(plan, graph, stage)
    for micro in range(plan.batch.accumulation):
        yield from _due_of_micro(plan, effects, travels, micro)
    for layer in owns if plan.offloads else effects.tensors.layers:
        yield Instruction("update", layer)
    for layer in owns:
        if effects.tensors.reduces_gradients(layer):
            yield Instruction("reduce_grads", layer)
        if updates_per_shard(plan) > 1:
            yield Instruction("all_gather_params", layer)
    for layer in effects.tensors.tied_as_user:
        yield from (Instruction("recv_tied_weights", layer), Instruction("send_tied_grads", layer))
    for layer in effects.tensors.tied_as_owner:
        yield from (
            Instruction("send_tied_weights", layer),
            Instruction("accumulate_tied_grads", layer),
        )
    for layer in effects.deferred_updates:
        yield Instruction("offload_grads", layer)
    if plan.clip:
        yield Instruction("grad_norm")
    yield Instruction("sync")


def _due_of_micro(
    plan: Plan, effects: InstructionEffects, travels: tuple[int, ...], micro: int
) -> Iterator[Instruction]:
    backward: tuple[InstructionKind, ...] = ("backward",)
    if plan.parallel.schedule == "zero-bubble":
        backward = ("backward_input", "backward_weight")
    if effects.tensors.loads_batches:
        yield Instruction("load_batch", None, micro)
    for layer in effects.tensors.layers:
        yield Instruction("forward", layer, micro)
        yield from (Instruction(kind, layer, micro) for kind in backward)
    for layer in effects.recomputed_layers:
        yield Instruction("recompute", layer, micro)
    for layer in effects.tensors.boundaries:
        yield Instruction("send", layer, micro)
        yield Instruction("receive", layer, micro)
    for layer in travels:
        yield Instruction("offload_activation", layer, micro)
        yield Instruction("reload_activation", layer, micro)


def _verify_values(program: Program, effects: InstructionEffects, after: set[TensorId]) -> None:
    """Walks the program with the set of values that are there, and ends with those `after` it."""
    alive, freed = set(effects.resident_tensors), dict[TensorId, int]()
    made_at: dict[TensorId, int] = {}
    summed: set[int] = set()
    for index, instruction in enumerate(program.instructions):
        effect = effects.effect_of(instruction, summed)
        _verify_effect(program, index, effect, alive, freed)
        for value in effect.makes:
            if value in alive:
                raise _fault(program, index, f"it makes {value}, which is there already")
            made_at[value] = index
            if value.name in GRADIENT_SUMS and value.layer is not None:
                summed.add(value.layer)
        alive.update(effect.makes)
        for value in effect.frees:
            alive.remove(value)
            freed[value] = index
            if value.name in GRADIENT_SUMS and value.layer is not None:
                summed.discard(value.layer)
    for value in effects.resident_tensors:
        if value in after - alive:
            raise _fault(program, freed[value], f"it frees {value}, which the next step needs")
    left = alive - after
    if left:
        value = min(left, key=made_at.__getitem__)
        raise _fault(program, made_at[value], f"it makes {value}, which is never freed")


def _verify_effect(
    program: Program, index: int, effect: Effect, alive: set[TensorId], freed: Mapping[TensorId, int]
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
    full = memory_profile(program, plan, graph)
    capacity = capacities.get(full.tier)
    if capacity is None or full.peak_bytes <= capacity:
        return
    raise _fault(program, full.peak_instruction, _overflow(full.tier, full.by_class, capacity))


def _verify_far_capacity(plan: Plan, graph: Graph, capacities: Mapping[str, int]) -> None:
    for stage in range(plan.parallel.pipeline):
        for tier, by_class in offloaded_bytes_by_tier(plan, graph, stage).items():
            if tier in capacities and sum(by_class.values()) > capacities[tier]:
                raise PlanError(_overflow(tier, by_class, capacities[tier]))


def _overflow(tier: str, by_class: Mapping[_Class, int], capacity: int) -> str:
    needed = sum(by_class.values())
    most = max(by_class.items(), key=lambda item: item[1])
    return (
        f"`{tier}` overflows by {needed - capacity} bytes: {format_bytes(needed)} are needed, "
        f"{format_bytes(capacity)} are there; most is {most[0]} with {format_bytes(most[1])}"
    )


def _fault(program: Program, index: int, what: str) -> PlanError:
    instruction = program.instructions[index]
    return PlanError(f"device {program.device}, instruction {index} ({instruction}): {what}")
