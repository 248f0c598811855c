from .capture_layers import (
    capture_graph,
    capture_tensor_shards,
)
from .graph_cache import (
    graph_key,
    load_graph,
    save_graph,
)

__all__ = [
    "capture_graph",
    "capture_tensor_shards",
    "graph_key",
    "load_graph",
    "save_graph",
]
