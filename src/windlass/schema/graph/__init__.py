"""The graph of a model: what one training step computes and holds, layer by layer."""

from windlass.schema.graph.layer_cost import (
    PRECISION_BYTES, Collective, CollectiveAxis, CollectiveKind, KeptBlocks, LayerCost, MatmulShape,
    Op, OpKind, OtherAttention, Polynomial, Precision, captured_precision,
)  # fmt: skip
from windlass.schema.graph.layer_graph import (
    GradientReach, Graph, LayerKind, LayerRun, ParameterInfo,
)  # fmt: skip

__all__ = [
    "PRECISION_BYTES", "Collective", "CollectiveAxis", "CollectiveKind", "GradientReach", "Graph",
    "KeptBlocks", "LayerCost", "LayerKind", "LayerRun", "MatmulShape", "Op", "OpKind",
    "OtherAttention", "ParameterInfo", "Polynomial", "Precision", "captured_precision",
]  # fmt: skip
