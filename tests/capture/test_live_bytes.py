"""A graph predicts the bytes that torch allocates.

Graphs are the computed ones, which equal captured ones: `analytic/test_graph.py`.
"""

import pytest
import torch
from measured_memory import measure_memory
from torch.backends import mkldnn

from factories import catalog_graph
from windlass.models.build import build_layer_stack
from windlass.schema.graph import LayerCost

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


def saved(cost: LayerCost) -> float:
    return cost.saved_bytes.at(MICRO, SEQUENCE)


def relative_error(predicted: float, low: float, high: float) -> float:
    """Distance of a prediction to the range, relative to the range's upper end."""
    return max(low - predicted, predicted - high, 0) / high


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_eager_layer_takes_the_bytes_that_its_graph_predicts(
    name: str, index: int, precision: str
):
    stack = build_layer_stack(name, FAMILIES[name], device="cpu", seed=0)
    graph = catalog_graph(name, **FAMILIES[name])
    cost = graph.kinds[stack.kinds[index]].cost(precision, compiled=False)

    # In bfloat16 oneDNN's products take memory beside tensors, as much as the processor's
    # instructions ask for: with AMX 6 to 8 % of what these blocks take.
    is_plain = precision == "bfloat16" and index == 1
    with mkldnn.flags(enabled=not is_plain, deterministic=None, allow_tf32=None):
        measured = measure_memory(
            stack,
            index,
            getattr(torch, precision),
            micro_batch=MICRO,
            sequence=SEQUENCE,
            compiled=False,
        )

    # In bfloat16 attention accumulates in internal float32 buffers, one for each of two threads.
    scratch = 48 * 2**10 * 2 if precision == "bfloat16" else 1024
    assert saved(cost) == pytest.approx(measured.saved, rel=0.001, abs=1024)
    assert forward_peak(cost) == pytest.approx(measured.forward_peak, rel=0.001, abs=scratch)
    # Gradients of parameters count for the caller.
    assert (
        relative_error(
            backward_peak(cost), measured.backward_peak - measured.gradients, measured.backward_peak
        )
        < 0.02
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "index"), [("gpt2-124m", 1), ("gpt2-124m", 2), ("llama-tiny", 1)])
def test_a_compiled_layer_takes_the_bytes_that_its_graph_predicts(
    name: str, index: int, precision: str
):
    stack = build_layer_stack(name, {"layers": 1}, device="cpu", seed=0)
    graph = catalog_graph(name, layers=1)
    cost = graph.kinds[stack.kinds[index]].cost(precision, compiled=True)

    measured = measure_memory(
        stack, index, getattr(torch, precision), micro_batch=MICRO, sequence=SEQUENCE, compiled=True
    )

    assert saved(cost) == pytest.approx(measured.saved, rel=0.1, abs=1024)
    assert forward_peak(cost) == pytest.approx(measured.forward_peak, rel=0.1)
    assert (
        relative_error(
            backward_peak(cost), measured.backward_peak - measured.gradients, measured.backward_peak
        )
        < 0.1
    )
