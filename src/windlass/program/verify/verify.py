"""Verification: proves a program before it runs, or names the instruction and tensor at fault.

It proves that nothing is read before it exists or after it is freed, nothing is made or freed
twice, nothing is left over, all of the plan's work is done once, gradients are complete and reduced
before they are used, no weights are read that other replicas have updated in part, every message is
received in order, no devices deadlock, and no memory tier overflows. Deferred updates are verified
as in a steady run: each finds the gradient that the step before stored.
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
from windlass.program.phases import offloaded_activation_layers, owned_layers, trained_layers
from windlass.program.replicas.zero_sharding import updates_per_shard
from windlass.program.verify.deadlock import verify_communication
from windlass.schema import Graph, Plan
from windlass.units import format_bytes

_Class = TypeVar("_Class", bound=str)

_FINAL_USES: dict[InstructionKind, str] = {
    "reduce_grads": "reduced",
    "offload_grads": "offloaded",
    "update": "used",
}
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
        capacities: bytes that each tier has for tensors, without what the process itself takes; a
            tier that is not named is not checked.

    Raises:
        PlanError: the first fault found.
    """
    if [program.device for program in programs] != list(range(plan.parallel.devices)):
        raise PlanError(
            f"the plan takes {plan.parallel.devices} devices, but there are {len(programs)} "
            "programs; give one for each device, in order"
        )
    effects_by_stage: dict[int, InstructionEffects] = {}
    verified: set[tuple[int, tuple[Instruction, ...], tuple[Instruction, ...]]] = set()
    for program in programs:
        stage = mesh_coord(program.device, plan.parallel).stage
        key = (stage, program.instructions, program.flush_deferred_updates)
        if key in verified:
            continue  # the other ranks of a stage run the same program; proving one proves all
        verified.add(key)
        effects = effects_by_stage.setdefault(stage, InstructionEffects(plan, graph, stage))
        optional = _optional_work(plan, owned_layers(plan, graph, stage))
        _verify_work(program, Counter(_due_work(plan, graph, stage, effects)), optional)
        _verify_gradient_order(program, plan, effects)
        _verify_deferred_updates(program, effects)
        _verify_updated_weights(program, plan, effects)
        _verify_data_flow(program, effects, set(effects.resident_tensors))
        _verify_capacity(program, plan, graph, capacities)
        _verify_flush(program, plan, effects)
    _verify_offload_capacity(plan, graph, capacities)
    verify_communication(programs, plan, graph)


def _optional_work(plan: Plan, layers: Iterable[int]) -> frozenset[tuple[InstructionKind, int]]:
    """Instructions that may fetch, unshard and free weights; the data flow decides how often."""
    kinds: list[InstructionKind] = []
    if plan.is_offloaded("parameters"):
        kinds += ("prefetch_weights", "free_weights")
    if plan.sharding.parameters > 1:
        kinds += ("unshard_weights", "free_weights")
        kinds += ("free_shard",) if plan.is_offloaded("parameters") else ()
    return frozenset((kind, layer) for kind in kinds for layer in layers)


def _verify_work(
    program: Program,
    due: Counter[Instruction],
    optional: frozenset[tuple[InstructionKind, int]],
) -> None:
    """All due work is done once, in whatever order, and nothing else.

    Args:
        due: the instructions that must run.
        optional: kinds and layers that may run besides, however often.
    """
    for index, instruction in enumerate(program.instructions):
        if instruction[:2] in optional:
            continue
        if instruction not in due:
            raise _fault(program, index, "the plan asks for no such instruction here")
        due[instruction] -= 1
        if due[instruction] < 0:
            raise _fault(program, index, "it runs a second time")
    for instruction, times in due.items():
        if times > 0:
            raise PlanError(f"device {program.device} never runs {instruction}")


def _verify_gradient_order(program: Program, plan: Plan, effects: InstructionEffects) -> None:
    """Gradients are complete before they are sent, reduced, normed, used or offloaded."""
    norm_index: int | None = None
    finished: dict[int, tuple[str, int]] = {}
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "grad_norm":
            norm_index = index
        elif norm_index is not None and kind in _BEFORE_NORM:
            raise _fault(program, index, f"the norm was taken before, at instruction {norm_index}")
        elif (
            norm_index is None
            and kind == "update"
            and plan.clip
            and layer not in effects.deferred_updates
        ):
            raise _fault(program, index, "it needs the norm, which is not yet taken")
        if layer is None:
            continue
        for target in _changed_gradients(kind, layer, effects):
            if target in finished:
                verb, before = finished[target]
                raise _fault(
                    program,
                    index,
                    f"the gradient of layer {target} was {verb} before, at instruction {before}",
                )
        if kind == "send_tied_grads":
            finished[effects.tensors.tied_as_user[layer].owner_layer] = ("sent", index)
        elif kind in _FINAL_USES and (kind != "update" or layer not in effects.deferred_updates):
            finished[layer] = (_FINAL_USES[kind], index)


