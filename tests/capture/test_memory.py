"""Bytes that a graph promises are the bytes that torch allocates."""

from collections.abc import Callable

import pytest
import torch
from measuring import weigh

from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.schema.graph import Graph, LayerCost

FAMILIES = {
    "gpt-tiny": {"layers": 1},
    "llama-tiny": {"layers": 1},
    "gpt-neox-20b": {"layers": 1, "width": 256, "heads": 4, "vocabulary": 3000},
}
MICRO, SEQUENCE = 3, 128


def forward_peak(cost: LayerCost) -> float:
    return max(op.live_bytes.at(MICRO, SEQUENCE) for op in cost.forward)


def backward_peak(cost: LayerCost) -> float:
    return max(op.live_bytes.at(MICRO, SEQUENCE) for op in cost.backward)


def kept(cost: LayerCost) -> float:
    return cost.saved_bytes.at(MICRO, SEQUENCE)


def off(predicted: float, low: float, high: float) -> float:
    """How far outside the range, as a share of its nearer end."""
    return max(low - predicted, predicted - high, 0) / high


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_run_as_written_takes_the_bytes_that_its_graph_says(
    captured: Callable[..., tuple[LayerStack, Graph]], name: str, index: int, precision: str
):
    chain = build_layer_stack(name, FAMILIES[name], device="cpu", seed=0)
    _, graph = captured(name, **FAMILIES[name])
    cost = graph.kinds[chain.kinds[index]].cost(precision, compiled=False)

    seen = weigh(
        chain, index, getattr(torch, precision), micro=MICRO, sequence=SEQUENCE, compiled=False
    )

    # In bfloat16 attention sums in hidden float32: so much for each of two threads.
    scratch = 48 * 2**10 * 2 if precision == "bfloat16" else 1024
    assert kept(cost) == pytest.approx(seen.kept, rel=0.001, abs=1024)
    assert forward_peak(cost) == pytest.approx(seen.forward_peak, rel=0.001, abs=scratch)
    # The caller counts gradients of parameters.
    assert off(backward_peak(cost), seen.backward_peak - seen.gradients, seen.backward_peak) < 0.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "index"), [("gpt2-124m", 1), ("gpt2-124m", 2), ("llama-tiny", 1)])
def test_a_compiled_layer_takes_the_bytes_that_its_graph_says(
    captured: Callable[..., tuple[LayerStack, Graph]], name: str, index: int, precision: str
):
    chain = build_layer_stack(name, {"layers": 1}, device="cpu", seed=0)
    _, graph = captured(name, layers=1)
    cost = graph.kinds[chain.kinds[index]].cost(precision, compiled=True)

    seen = weigh(
        chain, index, getattr(torch, precision), micro=MICRO, sequence=SEQUENCE, compiled=True
    )

    assert kept(cost) == pytest.approx(seen.kept, rel=0.1, abs=1024)
    assert forward_peak(cost) == pytest.approx(seen.forward_peak, rel=0.1)
    assert off(backward_peak(cost), seen.backward_peak - seen.gradients, seen.backward_peak) < 0.1
