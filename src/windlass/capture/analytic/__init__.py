"""Graphs of the catalog's transformers without torch, equal to those that `capture` records.

A layer runs forward and backward on tensors that have a shape and a storage but no elements. Its
operations are those that PyTorch's own modules and derivatives call on a CPU, in their order, so
that the trace is the one that a capture records; micro-batch and sequence are symbols in it.
"""

from windlass.capture.analytic.graph import (
    analytic_graph, analytic_tensor_shards, analytic_traces, check_analytic_degrees,
    parameter_count,
)  # fmt: skip

__all__ = [
    "analytic_graph", "analytic_tensor_shards", "analytic_traces", "check_analytic_degrees",
    "parameter_count",
]  # fmt: skip