def _changed_gradients(
    kind: InstructionKind, layer: int, effects: InstructionEffects
) -> tuple[int, ...]:
    """The layers whose gradient an instruction changes, so that it must not be finished before."""
    if kind in GRADIENT_PASSES:
        return effects.gradient_targets(layer)
    if kind == "accumulate_tied_grads":
        return (effects.tensors.tied_as_owner[layer].owner_layer,)
    return (layer,) if kind == "reduce_grads" else ()


def _verify_updated_weights(program: Program, plan: Plan, effects: InstructionEffects) -> None:
    """Weights that other replicas have updated are not read until they are gathered.

    An update changes a device's own part of the weights it stores. The rest of them is outdated
    until `all_gather_params`, and weights that were unsharded before are outdated until they are
    unsharded again.
    """
    outdated: dict[TensorId, int] = {}
    if plan.sharding.optimizer == 1:
        return
    for index, instruction in enumerate(program.instructions):
        kind, layer, _ = instruction
        effect = effects.effect_of(instruction, frozenset())
        for tensor in effect.reads:
            if tensor in outdated and kind not in (
                "all_gather_params",
                "free_weights",
                "free_shard",
                "update",
            ):
                raise _fault(
                    program,
                    index,
                    f"it reads {tensor}, which other replicas have updated in part at instruction "
                    f"{outdated[tensor]} and which was not gathered since",
                )
        for tensor in (*effect.makes, *effect.frees):
            outdated.pop(tensor, None)
        if layer is None:
            continue
        stored, full = effects.tensors.weights_between_passes(layer), TensorId("weights", layer)
        if kind == "all_gather_params":
            outdated.pop(stored, None)
        elif kind == "update":
            changed = {full} if updates_per_shard(plan) == 1 else {stored, full}
            outdated |= dict.fromkeys(changed, index)


def _verify_deferred_updates(program: Program, effects: InstructionEffects) -> None:
    """Updates that the step before deferred come before the weights are used."""
    updated: set[int] = set()
    for index, (kind, layer, _) in enumerate(program.instructions):
        if kind == "update" and layer is not None:
            updated.add(layer)
        elif kind == "prefetch_weights" and layer in effects.deferred_updates - updated:
            raise _fault(program, index, "the update that the step before deferred comes first")


def _verify_flush(program: Program, plan: Plan, effects: InstructionEffects) -> None:
    """`flush_deferred_updates` does all deferred updates, and leaves device memory as it was.

    It needs memory for the weights of the first phase and of one layer. A step holds each of them
    together with their gradients, which are no smaller, so that the flush fits if a step does.
    """
    flush = program.model_copy(update={"instructions": program.flush_deferred_updates})
    kinds: tuple[InstructionKind, ...] = ("update",)
    if updates_per_shard(plan) > 1:
        kinds = ("update", "all_gather_params")
    due = Counter(Instruction(kind, layer) for kind in kinds for layer in effects.deferred_updates)
    waiting = (
        tensor for tensor in effects.resident_tensors if tensor.name == "offloaded gradients"
    )
    try:
        _verify_work(flush, due, _optional_work(plan, effects.deferred_updates))
        _verify_deferred_updates(flush, effects)
        _verify_data_flow(flush, effects, set(effects.resident_tensors).difference(waiting))
    except PlanError as fault:
        raise PlanError(f"in `flush_deferred_updates`: {fault}") from fault


def _due_work(
    plan: Plan, graph: Graph, stage: int, effects: InstructionEffects
) -> Iterator[Instruction]:
    offloaded = offloaded_activation_layers(plan, graph, stage)
    owned = owned_layers(plan, graph, stage)
    for micro_batch in range(plan.batch.accumulation):
        yield from _due_of_micro_batch(plan, effects, offloaded, micro_batch)
    trained = trained_layers(plan, graph, stage)
    for layer in trained if plan.offloads else effects.tensors.layers:
        yield Instruction("update", layer)
    for layer in owned:
        if effects.tensors.reduces_gradients(layer):
            yield Instruction("reduce_grads", layer)
        if effects.tensors.sizes[layer].gradients and updates_per_shard(plan) > 1:
            yield Instruction("all_gather_params", layer)
    for layer in effects.tensors.tied_as_user:
        yield Instruction("recv_tied_weights", layer)
        yield Instruction("send_tied_grads", layer)
    for layer in effects.tensors.tied_as_owner:
        yield Instruction("send_tied_weights", layer)
        yield Instruction("accumulate_tied_grads", layer)
    for layer in effects.deferred_updates:
        yield Instruction("offload_grads", layer)
    if plan.clip:
        yield Instruction("grad_norm")
    yield Instruction("sync")


