"""Faults of distributed programs, each named."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import PlanError
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.verify.verify import verify_programs
from windlass.schema.plan import Plan

MACHINE = tiny_machine(host="1 GiB", devices=64)
GRAPH = tiny_graph(layers=2, tied=True)
Edit = Callable[[list[Instruction]], None]

SHARED = {"pipeline": 2, "data": 4, "sharding": (2, 4), "accumulation": 2}
"""Two stages of four replicas; sharding degrees 2 of parameters and 4 of optimizer state."""
STREAMED = {
    "stages": (((0, 1), (1, 2)), ((2, 3), (3, 4))),
    "offload": HOST_OFFLOAD,
    **SHARED,
}


def made(**choice: Any) -> tuple[Plan, tuple[Program, ...]]:  # noqa: ANN401  handed on to the factory
    plan = tiny_plan(GRAPH, MACHINE, **{**SHARED, **choice})
    programs = lower(plan, GRAPH)
    verify_programs(programs, plan, GRAPH, {})
    return plan, programs


def refused(plan: Plan, programs: tuple[Program, ...], edits: dict[int, Edit]) -> str:
    changed = []
    for program in programs:
        instructions = list(program.instructions)
        edits.get(program.device, lambda _: None)(instructions)
        changed.append(program.model_copy(update={"instructions": tuple(instructions)}))
    with pytest.raises(PlanError) as caught:
        verify_programs(changed, plan, GRAPH, {})
    return str(caught.value)


def dropped(instruction: Instruction) -> Edit:
    return lambda instructions: instructions.remove(instruction)


def moved(instruction: Instruction, before: Instruction) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        instructions.remove(instruction)
        instructions.insert(instructions.index(before), instruction)

    return edit


def swapped(one: Instruction, other: Instruction) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        here, there = instructions.index(one), instructions.index(other)
        instructions[here], instructions[there] = other, one

    return edit


@settings(max_examples=60)
@given(data=st.data(), twice=st.booleans(), streamed=st.booleans())
def test_an_instruction_lost_or_doubled_is_always_found(
    data: st.DataObject, twice: bool, streamed: bool
):
    plan, programs = made(**(STREAMED if streamed else {}))
    device = data.draw(st.integers(0, 7))
    length = len(programs[device].instructions)
    at, to = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, length))

    def edit(instructions: list[Instruction]) -> None:
        if twice:
            instructions.insert(to, instructions[at])
        else:
            del instructions[at]

    assert refused(plan, programs, {device: edit})


def test_a_missing_unshard_is_named_by_who_reads_the_weights():
    plan, programs = made()
    message = refused(plan, programs, {2: dropped(Instruction("unshard_weights", 1))})
    assert message.startswith("device 2, instruction ")
    assert message.endswith(
        "(forward of layer 1, micro-batch 0): it reads weights of layer 1, which does not exist yet"
    )


def test_weights_freed_before_their_last_use_are_named():
    plan, programs = made()
    edit = moved(Instruction("free_weights", 1), before=Instruction("backward", 1, 1))
    message = refused(plan, programs, {0: edit})
    assert "(backward of layer 1, micro-batch 1): it reads weights of layer 1, which" in message
    assert message.endswith("has freed")


def test_a_shard_freed_before_it_is_gathered_is_named():
    plan, programs = made(**STREAMED)
    edit = swapped(Instruction("unshard_weights", 1), Instruction("free_shard", 1))
    message = refused(plan, programs, {3: edit})
    assert (
        "(unshard_weights of layer 1): it reads weight shard of layer 1, which instruction"
        in message
    )


def test_two_unshards_swapped_on_one_replica_deadlock():
    plan, programs = made()
    edit = swapped(Instruction("unshard_weights", 0), Instruction("unshard_weights", 1))
    message = refused(plan, programs, {2: edit})
    # Devices 0 and 2 have the two weight shards of stage 0.
    assert (
        "device 0, instruction 0 (unshard_weights of layer 0) waits for the devices of its"
        in message
    )
    assert (
        "device 2, instruction 0 (unshard_weights of layer 1) waits for the devices of its"
        in message
    )


def test_a_reduction_before_the_last_backward_pass_is_named():
    plan, programs = made()
    edit = moved(Instruction("reduce_grads", 1), before=Instruction("backward", 1, 1))
    assert "(backward of layer 1, micro-batch 1): the gradient of layer 1 was reduced" in refused(
        plan, programs, {1: edit}
    )


def test_a_reduction_after_the_gradient_was_offloaded_is_named():
    plan, programs = made(**{**STREAMED, "sharding": (1, 1)})
    edit = swapped(Instruction("reduce_grads", 1), Instruction("offload_grads", 1))
    assert "(reduce_grads of layer 1): the gradient of layer 1 was offloaded before" in refused(
        plan, programs, {0: edit}
    )


def test_a_norm_before_a_reduction_is_named():
    plan, programs = made()
    edit = moved(Instruction("grad_norm"), before=Instruction("reduce_grads", 2))
    assert "(reduce_grads of layer 2): the norm was taken before" in refused(
        plan, programs, {4: edit}
    )


def test_two_reductions_swapped_on_one_replica_deadlock():
    plan, programs = made(pipeline=1, sharding=(1, 1))
    edit = moved(Instruction("reduce_grads", 2), before=Instruction("grad_norm"))
    message = refused(plan, programs, {1: edit})
    assert "(reduce_grads of layer 2) waits for the devices of its group forever" in message


def test_a_missing_all_gather_of_updated_parameters_is_named():
    plan, programs = made()
    assert refused(plan, programs, {5: dropped(Instruction("all_gather_params", 2))}) == (
        "device 5 never runs all_gather_params of layer 2"
    )


@pytest.mark.parametrize("sharding", [(1, 4), (2, 4)])
def test_partly_outdated_weights_are_not_read_before_they_are_gathered(
    sharding: tuple[int, int],
):
    plan, programs = made(**{**STREAMED, "sharding": sharding})
    reader = Instruction("unshard_weights", 1) if sharding[0] > 1 else Instruction("forward", 1, 0)

    def edit(instructions: list[Instruction]) -> None:
        instructions.remove(Instruction("all_gather_params", 1))
        instructions.insert(instructions.index(reader) + 1, Instruction("all_gather_params", 1))

    message = refused(plan, programs, {0: edit})
    assert f"({reader}): it reads weight" in message
    assert message.endswith(
        "of layer 1, which other replicas have updated in part at instruction 0 and which was not "
        "gathered since"
    )


def test_unsharded_weights_from_before_an_update_are_not_read_after_it():
    plan, programs = made(sharding=(4, 4))

    def edit(instructions: list[Instruction]) -> None:
        for late in (Instruction("free_weights", 0), Instruction("send_tied_weights", 3)):
            instructions.remove(late)
            instructions.insert(instructions.index(Instruction("update", 0)) + 1, late)

    assert (
        "(send_tied_weights of layer 3): it reads weights of layer 0, which other replicas have "
        "updated"
    ) in refused(plan, programs, {0: edit})


def test_swapped_receives_are_named_with_both_ends():
    plan, programs = made()
    edit = swapped(Instruction("receive", 1, 0), Instruction("receive", 1, 1))
    message = refused(plan, programs, {5: edit})
    assert "device 5, instruction " in message
    assert "micro-batch 0, which does not exist yet" in message


def test_messages_sent_in_another_order_than_they_are_received_in_are_named():
    plan, programs = made(schedule="interleaved", virtual_stages=2, data=1, sharding=(1, 1))

    def edit(instructions: list[Instruction]) -> None:
        for at, (kind, layer, micro) in enumerate(instructions):
            if micro is not None:
                instructions[at] = Instruction(kind, layer, 1 - micro)

    message = refused(plan, programs, {0: edit})
    assert "device 0 sends layer 0, micro-batch 1 first" in message


def test_tied_weights_that_arrive_after_their_first_use_are_named():
    plan, programs = made()
    edit = moved(Instruction("recv_tied_weights", 3), before=Instruction("backward", 3, 0))
    assert "it reads tied weights of layer 0, which does not exist yet" in refused(
        plan, programs, {6: edit}
    )


def test_a_tied_gradient_sent_before_it_is_complete_is_named():
    plan, programs = made()
    edit = moved(Instruction("send_tied_grads", 3), before=Instruction("backward", 3, 1))
    assert "(backward of layer 3, micro-batch 1): the gradient of layer 0 was sent" in refused(
        plan, programs, {4: edit}
    )


def test_a_tied_gradient_accumulated_after_the_reduction_is_named():
    plan, programs = made()
    edit = swapped(Instruction("accumulate_tied_grads", 3), Instruction("reduce_grads", 0))
    assert (
        "(accumulate_tied_grads of layer 3): the gradient of layer 0 was reduced before"
        in refused(plan, programs, {3: edit})
    )


def test_tied_weights_that_are_never_sent_leave_their_user_waiting():
    plan, programs = made()
    assert refused(plan, programs, {1: dropped(Instruction("send_tied_weights", 3))}) == (
        "device 1 never runs send_tied_weights of layer 3"
    )
    late = moved(Instruction("send_tied_weights", 3), before=Instruction("free_weights", 0))
    message = refused(plan, programs, {1: late})
    assert "device 1, instruction" in message
    assert "(receive of layer 1) waits for device 5 forever" in message


def test_a_weight_gradient_pass_before_its_input_gradient_pass_is_named():
    plan, programs = made(schedule="zero-bubble")
    edit = swapped(Instruction("backward_input", 3, 0), Instruction("backward_weight", 3, 0))
    message = refused(plan, programs, {4: edit})
    assert "it frees inner gradients of layer 3, micro-batch 0, which does not exist yet" in message
