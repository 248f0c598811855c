from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.errors import PlanError
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.program.verify.verify import verify_programs
from windlass.schema.plan import Plan

MACHINE = tiny_machine(devices=64)
GRAPH = tiny_graph(layers=2, tied=False)
ROOM = {"device": 2**40}


def edited(programs: tuple[Program, ...], device: int, instructions: Iterable[Instruction]):
    return tuple(
        p.model_copy(update={"instructions": tuple(instructions)}) if p.device == device else p
        for p in programs
    )


def good(**choice: Any):  # noqa: ANN401  handed on to the factory
    plan = tiny_plan(GRAPH, MACHINE, **choice)
    return plan, lower(plan, GRAPH)


def refused(plan: Plan, programs: tuple[Program, ...]):
    with pytest.raises(PlanError) as caught:
        verify_programs(programs, plan, GRAPH, ROOM)
    return str(caught.value)


@settings(max_examples=60)
@given(
    layers=st.integers(3, 6),
    choice=st.builds(
        dict,
        pipeline=st.integers(1, 4),
        data=st.integers(1, 3),
        accumulation=st.integers(1, 5),
        recompute=st.sampled_from(["none", "selective", "full"]),
        recompute_layers=st.sampled_from([None, 1, 2]),
        precision=st.sampled_from(["float32", "bfloat16"]),
        clip=st.booleans(),
        schedule=st.sampled_from(["1f1b", "gpipe"]),
    ),
)
def test_every_lowered_program_verifies_and_fits_exactly_its_own_peak(
    layers: int, choice: dict[str, Any]
):
    graph = tiny_graph(layers=layers)
    plan = tiny_plan(graph, MACHINE, **choice)
    programs = lower(plan, graph)
    peak = max(memory_profile(program, plan, graph).peak_bytes for program in programs)
    verify_programs(programs, plan, graph, {"device": peak})
    with pytest.raises(PlanError, match="`device` overflows by 1 bytes"):
        verify_programs(programs, plan, graph, {"device": peak - 1})


@settings(max_examples=100)
@given(data=st.data())
def test_no_program_with_a_swapped_pair_of_dependent_passes_verifies(data: st.DataObject):
    """Any two compute instructions of one micro-batch depend on each other."""
    plan, programs = good(accumulation=2, recompute="full")
    instructions = list(programs[0].instructions)
    pairs = [
        i
        for i, (a, b) in enumerate(pairwise(instructions))
        if {a.kind, b.kind} <= {"load_batch", "forward", "backward"}
        and a.micro_batch == b.micro_batch
    ]
    i = data.draw(st.sampled_from(pairs))
    instructions[i], instructions[i + 1] = instructions[i + 1], instructions[i]
    with pytest.raises(PlanError):
        verify_programs(edited(programs, 0, instructions), plan, GRAPH, ROOM)


@settings(max_examples=60)
@given(data=st.data(), twice=st.booleans())
def test_an_instruction_lost_or_doubled_is_always_found_on_its_device(
    data: st.DataObject, twice: bool
):
    plan, programs = good(pipeline=2, data=2, accumulation=2, recompute="full")
    device = data.draw(st.integers(0, 3))
    instructions = list(programs[device].instructions)
    at = data.draw(st.integers(0, len(instructions) - 1))
    if twice:
        to = data.draw(st.integers(0, len(instructions)))
        instructions.insert(to, instructions[at])
    else:
        del instructions[at]
    assert refused(plan, edited(programs, device, instructions)).startswith(f"device {device}")


def test_reading_a_tensor_before_it_exists_is_named():
    plan, programs = good()
    first, second, *rest = programs[0].instructions
    message = refused(plan, edited(programs, 0, [second, first, *rest]))
    assert message == (
        "device 0, instruction 0 (forward of layer 0, micro-batch 0): "
        "it reads tokens, micro-batch 0, which does not exist yet"
    )


def test_a_missing_recompute_is_named():
    plan, programs = good(recompute="full")
    kept = [i for i in programs[0].instructions if i != Instruction("recompute", 1, 0)]
    assert refused(plan, edited(programs, 0, kept)) == (
        "device 0 never runs recompute of layer 1, micro-batch 0"
    )


