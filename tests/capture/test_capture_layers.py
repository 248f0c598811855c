"""A graph describes what torch really does."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from windlass.capture.capture_layers import capture_graph
from windlass.capture.recording.recorder import record_layer
from windlass.capture.trace import LayerTrace
from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_stack_from_module
from windlass.schema.graph import Graph

Captured = Callable[..., tuple[LayerStack, Graph]]

SMALL = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 48, "sequence": 40}
MODELS = (
    "gpt2-124m",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gpt-j-6b", "gpt-neox-20b", "llama2-70b")
    ),
)
"""Models to capture, of which each takes several seconds."""


def test_flop_equal_the_formula_of_the_literature(captured: Captured):
    _, graph = captured("gpt2-124m", layers=2)
    layers, width, vocabulary, sequence = 2, 768, 50257, 1024

    # Narayanan et al. 2021, arXiv:2104.04473, appendix: 72 b s l d^2 (1 + s/6d + v/12ld) without
    # recompute, and one product more for the fused attention, which forms the scores again.
    literature = (
        72
        * sequence
        * layers
        * width**2
        * (1 + sequence / (6 * width) + vocabulary / (12 * layers * width))
        + 2 * layers * sequence**2 * width
    )

    assert graph.micro_batch_flop(1, sequence) == pytest.approx(literature, rel=1e-12)


def test_a_graph_has_each_distinct_layer_once(captured: Captured):
    _, graph = captured("gpt2-124m", layers=2)

    assert [(run.kind, run.count) for run in graph.layer_runs] == [
        ("embedding", 1), ("block", 2), ("head", 1),
    ]  # fmt: skip
    assert set(graph.kinds) == {"embedding", "block", "head"}


def test_a_tied_head_owns_no_second_table(captured: Captured):
    _, graph = captured("gpt2-124m", layers=2)

    head = {parameter.name: parameter for parameter in graph.kinds["head"].parameters}
    assert head["projection.weight"].tied_to == "embedding.tokens.weight"
    assert graph.parameter_count + 10 * graph.kinds["block"].parameter_count == 124_439_808


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(
    index=st.sampled_from([0, 1, 3]),
    micro_batch=st.integers(2, 40),
    sequence=st.integers(2, 700),
    precision=st.sampled_from(["float32", "bfloat16"]),
)
def test_unseen_sizes_are_predicted_to_the_byte(
    captured: Captured, name: str, index: int, micro_batch: int, sequence: int, precision: str
):
    stack, graph = captured(name, layers=2)
    cost = graph.kinds[stack.kinds[index]].cost(precision, compiled=False)
    width = stack.layers[0].tokens.embedding_dim
    recorded = record_layer(
        stack.layers[index],
        lambda: (
            torch.empty(micro_batch, sequence, width)
            if index
            else torch.zeros(micro_batch, sequence, dtype=torch.int64)
        ),
        dtype=getattr(torch, precision),
        target_shape=(micro_batch, sequence) if index == 3 else None,
    )

    ops = (*cost.forward, *cost.backward)
    for op, call in zip(ops, recorded.trace.calls, strict=True):
        if op.name == "_coalesce":  # rows instead of the whole table's gradient
            assert call.name == "embedding_dense_backward"
            continue
        assert op.name == call.name
        assert op.flop.at(micro_batch, sequence) == recorded.numbers[call.flop]
        for quantity, accesses in ((op.read_bytes, call.reads), (op.written_bytes, call.writes)):
            expected = sum(recorded.numbers[access.nbytes] for access in accesses)
            assert quantity.at(micro_batch, sequence) == expected
    assert cost.saved_bytes.at(micro_batch, sequence) == saved_bytes(
        recorded.trace, recorded.numbers
    )


def saved_bytes(trace: LayerTrace, numbers: tuple[int, ...]) -> int:
    """Bytes of internal buffers that outlive the forward pass."""
    return sum(
        numbers[buffer.nbytes]
        for buffer in trace.buffers
        if buffer.role == "internal"
        and buffer.first_call < trace.forward_calls
        and (buffer.freed_at is None or buffer.freed_at > trace.forward_calls)
    )


def test_a_product_reads_its_operands_once_and_writes_its_result(captured: Captured):
    _, graph = captured("gpt2-124m", layers=2)
    up = next(
        op
        for op in graph.kinds["block"].cost("bfloat16", compiled=False).forward
        if op.shape is not None and op.shape.n.constant == 3072
    )

    tokens, width, hidden = 4 * 100, 768, 3072
    assert up.read_bytes.at(4, 100) == 2 * (tokens * width + width * hidden + hidden)
    assert up.written_bytes.at(4, 100) == 2 * tokens * hidden
    assert prod(q.at(4, 100) for q in up.shape) * 2 == up.flop.at(4, 100)


def test_an_embedding_reads_the_rows_it_looks_up_and_its_gradient_has_as_many(
    captured: Captured,
):
    _, graph = captured("gpt2-124m", layers=2)
    cost = graph.kinds["embedding"].cost("float32", compiled=False)

    picked, indices = 8 * 768 * 4, 8 * 8
    assert cost.forward[0].name == "embedding"
    assert cost.forward[0].read_bytes.at(2, 4) == picked + indices
    assert cost.backward[-1].written_bytes.at(2, 4) == picked + indices
    assert graph.kinds["embedding"].pass_gradient_elements(2, 4)[0] == 8 * 768


@pytest.mark.parametrize("name", MODELS)
def test_compiling_changes_neither_flop_nor_products(captured: Captured, name: str):
    _, graph = captured(name, layers=2)
    for kind in graph.kinds.values():
        plain, fused = (kind.cost("bfloat16", compiled=c) for c in (False, True))
        for one, other in ((plain.forward, fused.forward), (plain.backward, fused.backward)):
            assert [op.shape for op in one if op.shape] == [op.shape for op in other if op.shape]
            assert sum(op.flop.at(2, 64) for op in one) == sum(op.flop.at(2, 64) for op in other)


@pytest.mark.parametrize("name", MODELS)
def test_compiling_never_moves_more_bytes_between_products(captured: Captured, name: str):
    _, graph = captured(name, layers=2)
    for kind in ("head", graph.layer_runs[1].kind):
        moved = {
            compiled: sum(
                op.read_bytes.at(4, 512) + op.written_bytes.at(4, 512)
                for op in graph.kinds[kind].cost("bfloat16", compiled=compiled).forward
                if op.kind == "memory"
            )
            for compiled in (False, True)
        }
        assert moved[True] < moved[False]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if x.shape[1] > 30 else x


class Cubic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        return x + torch.zeros(b, s, s, s).sum()


class Looking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Branching, "does other operations at micro-batch"),
        (Cubic, "does another amount of work at micro-batch 5, sequence 63"),
        (Looking, "cannot run on fake tensors in float32"),
    ],
)
def test_a_layer_that_cannot_be_captured_is_named_with_a_fix(layer: type[nn.Module], message: str):
    module = nn.Sequential(nn.Embedding(20, 8), layer(), nn.Linear(8, 20))

    with pytest.raises(ModelError, match=f"layer `1` of model `mine` {message}"):
        capture_graph(layer_stack_from_module(module, "mine", vocabulary=20))


def test_a_model_of_very_short_sequences_is_refused():
    stack = build_layer_stack("gpt-tiny", {**SMALL, "sequence": 8}, device="meta", seed=0)

    with pytest.raises(ModelError, match="sequences of at most 8 tokens, must take 9"):
        capture_graph(stack)
