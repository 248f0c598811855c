"""Traces of layers with the names of their parameters, captured and computed."""

import pytest

from windlass.capture.analytic import analytic_traces
from windlass.capture.capture_layers import capture_traces
from windlass.models import model_config
from windlass.models.build import build_layer_stack
from windlass.models.catalog import apply_model_arguments
from windlass.schema.graph import PRECISION_BYTES, Precision
from windlass.schema.sparsity import SparsityRequest

SMALL = {"layers": 1, "width": 64, "heads": 4, "vocabulary": 50, "sequence": 90}


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_a_computed_trace_is_the_captured_one(model: str):
    stack = build_layer_stack(model, SMALL, device="meta")
    config = apply_model_arguments(model_config(model), SMALL)
    captured, computed = capture_traces(stack, "bfloat16"), analytic_traces(config, "bfloat16")
    assert captured.keys() == computed.keys()
    for kind, traced in captured.items():
        assert computed[kind].parameters == traced.parameters
        for first, second in zip(
            computed[kind].fitted.trace.calls, traced.fitted.trace.calls, strict=True
        ):
            assert (first.name, len(first.reads)) == (second.name, len(second.reads))


@pytest.mark.parametrize("sparsity", [None, SparsityRequest(level=0.5, block=16)])
def test_each_named_buffer_is_as_large_as_the_parameter_of_that_name(
    sparsity: SparsityRequest | None,
):
    precision: Precision = "bfloat16"
    stack = build_layer_stack("gpt-tiny", SMALL, device="meta", sparsity=sparsity)
    for kind, traced in capture_traces(stack, precision).items():
        layer = stack.layers[stack.kinds.index(kind)]
        sizes = {name: each.numel() for name, each in layer.named_parameters()}
        buffers = [each for each in traced.fitted.trace.buffers if each.role == "parameter"]
        for name, buffer in zip(traced.parameters, buffers, strict=True):
            if name in sizes:
                nbytes = traced.fitted.numbers[buffer.nbytes].at(1, 1)
                assert nbytes == sizes[name] * PRECISION_BYTES[precision]