def test_a_recompute_after_its_backward_is_named():
    plan, programs = good(recompute="full")
    instructions = list(programs[0].instructions)
    at = instructions.index(Instruction("recompute", 1, 0))
    instructions[at : at + 2] = reversed(instructions[at : at + 2])
    assert refused(plan, edited(programs, 0, instructions)).endswith(
        "(backward of layer 1, micro-batch 0): "
        "it frees saved activations of layer 1, micro-batch 0, which does not exist yet"
    )


def test_reading_a_freed_tensor_is_named_with_who_freed_it():
    plan, programs = good(pipeline=2)
    instructions = list(programs[0].instructions)
    at = instructions.index(Instruction("send", 1, 0))
    instructions.insert(instructions.index(Instruction("backward", 1, 0)), instructions.pop(at))
    assert refused(plan, edited(programs, 0, instructions)) == (
        "device 0, instruction 5 (send of layer 1, micro-batch 0): "
        "it reads output of layer 1, micro-batch 0, which instruction 4 has freed"
    )


def test_running_twice_is_named():
    plan, programs = good()
    instructions = list(programs[0].instructions)
    instructions.insert(6, instructions[5])
    assert refused(plan, edited(programs, 0, instructions)) == (
        "device 0, instruction 6 (backward of layer 3, micro-batch 0): it runs a second time"
    )


def test_an_instruction_that_the_plan_does_not_ask_for_is_named():
    plan, programs = good()
    extra = (*programs[0].instructions, Instruction("recompute", 1, 0))
    assert "the plan asks for no such instruction" in refused(plan, edited(programs, 0, extra))


def test_an_update_before_the_norm_is_named():
    plan, programs = good()
    instructions = [i for i in programs[0].instructions if i.kind != "grad_norm"]
    instructions.insert(-1, Instruction("grad_norm"))
    assert "it needs the norm, which is not yet taken" in refused(
        plan, edited(programs, 0, instructions)
    )


def test_a_gradient_added_after_its_update_is_named():
    plan, programs = good(accumulation=2, clip=False)
    instructions = list(programs[0].instructions)
    at = instructions.index(Instruction("backward", 0, 1))
    instructions.insert(at, instructions.pop(instructions.index(Instruction("update", 0))))
    assert "(backward of layer 0, micro-batch 1): the gradient of layer 0 was used" in refused(
        plan, edited(programs, 0, instructions)
    )


def test_a_gradient_added_after_its_reduction_is_named():
    plan, programs = good(accumulation=2, data=2)
    instructions = list(programs[0].instructions)
    at = instructions.index(Instruction("backward", 3, 1))
    instructions[at : at + 2] = reversed(instructions[at : at + 2])
    assert "the gradient of layer 3 was reduced before" in refused(
        plan, edited(programs, 0, instructions)
    )


def test_messages_out_of_order_are_named_with_both_ends():
    plan, programs = good(pipeline=2, accumulation=2)
    instructions = list(programs[0].instructions)
    # Stage 0 of two warms up with micro-batch 0, then runs 1: exchange the two on this side only.
    swapped = [
        i._replace(micro_batch=1 - i.micro_batch) if i.micro_batch is not None else i
        for i in instructions
    ]
    message = refused(plan, edited(programs, 0, swapped))
    assert "(receive of layer 1, micro-batch 0): device 0 sends layer 1, micro-batch 1" in message


def test_a_deadlock_is_named_with_all_devices_that_wait():
    plan, programs = good(pipeline=2, accumulation=1)
    instructions = list(programs[1].instructions)
    # The second stage waits for the norm of all before it has sent the gradient back.
    at = instructions.index(Instruction("send", 1, 0))
    instructions.insert(instructions.index(Instruction("grad_norm")) + 1, instructions.pop(at))
    message = refused(plan, edited(programs, 1, instructions))
    assert "device 0, instruction 4 (receive of layer 1) waits for device 1 forever" in message
    assert "(grad_norm) waits for the devices of its group forever" in message


def test_every_device_needs_a_program():
    plan, programs = good(pipeline=2)
    assert "takes 2 devices, but there are 1 programs" in refused(plan, programs[:1])
