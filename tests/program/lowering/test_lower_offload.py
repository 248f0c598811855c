from collections.abc import Iterable

import pytest
from hypothesis import given

from factories import HOST_OFFLOAD, late_tied_graph, tiny_graph, tiny_machine, tiny_plan
from program.offloaded_plans import offloaded_plans
from windlass.errors import PlanError
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.liveness import memory_profile
from windlass.program.memory.values import GRADIENT_SUMS, STAGING_BYTES, TensorId
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan

MACHINE = tiny_machine(host="1 GiB")
THREE = ((0, 1), (1, 2), (2, 4))

SIGNS = {
    "load_batch": "L",
    "prefetch_weights": "+",
    "free_weights": "-",
    "forward": "F",
    "recompute": "A",
    "backward": "B",
    "offload_activation": "K",
    "reload_activation": "R",
    "offload_grads": "S",
    "grad_norm": "N",
    "update": "U",
    "sync": ".",
}


def shown(instructions: Iterable[Instruction]):
    """`F12`: forward of layer 1, micro-batch 2; `A` recomputes a forward."""
    return " ".join(
        SIGNS[kind] + "".join(str(n) for n in (layer, micro) if n is not None)
        for kind, layer, micro in instructions
    )


def lowered(plan: Plan, graph: Graph) -> Program:
    (program,) = lower(plan, graph)
    return program


def test_a_clipped_step_updates_at_the_first_prefetch_and_offloads_gradients_for_the_next_step():
    graph = tiny_graph(layers=2, tied=False)
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=THREE, accumulation=2)
    assert plan.defers_updates
    program = lowered(plan, graph)
    forward = "U1 L0 F00 L1 F01 -0 U2 U3 F10 F11 -1"
    turn = "+1 F20 F30 B30 B20 F21 F31 B31 S3 B21 S2 -2 -3"
    backward = "+0 A10 B10 A11 B11 S1 -1 A00 B00 A01 B01"
    assert shown(program.instructions) == f"{forward} {turn} {backward} N U0 ."
    assert shown(program.flush_deferred_updates) == "U1 -1 U2 -2 U3 -3"


def test_without_clipping_a_layer_is_updated_as_soon_as_its_gradient_is_complete():
    graph = tiny_graph(layers=2, tied=False)
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=THREE, clip=False)
    assert not plan.defers_updates
    program = lowered(plan, graph)
    forward = "+1 L0 F00 -0 +2 +3 F10 -1"
    backward = "+1 F20 F30 B30 U3 B20 U2 -2 -3 +0 A10 B10 U1 -1 A00 B00 U0"
    assert shown(program.instructions) == f"{forward} {backward} ."
    assert program.flush_deferred_updates == ()


def test_the_owner_of_tied_weights_is_prefetched_with_each_phase_that_uses_them():
    graph = late_tied_graph(before=0, between=1)  # embedding, owner, block, head
    phases = ((0, 1), (1, 2), (2, 3), (3, 4))
    program = lowered(tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=phases), graph)
    # The owner, layer 1, is updated once, is away in the third phase and back with the head.
    forward = "U1 L0 F00 -0 U2 F10 -1 +1 F20 -2"
    # Its gradient, begun by the head, stays until its own backward pass has added to it.
    backward = "+2 F30 B30 -1 +1 A20 B20 S2 -2 +0 A10 B10 S1 -1 A00 B00"
    assert shown(program.instructions) == f"{forward} {backward} N U0 ."
    assert shown(program.flush_deferred_updates) == "U1 -1 U2 -2"


def test_weights_that_two_consecutive_phases_need_stay():
    graph = tiny_graph(layers=1, tied=True)  # the head is tied to the embedding's table
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=((0, 1), (1, 3)))
    program = lowered(plan, graph)
    assert shown(program.instructions) == "U1 L0 F00 F10 F20 B20 B10 S1 -1 A00 B00 N U0 ."


def test_outputs_between_recomputed_layers_are_offloaded_and_reloaded():
    graph = tiny_graph(layers=3)
    offload = Offload(activations="host")
    plan = tiny_plan(graph, MACHINE, offload=offload, recompute="full", accumulation=2, clip=False)
    forward = "L{0} F0{0} F1{0} F2{0} K1{0} F3{0} K2{0} F4{0}"
    backward = "B4{0} R2{0} A3{0} B3{0} R1{0} A2{0} B2{0} A1{0} B1{0} B0{0}"
    each = f"{forward} {backward}"
    expected = f"{each.format(0)} {each.format(1)} U0 U1 U2 U3 ."
    assert shown(lowered(plan, graph).instructions) == expected


