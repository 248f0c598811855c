"""Laws of tensor-parallel layers: their shards, their collectives, and what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from program.distributed_plans import SHARDED_GRAPHS
from windlass.errors import PlanError
from windlass.program.communication_groups import PeerMap, communication_group
from windlass.program.instruction import GRADIENT_PASSES, WEIGHT_PASSES, Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_sizes import plan_layer_sizes
from windlass.program.validate_plan import plan_errors
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorGrid, grid_columns, grid_rows, group_size

MACHINE = tiny_machine(host="1 GiB", devices=8)
GRAPH = sharded_graph(tiny_graph(layers=2))
NORM = 32
"""Elements of the weight that every tensor-parallel rank replicates."""


def made(**choice: Any) -> tuple[Plan, tuple[Program, ...]]:  # noqa: ANN401  handed on to the factory
    shape = {"tensor": 2, "pipeline": 2, "data": 2, "accumulation": 2, **choice}
    plan = tiny_plan(GRAPH, MACHINE, **shape)
    programs = lower(plan, GRAPH)
    verify_programs(programs, plan, GRAPH, {})
    return plan, programs


DEGREES = st.sampled_from([2, 4, TensorGrid(2, 2)])


@given(graph=st.sampled_from(SHARDED_GRAPHS), degree=DEGREES)
def test_shards_cover_every_parameter_and_replicate_what_is_not_sharded(graph: Graph, degree: int):
    shards = [graph.shard(degree, rank) for rank in range(degree)]
    for name, whole in graph.kinds.items():
        parts = [shard.kinds[name] for shard in shards]
        for place, parameter in enumerate(whole.parameters):
            counts = [part.parameters[place].count for part in parts]
            common = parts[0].parameters[place].replicated_over
            times = 1 if common is None else group_size(degree, common)
            assert sum(counts) == times * parameter.count
            assert counts == sorted(counts, reverse=True)


@given(
    degree=DEGREES,
    accumulation=st.integers(1, 2),
    precision=st.sampled_from(["float32", "bfloat16"]),
)
def test_sizes_of_shards_sum_to_the_full_size(degree: int, **choice: Any):  # noqa: ANN401  handed on to the factory
    plan = tiny_plan(GRAPH, MACHINE, tensor=degree, **choice)
    alone = tiny_plan(GRAPH, MACHINE, **choice)
    for part, whole in zip(
        plan_layer_sizes(plan, GRAPH), plan_layer_sizes(alone, GRAPH), strict=True
    ):
        rows, columns = grid_rows(degree), grid_columns(degree)
        norms = part.replicated_gradients + columns * part.replicated_in_columns
        assert degree * part.gradients == whole.gradients + (rows - 1) * norms
        assert norms in (0, NORM * plan.gradient_itemsize)
        assert not (part.replicated_gradients if columns > 1 else part.replicated_in_columns)
        if whole.output > 4:  # not the loss, which all have
            assert degree * part.output == whole.output
        assert whole.replicated_gradients == 0


@given(graph=st.sampled_from(SHARDED_GRAPHS[:3]), degree=DEGREES)
def test_the_flop_of_all_shards_sum_to_the_full_flop(graph: Graph, degree: int):
    assert degree * graph.shard(degree).micro_batch_flop(2, 16) == pytest.approx(
        graph.micro_batch_flop(2, 16)
    )


def test_a_shard_has_the_label_of_its_graph_and_capturing_more_degrees_keeps_it():
    bare = GRAPH.model_copy(update={"tensor_shards": {}})
    assert GRAPH.shard(2).label == GRAPH.shard(4, 3).label == GRAPH.label == bare.label
    assert Graph.model_validate_json(GRAPH.to_json()) == GRAPH


def test_passes_with_collectives_wait_for_the_tensor_parallel_ranks_of_one_stage_and_replica():
    plan, programs = made(schedule="zero-bubble")
    peers = PeerMap(plan, GRAPH)
    for program in programs:
        first = program.device - program.device % 2
        for each in program.instructions:
            if each.kind in (*WEIGHT_PASSES, *GRADIENT_PASSES):
                # Where only the gradients of weights are made, nothing is exchanged; but the first
                # layer, whose tokens have no gradient, does all its backward pass there.
                late = each.kind == "backward_weight"
                begun = each.kind == "backward_input"
                assert peers.is_collective(each) == (not begun if each.layer == 0 else not late)
                assert communication_group(each, program.device, plan) == (first, first + 1)
    assert not PeerMap(tiny_plan(GRAPH, MACHINE), GRAPH).is_collective(Instruction("forward", 1, 0))


def test_messages_between_stages_stay_on_their_tensor_parallel_rank():
    plan, _ = made()
    peers = PeerMap(plan, GRAPH)
    assert [peers.peer_of(Instruction("send", 1, 0), device) for device in range(8)] == [
        4, 5, 6, 7, 0, 1, 2, 3,
    ]  # fmt: skip
    assert [peers.peer_of(Instruction("send_tied_weights", 3), device) for device in range(4)] == [
        4,
        5,
        6,
        7,
    ]


def test_one_replica_reduces_only_layers_with_replicated_parameters():
    _, programs = made(data=1, pipeline=1)
    reduced = [each.layer for each in programs[0].instructions if each.kind == "reduce_grads"]
    assert reduced == [3, 2, 1]  # the embedding has none


@settings(max_examples=100)
@given(data=st.data(), twice=st.booleans())
def test_an_instruction_that_one_rank_loses_or_doubles_is_found(data: st.DataObject, twice: bool):
    plan, programs = made()
    device = data.draw(st.integers(0, 7))
    instructions = list(programs[device].instructions)
    at = data.draw(st.integers(0, len(instructions) - 1))
    if twice:
        instructions.insert(data.draw(st.integers(0, len(instructions))), instructions[at])
    else:
        del instructions[at]
    assert "device" in refused(plan, programs, device, instructions)


@settings(max_examples=100)
@given(data=st.data())
def test_a_rank_that_runs_its_passes_in_another_order_is_refused(
    data: st.DataObject,
):
    """Swaps any two passes with collectives on one rank only."""
    plan, programs = made()
    peers, device = PeerMap(plan, GRAPH), data.draw(st.integers(0, 7))
    instructions = list(programs[device].instructions)
    passes = [
        at for at, each in enumerate(instructions) if peers.is_collective(each) and each.micro_batch
    ]
    here = data.draw(st.sampled_from(passes[:-1]))
    there = data.draw(st.sampled_from([at for at in passes if at > here]))
    instructions[here], instructions[there] = instructions[there], instructions[here]
    refused(plan, programs, device, instructions)


def test_ranks_that_run_micro_batches_in_different_orders_are_named():
    plan, programs = made(pipeline=1, data=1, schedule="gpipe")
    other = {0: 1, 1: 0}
    instructions = [
        each if each.micro_batch is None else each._replace(micro_batch=other[each.micro_batch])
        for each in programs[1].instructions
    ]
    message = refused(plan, programs, 1, instructions)
    assert "device 0, instruction 1 (forward of layer 0) waits for the devices of its" in message


def refused(
    plan: Plan, programs: tuple[Program, ...], device: int, instructions: list[Instruction]
) -> str:
    changed = list(programs)
    changed[device] = changed[device].model_copy(update={"instructions": tuple(instructions)})
    with pytest.raises(PlanError) as caught:
        verify_programs(changed, plan, GRAPH, {})
    return str(caught.value)


def test_impossible_degrees_are_refused_with_the_way_out():
    why = "`block` has 6 heads, which cannot be sharded over 4 ranks; take a degree that divides 6"
    graph = GRAPH.model_copy(
        update={"tensor_shards": {2: GRAPH.tensor_shards[2]}, "unshardable": {4: (why,)}}
    )

    def errors(tensor: int, sequence: int) -> tuple[str, ...]:
        return plan_errors(
            tiny_plan(graph, MACHINE, tensor=tensor, sequence=sequence), graph, MACHINE
        )

    assert errors(2, 16) == ()
    assert errors(2, 15) == (
        (
            "`batch.sequence` = 15 is not a multiple of `parallel.tensor` = 2: between layers each "
            "tensor-parallel rank holds an equal part of the tokens; make it one or lower the "
            "degree"
        ),
    )
    assert errors(4, 16) == (f"`parallel.tensor` = 4: {why}",)
    assert errors(8, 16) == (
        (
            "`parallel.tensor` = 8, but `tiny` was not captured for this degree; capture it so, or "
            "set it to 1 or 2"
        ),
    )
