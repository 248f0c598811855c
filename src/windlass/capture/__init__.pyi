from .analytic import (
    analytic_graph, analytic_tensor_shards, analytic_traces, check_analytic_degrees,
    parameter_count,
)  # fmt: skip
from .capture_layers import (
    capture_graph, capture_tensor_shards, capture_traces, check_tensor_degrees,
)  # fmt: skip
from .graph_cache import graph_key, load_graph, save_graph
from .graph_on_stack import stack_graph
from .half_blocks import split_blocks
from .image_layers import ImageModel, image_graph
from .trace import FittedTrace, NamedTrace, TracedCall

__all__ = [
    "FittedTrace", "ImageModel", "NamedTrace", "TracedCall", "analytic_graph",
    "analytic_tensor_shards", "analytic_traces", "capture_graph", "capture_tensor_shards",
    "capture_traces", "check_analytic_degrees", "check_tensor_degrees", "graph_key", "image_graph",
    "load_graph", "parameter_count", "save_graph", "split_blocks", "stack_graph",
]  # fmt: skip
