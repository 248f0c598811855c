from .capture_layers import (
    capture_graph as capture_graph,
    capture_tensor_shards as capture_tensor_shards,
)
from .graph_cache import (
    graph_key as graph_key,
    load_graph as load_graph,
    save_graph as save_graph,
)
