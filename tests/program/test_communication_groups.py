"""The communicators of a plan: who is in them, and how many calls make them."""

import time
from collections import Counter

import pytest
from hypothesis import given

from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from program.distributed_plans import distributed_plans
from windlass.program.communication_groups import (
    Communicator,
    PeerMap,
    communication_group,
    communicator_partitions,
    communicator_use,
)
from windlass.program.device_mesh import mesh_coord, rank_of
from windlass.program.instruction import MATCHING_RECEIVE, Instruction
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorGrid

MACHINE = tiny_machine(devices=8192)
MOST_SPLITS = 20


def all_communicators(plan: Plan, graph: Graph) -> list[Communicator]:
    return [item for partition in communicator_partitions(plan, graph) for item in partition]


@given(drawn=distributed_plans())
def test_no_rank_is_in_two_communicators_that_are_made_at_once(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    for partition in communicator_partitions(plan, graph):
        ranks = Counter(rank for communicator in partition for rank in communicator.ranks)
        assert set(ranks.values()) == {1}
        assert set(ranks) <= set(range(plan.parallel.devices))
        assert all(len(communicator.ranks) > 1 for communicator in partition)


@given(drawn=distributed_plans())
def test_both_ends_of_every_message_find_the_one_communicator_of_its_direction(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    peers, made = PeerMap(plan, graph), Counter(all_communicators(plan, graph))
    assert set(made.values()) <= {1}
    used: dict[Communicator, set[int]] = {}
    for program in lower(plan, graph):
        for instruction in program.instructions:
            sends = instruction.kind in MATCHING_RECEIVE
            if sends or instruction.kind in MATCHING_RECEIVE.values():
                communicator = peers.communicator(instruction, program.device)
                assert communicator in made
                assert communicator.ranks[0 if sends else 1] == program.device
                used.setdefault(communicator, set()).add(program.device)
    assert all(users == set(communicator.ranks) for communicator, users in used.items())
    assert set(used) == {communicator for communicator in made if communicator.is_channel}


@given(drawn=distributed_plans())
def test_every_rank_finds_the_ranks_that_its_collectives_take(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    tensor, made = int(plan.parallel.tensor), all_communicators(plan, graph)
    for device in range(plan.parallel.devices):
        by_use = {
            item.use: item.ranks for item in made if device in item.ranks and not item.is_channel
        }
        alone = (device,)
        for kind, use in (("unshard_weights", "gather"), ("all_gather_params", "update")):
            expected = communication_group(Instruction(kind, 0), device, plan)
            shared = "scatter" if plan.parallel.expert else communicator_use(use, plan)
            assert by_use.get(shared, alone) == expected
        if plan.parallel.expert:
            group = communication_group(Instruction("forward", 1), device, plan)
            assert by_use["experts"] == group
            assert len(group) == plan.parallel.expert
        if tensor > 1:
            assert by_use["all"] == communication_group(Instruction("forward", 0), device, plan)
        whole_stage = {
            rank_of(mesh_coord(other, plan.parallel)._replace(tensor_rank=rank), plan.parallel)
            for scattered in by_use.get("scatter", alone)
            for other in next(
                (c.ranks for c in made if c.use == "reduce" and scattered in c.ranks), (scattered,)
            )
            for rank in range(tensor)
        }
        assert whole_stage == set(communication_group(Instruction("reduce_grads", 0), device, plan))


@pytest.mark.parametrize("tensor", [8, TensorGrid(4, 2)])
def test_communicators_are_made_by_as_many_calls_however_many_ranks_there_are(tensor: int):
    graph = sharded_graph(tiny_graph(layers=14, tied=True), (8, TensorGrid(4, 2)))

    def partitions(data: int) -> tuple[int, int, float]:
        plan = tiny_plan(
            graph, MACHINE, pipeline=4, tensor=tensor, data=data, accumulation=4,
            schedule="interleaved", virtual_stages=2, sharding=(data // 4, data // 2),
        )  # fmt: skip
        start = time.process_time()
        result = communicator_partitions(plan, graph)
        seconds = time.process_time() - start
        return len(result), sum(map(len, result)), seconds

    few, many = partitions(8), partitions(128)
    assert few[0] == many[0] <= MOST_SPLITS
    assert many[1] > 2048  # groups of 4,096 ranks, which would be made one by one
    assert many[2] < 1


def test_tensor_times_data_of_520_groups_are_made_by_two_calls():
    plan = tiny_plan(tiny_graph(), MACHINE, tensor=8, data=512)
    assert [len(partition) for partition in communicator_partitions(plan, tiny_graph())] == [512, 8]


@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 1), (2, 3), (3, 1), (7, 2), (8, 2)])
def test_a_pipeline_of_any_length_takes_few_calls(pipeline: int, chunks: int):
    graph = tiny_graph(layers=pipeline * chunks, tied=True)
    plan = tiny_plan(
        graph, MACHINE, pipeline=pipeline, virtual_stages=chunks, accumulation=pipeline,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )  # fmt: skip
    partitions = communicator_partitions(plan, graph)
    assert len(partitions) <= 8
    directed = Counter(item.ranks for partition in partitions for item in partition)
    if pipeline == 2 and chunks > 1:  # both go both ways, and so do weights and their gradients
        assert directed == {(0, 1): 3, (1, 0): 3}
