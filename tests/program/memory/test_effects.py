from typing import Any

import pytest
from hypothesis import given, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.program.instruction import Instruction
from windlass.program.lowering.lower import lower
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.liveness import memory_profile
from windlass.program.memory.values import GRADIENT_SUMS, TensorId
from windlass.program.tied_weights import tied_owner_layers
from windlass.schema.graph import Graph

MACHINE = tiny_machine(devices=8)

plans = st.builds(
    dict,
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    sequence=st.integers(1, 64),
    recompute=st.sampled_from(["none", "selective", "full"]),
    recompute_layers=st.sampled_from([None, 1, 2]),
    precision=st.sampled_from(["float32", "bfloat16"]),
    compiled=st.booleans(),
    clip=st.booleans(),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
).filter(
    lambda choice: (
        (choice["recompute"] == "selective")
        + choice["compiled"]
        + (choice["schedule"] == "zero-bubble")
        < 2
    )
)


@given(layers=st.integers(1, 5), tied=st.booleans(), pipeline=st.integers(1, 3), choice=plans)
def test_the_memory_profile_is_the_sum_of_live_tensors(
    layers: int, tied: bool, pipeline: int, choice: dict[str, Any]
):
    graph = tiny_graph(layers=layers, tied=tied)
    plan = tiny_plan(graph, MACHINE, pipeline=pipeline, **choice)
    for stage, program in enumerate(lower(plan, graph)):
        effects = InstructionEffects(plan, graph, stage)
        alive = {value: effects.bytes_of(value) for value in effects.resident_tensors}
        summed: set[TensorId] = set()
        filled = []
        for instruction in program.instructions:
            effect = effects.effect_of(instruction, summed)
            alive |= {value: effects.bytes_of(value) for value in effect.makes}
            summed |= {value for value in effect.makes if value.name in GRADIENT_SUMS}
            filled.append(7 + sum(alive.values()) + effect.working_bytes)
            for value in effect.frees:
                del alive[value]
        full = memory_profile(program, plan, graph, runtime_bytes=7)
        assert full.bytes_by_instruction == tuple(filled)
        assert full.peak_bytes == max(filled) == sum(full.by_class.values())
        assert filled[full.peak_instruction] == max(filled)
        assert all(part >= 0 for part in full.by_class.values())
        assert tuple(alive) == effects.resident_tensors


def test_bytes_are_those_counted_by_hand():
    graph = tiny_graph(layers=1, width=32, vocabulary=64)
    effects = InstructionEffects(tiny_plan(graph, MACHINE, micro=2, sequence=16), graph)
    tokens = 2 * 16
    assert effects.bytes_of(TensorId("tokens", None, 0)) == 2 * tokens * 8
    assert effects.bytes_of(TensorId("weights", 0)) == 64 * 32 * 4
    assert effects.bytes_of(TensorId("optimizer state", 0)) == 64 * 32 * 8
    assert effects.bytes_of(TensorId("weights", 2)) == 0  # the head is tied to the embedding's
    assert effects.bytes_of(TensorId("output", 0, 0)) == tokens * 32 * 4
    assert effects.bytes_of(TensorId("output gradient", 0, 0)) == tokens * 32 * 4
    assert effects.bytes_of(TensorId("saved activations", 2, 0)) == tokens * 64 * 4
    assert effects.bytes_of(TensorId("output", 2, 0)) == 4


def test_a_tied_gradient_is_made_by_the_user_layer_and_summed_by_the_owner_layer():
    graph = tiny_graph(layers=1, tied=True)
    effects = InstructionEffects(tiny_plan(graph, MACHINE), graph)
    head = effects.effect_of(Instruction("backward", 2, 0), set())
    assert TensorId("gradients", 0) in head.makes
    embedding = effects.effect_of(Instruction("backward", 0, 0), {TensorId("gradients", 0)})
    assert TensorId("gradients", 0) in embedding.reads
    assert embedding.makes == ()
    assert embedding.working_bytes >= 64 * 32 * 4  # a fresh gradient beside the sum


def test_the_peak_of_the_logits_comes_before_the_gradient_of_the_table():
    # One token: the table's gradient (64 x 32 numbers) is larger than all else of the head.
    graph = tiny_graph(layers=0, tied=False)
    effects = InstructionEffects(tiny_plan(graph, MACHINE, micro=1, sequence=1), graph)
    head = effects.effect_of(Instruction("backward", 1, 0), set())
    # Then the table's gradient, made, and the logits' one gradient; what was kept is counted apart.
    made = 64 * 32 * 4 + 32 * 4
    assert sum(map(effects.bytes_of, head.makes)) == made
    assert head.working_bytes == 0
    # Many tokens: the logits and their gradient, twice, are more than the table's gradient.
    effects = InstructionEffects(tiny_plan(graph, MACHINE, micro=64, sequence=64), graph)
    head = effects.effect_of(Instruction("backward", 1, 0), set())
    tokens = 64 * 64
    live = tokens * 64 * 4 * 2
    made = 64 * 32 * 4 + tokens * 32 * 4
    assert head.working_bytes == live - tokens * 64 * 4 - made


def test_summing_bfloat16_gradients_in_float32_holds_the_new_ones_too():
    graph = tiny_graph(layers=1)
    once = InstructionEffects(
        tiny_plan(graph, MACHINE, precision="bfloat16", accumulation=1), graph
    )
    often = InstructionEffects(
        tiny_plan(graph, MACHINE, precision="bfloat16", accumulation=2), graph
    )
    assert once.bytes_of(TensorId("gradients", 1)) == 32 * 32 * 2
    assert often.bytes_of(TensorId("gradients", 1)) == 32 * 32 * 4
    # 32 x 32 fresh numbers in two bytes lie beside their float32 sum; one token is next to nothing.
    plan = tiny_plan(graph, MACHINE, precision="bfloat16", accumulation=2, micro=1, sequence=1)
    first = InstructionEffects(plan, graph).effect_of(Instruction("backward", 1, 0), set())
    assert first.working_bytes == 32 * 32 * 2


def test_recompute_saves_only_inputs_between_forward_and_backward():
    graph = tiny_graph(layers=3)
    effects = InstructionEffects(tiny_plan(graph, MACHINE, recompute="full"), graph)
    assert effects.recomputed_layers == (1, 2, 3)
    assert effects.effect_of(Instruction("forward", 2, 0), set()).makes == (
        TensorId("output", 2, 0),
    )
    recompute = effects.effect_of(Instruction("recompute", 2, 0), set())
    assert recompute.makes == (TensorId("output", 2, 0), TensorId("saved activations", 2, 0))
    backward = effects.effect_of(Instruction("backward", 2, 0), set())
    assert TensorId("output", 1, 0) in backward.frees  # layer 1 will start from its own recompute


def test_an_instruction_of_another_stage_has_no_effect_here():
    graph = tiny_graph(layers=2, tied=False)
    effects = InstructionEffects(tiny_plan(graph, MACHINE, pipeline=2), graph, 0)
    with pytest.raises(ValueError, match="layer 3 is not on this stage"):
        effects.effect_of(Instruction("forward", 3, 0), set())


def test_a_tied_weight_without_an_owner_is_refused():
    graph = tiny_graph(layers=0, tied=True)
    lone = graph.model_dump() | {"layer_runs": [{"kind": "head", "count": 1}]}
    with pytest.raises(ValueError, match="no layer of the graph owns"):
        tied_owner_layers(Graph.model_validate(lone))