def test_offloading_optimizer_state_alone_keeps_the_order_of_one_phase():
    graph = tiny_graph(layers=1)
    offloaded = lowered(
        tiny_plan(graph, MACHINE, offload=Offload(optimizer="host"), accumulation=2), graph
    )
    resident = lowered(tiny_plan(graph, MACHINE, accumulation=2), graph)
    head_update = Instruction("update", 2)  # the head owns no weight
    assert offloaded.instructions == tuple(i for i in resident.instructions if i != head_update)
    assert offloaded.flush_deferred_updates == resident.flush_deferred_updates == ()


@given(drawn=offloaded_plans())
def test_every_valid_offloaded_plan_lowers_to_a_program_that_verifies_and_fits_exactly_its_peak(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    program = lowered(plan, graph)
    peak = memory_profile(program, plan, graph).peak_bytes
    verify_programs([program], plan, graph, {"device": peak})
    with pytest.raises(PlanError, match="`device` overflows by 1 bytes"):
        verify_programs([program], plan, graph, {"device": peak - 1})


@given(drawn=offloaded_plans(parameters=True))
def test_phases_run_in_order_and_the_last_alternates_forward_and_backward(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    passes = ("forward", "recompute", "backward")
    recomputed_layers = set(InstructionEffects(plan, graph).recomputed_layers)
    micro_batches = range(plan.batch.accumulation)
    *phases, last = plan.stages[0].phases
    first = graph.first_trained
    assert recomputed_layers == set(range(first, last[0]))
    due = [
        Instruction("forward", layer, micro)
        for phase in phases
        for micro in micro_batches
        for layer in range(*phase)
    ]
    for phase in reversed(plan.stages[0].phases):
        for micro in micro_batches:
            if phase == last:
                due += [Instruction("forward", layer, micro) for layer in range(*last)]
            for layer in reversed(range(max(first, phase[0]), phase[1])):
                if layer in recomputed_layers:
                    due.append(Instruction("recompute", layer, micro))
                due.append(Instruction("backward", layer, micro))
    assert [i for i in lowered(plan, graph).instructions if i.kind in passes] == due


def in_memory(plan: Plan, graph: Graph) -> Plan:
    one_phase = plan.stages[0].model_copy(update={"phases": ((0, graph.layers),)})
    return plan.model_copy(update={"offload": Offload(), "stages": (one_phase,)})


@given(drawn=offloaded_plans())
def test_micro_batches_add_to_a_gradient_in_the_same_order_as_without_offloading(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    offloaded, resident = (lowered(item, graph) for item in (plan, in_memory(plan, graph)))
    for layer in range(graph.layers):
        added = [
            [
                i.micro_batch
                for i in program.instructions
                if (i.kind, i.layer) == ("backward", layer)
            ]
            for program in (offloaded, resident)
        ]
        assert added[0] == added[1]


def live_bytes(plan: Plan, graph: Graph, instructions: Iterable[Instruction]):
    """Device memory after each instruction, and live tensors at the end: an independent count."""
    effects = InstructionEffects(plan, graph)
    alive = {tensor: effects.bytes_of(tensor) for tensor in effects.resident_tensors}
    sums: set[TensorId] = set()
    in_use = [sum(alive.values())]
    for instruction in instructions:
        effect = effects.effect_of(instruction, sums)
        alive |= {tensor: effects.bytes_of(tensor) for tensor in effect.makes}
        sums |= {each for each in effect.makes if each.name in GRADIENT_SUMS}
        for tensor in effect.frees:
            del alive[tensor]
        in_use.append(sum(alive.values()))
    return in_use, set(alive)


@given(drawn=offloaded_plans())
def test_device_memory_ends_a_step_as_it_began(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    program = lowered(plan, graph)
    in_use, alive = live_bytes(plan, graph, program.instructions)
    assert in_use[0] == in_use[-1]
    assert alive == set(InstructionEffects(plan, graph).resident_tensors)


@given(drawn=offloaded_plans(parameters=True))
def test_flushing_deferred_updates_leaves_device_memory_as_it_was_and_no_gradients_waiting(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    program = lowered(plan, graph)
    in_use, alive = live_bytes(plan, graph, program.flush_deferred_updates)
    assert in_use[0] == in_use[-1]
    assert not [tensor for tensor in alive if tensor.name == "offloaded gradients"]


@given(drawn=offloaded_plans(parameters=True))
def test_flushing_deferred_updates_holds_the_first_phase_and_one_layer(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    program = lowered(plan, graph)
    flush = program.model_copy(update={"instructions": program.flush_deferred_updates})
    effects = InstructionEffects(plan, graph)
    first = sum(map(effects.bytes_of, effects.resident_tensors))
    largest = max(
        (effects.bytes_of(TensorId("weights", at)) for at in effects.deferred_updates), default=0
    )
    assert memory_profile(flush, plan, graph).peak_bytes == first + largest


@given(drawn=offloaded_plans(parameters=True))
def test_flushing_deferred_updates_needs_no_more_device_memory_than_a_step(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    program = lowered(plan, graph)
    flush = program.model_copy(update={"instructions": program.flush_deferred_updates})
    flush_peak, step_peak = (
        memory_profile(part, plan, graph).peak_bytes for part in (flush, program)
    )
    assert flush_peak <= step_peak


def device_bytes(plan: Plan, graph: Graph, name: str):
    return memory_profile(lowered(plan, graph), plan, graph).by_class[name]


def test_only_two_phases_of_weights_are_in_device_memory_at_once():
    graph = tiny_graph(layers=10, tied=False)
    square, table = 32 * 32 * 4, 64 * 32 * 4
    phases = ((0, 1), *((at, at + 2) for at in range(1, 11, 2)), (11, 12))
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=phases, micro=1, sequence=1)
    in_use, _ = live_bytes(plan, graph, lowered(plan, graph).instructions)
    assert in_use[0] == STAGING_BYTES + table
    assert device_bytes(plan, graph, "weights") in (table + 2 * square, 4 * square)
    assert device_bytes(plan, graph, "optimizer") == 0


def test_an_offloaded_gradient_stays_until_the_next_one_is_offloaded():
    graph = tiny_graph(layers=2, tied=False)
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=((0, 1), (1, 4)))
    program, effects = lowered(plan, graph), InstructionEffects(plan, graph)
    at = {i: n for n, i in enumerate(program.instructions)}

    def device_gradients(instruction: Instruction) -> set[int | None]:
        part = program.instructions[: at[instruction] + 1]
        _, alive = live_bytes(plan, graph, part)
        return {tensor.layer for tensor in alive if tensor.name == "gradients"}

    assert device_gradients(Instruction("offload_grads", 3)) == {3}
    assert device_gradients(Instruction("backward", 2, 0)) == {2, 3}
    assert device_gradients(Instruction("offload_grads", 2)) == {2}
    assert device_gradients(Instruction("offload_grads", 1)) == {1}
    assert device_gradients(Instruction("grad_norm")) == {0}
    assert effects.offloaded_gradients == (3, 2, 1)


def test_an_update_during_the_backward_pass_holds_its_gradient_until_the_next_one():
    graph = tiny_graph(layers=2, tied=False)
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=((0, 1), (1, 4)), clip=False)
    program = lowered(plan, graph)
    at = program.instructions.index(Instruction("update", 2))
    _, alive = live_bytes(plan, graph, program.instructions[: at + 1])
    assert {tensor.layer for tensor in alive if tensor.name == "gradients"} == {2}


@given(drawn=offloaded_plans(trained=True))
def test_offloaded_optimizer_state_takes_only_the_staging_buffer(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    full = memory_profile(lowered(plan, graph), plan, graph)
    if plan.is_offloaded("optimizer"):
        assert full.by_class["optimizer"] == 0
        assert full.by_class["working"] >= STAGING_BYTES
    else:
        assert (
            full.by_class["optimizer"] == plan.optimizer_bytes_per_parameter * graph.parameter_count
        )


def test_offloaded_outputs_take_no_device_memory():
    graph = tiny_graph(layers=8)
    resident, offloaded = (
        tiny_plan(graph, MACHINE, offload=offload, recompute="full", micro=8, sequence=64)
        for offload in (Offload(), Offload(activations="host"))
    )
    output = 8 * 64 * 32 * 4
    # Seven of eight blocks' outputs are offloaded; the one in use at the peak is reloaded.
    assert device_bytes(resident, graph, "activations") - device_bytes(
        offloaded, graph, "activations"
    ) >= (5 * output)
