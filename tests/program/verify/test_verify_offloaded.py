"""Faults of programs with offloaded weights, gradients and state, each named."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import PlanError
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.memory.values import STAGING_BYTES
from windlass.program.verify.verify import verify_programs
from windlass.schema.plan import Plan

MACHINE = tiny_machine(host="1 GiB")
GRAPH = tiny_graph(layers=3, tied=False)
PHASES = ((0, 1), (1, 2), (2, 3), (3, 5))
Edit = Callable[[list[Instruction]], None]


def made(*, clip: bool = True, activations: str = "device") -> tuple[Plan, Program]:
    offload = HOST_OFFLOAD.model_copy(update={"activations": activations})
    plan = tiny_plan(
        GRAPH, MACHINE, offload=offload, phases=PHASES, accumulation=2, clip=clip, recompute="full"
    )
    (program,) = lower(plan, GRAPH)
    return plan, program


def refused(plan: Plan, program: Program, edit: Edit, part: str = "instructions"):
    instructions = list(getattr(program, part))
    edit(instructions)
    edited = program.model_copy(update={part: tuple(instructions)})
    with pytest.raises(PlanError) as caught:
        verify_programs([edited], plan, GRAPH, {})
    return str(caught.value)


def moved(instruction: Instruction, before: Instruction) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        instructions.remove(instruction)
        instructions.insert(instructions.index(before), instruction)

    return edit


@settings(max_examples=60)
@given(
    data=st.data(),
    clip=st.booleans(),
    part=st.sampled_from(["instructions", "flush_deferred_updates"]),
)
def test_an_instruction_lost_is_always_found(data: st.DataObject, clip: bool, part: str):
    plan, program = made(clip=clip or part == "flush_deferred_updates", activations="host")
    at = data.draw(st.integers(0, len(getattr(program, part)) - 1))
    assert refused(plan, program, lambda instructions: instructions.__delitem__(at), part)


@settings(max_examples=60)
@given(
    data=st.data(),
    clip=st.booleans(),
    part=st.sampled_from(["instructions", "flush_deferred_updates"]),
)
def test_an_instruction_doubled_is_always_found(data: st.DataObject, clip: bool, part: str):
    plan, program = made(clip=clip or part == "flush_deferred_updates", activations="host")
    length = len(getattr(program, part))
    at, to = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, length))
    assert refused(
        plan, program, lambda instructions: instructions.insert(to, instructions[at]), part
    )


def test_computing_with_offloaded_weights_is_named():
    plan, program = made(clip=False)
    message = refused(
        plan,
        program,
        moved(Instruction("prefetch_weights", 2), before=Instruction("forward", 2, 1)),
    )
    assert message.endswith(
        "(forward of layer 2, micro-batch 0): it reads weights of layer 2, which does not exist yet"
    )


def test_computing_with_freed_weights_is_named_with_who_freed_them():
    plan, program = made()
    message = refused(
        plan, program, moved(Instruction("free_weights", 0), before=Instruction("forward", 0, 1))
    )
    assert "it reads weights of layer 0, which instruction 4 has freed" in message


def test_prefetching_weights_that_exist_is_named():
    plan, program = made()
    message = refused(
        plan,
        program,
        lambda instructions: instructions.insert(0, Instruction("prefetch_weights", 0)),
    )
    assert message == (
        "device 0, instruction 0 (prefetch_weights of layer 0): "
        "it makes weights of layer 0, which exists already"
    )


def test_freeing_offloaded_weights_is_named():
    plan, program = made()
    message = refused(
        plan, program, lambda instructions: instructions.insert(0, Instruction("free_weights", 3))
    )
    assert message == (
        "device 0, instruction 0 (free_weights of layer 3): "
        "it frees weights of layer 3, which does not exist yet"
    )


def test_prefetching_before_a_deferred_update_is_named():
    plan, program = made()

    def edit(instructions: list[Instruction]) -> None:
        update, fetch = Instruction("update", 2), Instruction("prefetch_weights", 2)
        here, there = instructions.index(update), instructions.index(fetch)
        instructions[here], instructions[there] = fetch, update

    assert refused(plan, program, edit).endswith(
        "(prefetch_weights of layer 2): the update that the step before deferred comes first"
    )


def test_offloading_a_gradient_before_it_is_complete_is_named():
    plan, program = made()
    message = refused(
        plan, program, moved(Instruction("offload_grads", 3), before=Instruction("backward", 3, 1))
    )
    assert "(backward of layer 3, micro-batch 1): the gradient of layer 3 was offloaded" in message


def test_updating_with_a_gradient_before_it_is_complete_is_named():
    plan, program = made(clip=False)
    message = refused(
        plan, program, moved(Instruction("update", 3), before=Instruction("backward", 3, 1))
    )
    assert "(backward of layer 3, micro-batch 1): the gradient of layer 3 was used" in message


def test_a_gradient_that_is_not_offloaded_before_the_norm_is_named():
    plan, program = made()
    message = refused(
        plan, program, moved(Instruction("grad_norm"), before=Instruction("offload_grads", 1))
    )
    norm = program.instructions.index(Instruction("offload_grads", 1))
    assert message.endswith(
        f"(offload_grads of layer 1): the norm was taken before, at instruction {norm}"
    )


def test_weights_of_the_first_phase_that_are_freed_at_the_end_are_named():
    plan, program = made()
    message = refused(
        plan, program, lambda instructions: instructions.append(Instruction("free_weights", 0))
    )
    assert message.endswith(
        "(free_weights of layer 0): it frees weights of layer 0, which the next step needs"
    )


def test_reloading_an_output_that_was_not_offloaded_is_named():
    plan, program = made(activations="host")
    keep = Instruction("offload_activation", 1, 0)
    message = refused(plan, program, moved(keep, before=Instruction("recompute", 2, 0)))
    assert message.endswith(
        "(reload_activation of layer 1, micro-batch 0): "
        "it frees offloaded output of layer 1, micro-batch 0, which does not exist yet"
    )


def test_a_fault_in_the_flush_of_deferred_updates_says_so():
    plan, program = made()
    release = Instruction("free_weights", 4)
    message = refused(
        plan,
        program,
        lambda instructions: instructions.remove(release),
        "flush_deferred_updates",
    )
    assert message == (
        "in `flush_deferred_updates`: device 0, instruction 6 (update of layer 4): "
        "it makes weights of layer 4, which is never freed"
    )


def test_an_offload_tier_that_is_too_small_is_named_with_what_fills_it():
    plan, program = made()
    needed = 4 * (2 + 1) * GRAPH.parameter_count  # weights and two moments
    needed += 4 * (GRAPH.parameter_count - 64 * 32)  # gradients of all but the first phase
    verify_programs([program], plan, GRAPH, {"device": 2 * STAGING_BYTES, "host": needed})
    with pytest.raises(
        PlanError, match=r"`host` overflows by 1 bytes: .* the largest part is optimizer,"
    ):
        verify_programs([program], plan, GRAPH, {"host": needed - 1})
