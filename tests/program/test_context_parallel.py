"""What plans that divide sequences may say, and whom their ranks communicate with."""

import pytest

from factories import catalog_graph, tiny_machine, tiny_plan
from program_bytes import sent_bytes_by_kind
from windlass.program.communication_groups import communicator_partitions
from windlass.program.lowering.lower import lower
from windlass.program.validate_plan import plan_errors
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload

MACHINE = tiny_machine(devices=8)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return catalog_graph("gpt-tiny", 2, 4, layers=2, width=32, heads=4, sequence=32, vocabulary=64)


def test_adjacent_replicas_divide_sequences(graph: Graph):
    plan = tiny_plan(graph, MACHINE, pipeline=2, data=2, context=2, sequence=32)
    groups = [
        each.ranks
        for partition in communicator_partitions(plan, graph)
        for each in partition
        if each.use == "context"
    ]
    assert groups == [(0, 1), (2, 3), (4, 5), (6, 7)]


PHASES = Offload(parameters="disk", gradients="disk", optimizer="disk", activations="disk")


@pytest.mark.parametrize(
    "degrees",
    [
        {"schedule": "gpipe"},
        {"schedule": "zero-bubble"},
        {"tensor": 2, "pipeline": 2, "schedule": "1f1b"},
        {"tensor": 2, "pipeline": 2, "recompute": "selective"},
        {"tensor": 2, "pipeline": 1, "phases": ((0, 2), (2, 4)), "offload": PHASES},
    ],
    ids=str,
)
def test_programs_of_ranks_that_divide_sequences_end_under_both_semantics(
    graph: Graph, degrees: dict
):
    degrees = {"pipeline": 2, "context": 4 // degrees.get("tensor", 1), **degrees}
    plan = tiny_plan(graph, MACHINE, sequence=32, accumulation=4, **degrees)
    verify_programs(lower(plan, graph), plan, graph, dict.fromkeys(("device", "disk"), 2**40))


def test_a_pass_sends_a_ranks_keys_and_values_to_each_other_rank(graph: Graph):
    plan = tiny_plan(graph, MACHINE, context=4, sequence=32, micro=2, precision="float32")
    own = 2 * 2 * (32 // 4) * 32 * 4  # keys and values, samples, tokens, width, bytes
    sent = sent_bytes_by_kind(plan, graph, 0)
    assert sent["forward"] == sent["backward"] == 2 * 3 * own


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_tell_each_other_how_often_their_runs_chose_each_expert_of_limited_room(
    compiled: bool,
):
    dials = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4, "sequence": 32, "experts": 6}
    sent, degrees = [], {"context": 4, "sequence": 32, "micro": 2, "precision": "float32"}
    for more in ({}, {"capacity": 1.0}):
        graph = catalog_graph("moe-tiny", **dials, **more)
        plan = tiny_plan(graph, MACHINE, compiled=compiled, **degrees)
        sent.append(sent_bytes_by_kind(plan, graph, 0))
    free, limited = sent
    own = 2 * 2 * 6 * 8  # sequences, runs, experts, bytes
    assert limited["forward"] - free["forward"] == 2 * 3 * own
    keys_and_values, choices = 2 * 2 * (32 // 4) * 32 * 4, 2 * 6 * 4
    summed = 2 * 3 / 4 * choices  # a ring of four
    assert limited["backward"] == free["backward"] == 2 * (3 * keys_and_values + summed)


def test_selective_recompute_gathers_keys_and_values_again(graph: Graph):
    once, twice = (
        sent_bytes_by_kind(
            tiny_plan(graph, MACHINE, context=4, sequence=32, recompute=mode), graph, 0
        )
        for mode in ("none", "selective")
    )
    assert twice["forward"] == once["forward"]
    assert twice["backward"] == 2 * once["backward"]


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"context": 4, "sequence": 20}, "needs sequences of a multiple of 8 tokens"),
        ({"context": 2, "tensor": 4, "sequence": 28}, "cannot share equally"),
    ],
    ids=str,
)
def test_what_is_not_combined_is_refused_in_a_sentence(graph: Graph, degrees: dict, words: str):
    (error,) = plan_errors(tiny_plan(graph, MACHINE, **degrees), graph, MACHINE)
    assert "`parallel.context`" in error
    assert words in error