def _due_of_micro_batch(
    plan: Plan, effects: InstructionEffects, offloaded: tuple[int, ...], micro_batch: int
) -> Iterator[Instruction]:
    backward: tuple[InstructionKind, ...] = ("backward",)
    if plan.parallel.schedule == "zero-bubble":
        backward = ("backward_input", "backward_weight")
    if effects.tensors.loads_batches:
        yield Instruction("load_batch", None, micro_batch)
    first_trained = effects.tensors.first_trained
    for layer in effects.tensors.layers:
        yield Instruction("forward", layer, micro_batch)
        if layer >= first_trained:
            yield from (Instruction(kind, layer, micro_batch) for kind in backward)
    for layer in effects.recomputed_layers:
        yield Instruction("recompute", layer, micro_batch)
    for layer in effects.tensors.boundaries:
        is_local = layer in effects.tensors.layer_set
        if is_local or layer >= first_trained:
            yield Instruction("send", layer, micro_batch)
        if not is_local or layer >= first_trained:
            yield Instruction("receive", layer, micro_batch)
    for layer in offloaded:
        yield Instruction("offload_activation", layer, micro_batch)
        yield Instruction("reload_activation", layer, micro_batch)


def _verify_data_flow(
    program: Program, effects: InstructionEffects, expected: set[TensorId]
) -> None:
    """Runs the program on the set of live tensors, which must be `expected` at its end."""
    alive, freed = set(effects.resident_tensors), dict[TensorId, int]()
    made_at: dict[TensorId, int] = {}
    sums: set[TensorId] = set()
    for index, instruction in enumerate(program.instructions):
        effect = effects.effect_of(instruction, sums)
        _verify_effect(program, index, effect, alive, freed)
        for tensor in effect.makes:
            if tensor in alive:
                raise _fault(program, index, f"it makes {tensor}, which exists already")
            made_at[tensor] = index
            if tensor.name in GRADIENT_SUMS:
                sums.add(tensor)
        alive.update(effect.makes)
        for tensor in effect.frees:
            alive.remove(tensor)
            freed[tensor] = index
            sums.discard(tensor)
    for tensor in effects.resident_tensors:
        if tensor in expected - alive:
            raise _fault(program, freed[tensor], f"it frees {tensor}, which the next step needs")
    leaked = alive - expected
    if leaked:
        tensor = min(leaked, key=made_at.__getitem__)
        raise _fault(program, made_at[tensor], f"it makes {tensor}, which is never freed")


def _verify_effect(
    program: Program,
    index: int,
    effect: Effect,
    alive: set[TensorId],
    freed: Mapping[TensorId, int],
) -> None:
    """Everything that an instruction reads is alive; what it frees it reads as well."""
    for tensor in effect.reads:
        if tensor in alive:
            continue
        verb = "frees" if tensor in effect.frees else "reads"
        if tensor in freed:
            raise _fault(
                program, index, f"it {verb} {tensor}, which instruction {freed[tensor]} has freed"
            )
        raise _fault(program, index, f"it {verb} {tensor}, which does not exist yet")


def _verify_capacity(
    program: Program, plan: Plan, graph: Graph, capacities: Mapping[str, int]
) -> None:
    profile = memory_profile(program, plan, graph)
    capacity = capacities.get(profile.tier)
    if capacity is None or profile.peak_bytes <= capacity:
        return
    overflow = _describe_overflow(profile.tier, profile.by_class, capacity)
    raise _fault(program, profile.peak_instruction, overflow)


def _verify_offload_capacity(plan: Plan, graph: Graph, capacities: Mapping[str, int]) -> None:
    for stage in range(plan.parallel.pipeline):
        for tier, by_class in offloaded_bytes_by_tier(plan, graph, stage).items():
            if tier in capacities and sum(by_class.values()) > capacities[tier]:
                raise PlanError(_describe_overflow(tier, by_class, capacities[tier]))


def _describe_overflow(tier: str, by_class: Mapping[_Class, int], capacity: int) -> str:
    needed = sum(by_class.values())
    largest, largest_bytes = max(by_class.items(), key=lambda item: item[1])
    return (
        f"`{tier}` overflows by {needed - capacity} bytes: it needs {format_bytes(needed)} and has "
        f"{format_bytes(capacity)}; the largest part is {largest}, {format_bytes(largest_bytes)}"
    )


def _fault(program: Program, index: int, message: str) -> PlanError:
    instruction = program.instructions[index]
    return PlanError(f"device {program.device}, instruction {index} ({instruction}): {message}")
