"""Blocks in halves, and image models, as graphs."""

from collections import Counter

import pytest

from windlass.capture import ImageModel, image_graph, split_blocks, stack_graph
from windlass.models import TransformerConfig
from windlass.stacks import load_stack

BLOCKS = 3
BERT = TransformerConfig(
    name="bert",
    layers=BLOCKS,
    width=64,
    heads=4,
    kv_heads=4,
    ffn=256,
    vocabulary=100,
    sequence=32,
    causal=False,
)


def test_the_halves_of_blocks_compute_and_own_what_blocks_do():
    whole = stack_graph(BERT, load_stack("popart"))

    halves = split_blocks(whole)

    assert halves.layers == 2 + 2 * BLOCKS
    assert halves.parameter_count == whole.parameter_count
    assert halves.micro_batch_flop(3, 32) == whole.micro_batch_flop(3, 32)
    for passed in ("forward", "backward"):
        ops = [
            Counter(
                op.name for kind in graph.layer_kinds() for op in getattr(kind.costs[0], passed)
            )
            for graph in (whole, halves)
        ]
        assert ops[0] == ops[1]


def test_attention_alone_has_scores_and_owns_a_third_of_a_block():
    kinds = split_blocks(stack_graph(BERT, load_stack("popart"))).kinds

    scores = {name: kinds[name].costs[0].saved_bytes.bss for name in ("attention", "feed_forward")}
    assert scores["attention"] > 0 == scores["feed_forward"]
    assert kinds["attention"].parameter_count == pytest.approx(
        kinds["feed_forward"].parameter_count / 2, rel=0.02
    )


def test_a_step_of_an_image_model_takes_three_forward_passes_of_flop():
    model = ImageModel(name="net", flop=8e9, activations=1e7, parameters=25_000, convolutions=53)

    graph = image_graph(model)

    assert graph.micro_batch_flop(20, 1) == 3 * 20 * 8e9
    assert (graph.layers, graph.parameter_count) == (1, 25_000)
