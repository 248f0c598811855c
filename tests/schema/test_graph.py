"""Graph: polynomials, and counts over all layers."""

import pytest
from hypothesis import given, strategies as st

from factories import catalog_graph, sharded_graph, tiny_graph
from windlass.schema.graph import Graph, Polynomial

whole = st.integers(0, 1000)
polynomials = st.builds(Polynomial, *[whole] * 6)
sizes = st.integers(1, 64)


@given(polynomial=polynomials, micro=sizes, sequence=sizes)
def test_a_polynomial_is_the_sum_of_its_terms(polynomial: Polynomial, micro: int, sequence: int):
    b, s = micro, sequence
    terms = (1, s, s**2, b, b * s, b * s**2)
    assert polynomial.at(micro, sequence) == sum(
        c * t for c, t in zip(polynomial, terms, strict=True)
    )


@given(polynomial=polynomials, one=sizes, other=sizes, sequence=sizes)
def test_more_sequences_are_never_smaller(
    polynomial: Polynomial, one: int, other: int, sequence: int
):
    low, high = sorted((one, other))
    assert polynomial.at(low, sequence) <= polynomial.at(high, sequence)


@given(layers=st.integers(0, 5), tied=st.booleans())
def test_the_counts_of_a_graph_are_those_of_its_layers_one_by_one(layers: int, tied: bool):
    graph = tiny_graph(layers=layers, tied=tied)
    kinds = list(graph.layer_kinds())
    assert graph.layers == len(kinds) == layers + 2
    assert graph.parameter_count == sum(
        parameter.count
        for kind in kinds
        for parameter in kind.parameters
        if parameter.tied_to is None
    )
    assert graph.micro_batch_flop(3, 16) == sum(
        op.flop.at(3, 16)
        for kind in kinds
        for cost in [kind.cost("float32", compiled=False)]
        for op in (*cost.forward, *cost.backward)
    )


def test_a_cost_that_was_not_captured_is_a_key_error():
    kind = tiny_graph().kinds["block"]
    bare = kind.model_copy(update={"costs": kind.costs[:1]})
    with pytest.raises(KeyError, match="bfloat16"):
        bare.cost("bfloat16", compiled=True)


def test_a_graph_survives_its_file():
    graph = tiny_graph()
    again = Graph.model_validate_json(graph.to_json())
    assert again == graph
    assert again.label == graph.label


def test_a_copy_with_other_fields_has_a_label_of_its_own():
    graph = tiny_graph()
    label, other = graph.label, graph.model_copy(update={"vocabulary": graph.vocabulary + 1})
    assert other.label != label == graph.model_copy().label


def test_a_rank_with_a_smaller_shard_has_all_other_properties_of_the_first():
    graph = sharded_graph(tiny_graph(width=32))
    block = graph.kinds["block"].model_copy(update={"is_hidden": True})
    weight = block.parameters[0].model_copy(update={"shape": (31, 32)})
    block = block.model_copy(update={"parameters": (weight, *block.parameters[1:])})
    shard = graph.tensor_shards[2]["block"].model_copy(update={"is_hidden": True})
    uneven = graph.model_copy(
        update={
            "kinds": {**graph.kinds, "block": block},
            "tensor_shards": {2: {**graph.tensor_shards[2], "block": shard}},
        }
    )
    first, second = (uneven.shard(2, rank).kinds["block"] for rank in (0, 1))
    assert [each.parameters[0].shape for each in (first, second)] == [(16, 32), (15, 32)]
    assert [each.name for each in second.matrices] == [each.name for each in first.matrices]


def test_ranks_exchange_largest_values_once_for_each_float8_product_that_they_share():
    # A quarter of the inner width is the width: no product can be told from others by its sides.
    shards = catalog_graph("gpt-tiny", 4, width=64, ffn=256, heads=4).tensor_shards[4]
    (block,) = (kind for kind in shards.values() if kind.is_hidden)
    cost = block.cost("float8", compiled=False)
    forward, backward = (
        [op for op in ops if op.name == "float8 largest"] for ops in (cost.forward, cost.backward)
    )
    # Forward, attention's output and the second product of the feed-forward branch are sums over
    # what ranks divide; backward, the gradients of the inputs of the others.
    inputs = [p for p in block.parameters if len(p.shape) == 2 and p.shard_dim == 0]
    assert (len(forward), len(backward)) == (2, len(inputs))
