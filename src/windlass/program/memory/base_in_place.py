"""Frozen weights that phases read where they stand, in the files of the model's base."""

from windlass.program.memory.layer_sizes import LayerSizes, StateSizes
from windlass.schema import HOST_TIER, PRECISION_BYTES, Graph, Plan, Precision

_COMPUTED_IN: dict[Precision, Precision] = {"tf32": "float32", "float8": "bfloat16"}
"""Precisions whose weights are numbers of another one."""


def reads_base_in_place(plan: Plan, graph: Graph) -> bool:
    """Whether frozen weights stay in the files of the base, and take no space of an offload tier.

    They must become the plan's numbers without rounding. Tensor-parallel ranks have parts of
    weights that are in no order of a file.
    """
    if graph.base is None or not plan.is_offloaded("parameters"):
        return False
    stored, wanted = (_COMPUTED_IN.get(each, each) for each in (graph.base, plan.precision))
    widens = stored == wanted or PRECISION_BYTES[stored] < PRECISION_BYTES[wanted]
    return widens and plan.offload.parameters != HOST_TIER and int(plan.parallel.tensor) == 1


def stored_weight_bytes(plan: Plan, graph: Graph, layer: LayerSizes | StateSizes) -> int:
    """Bytes of a layer's weights that one device keeps in their offload tier."""
    if not reads_base_in_place(plan, graph):
        return layer.weight_shard
    return layer.weight_shard - layer.frozen_shard


def read_frozen_bytes(plan: Plan, graph: Graph, layer: LayerSizes) -> int:
    """Bytes of a layer's frozen weights that one device reads to have them once."""
    frozen = layer.frozen_shard
    if graph.base is None or not reads_base_in_place(plan, graph):
        return frozen
    return frozen * PRECISION_BYTES[graph.base] // plan.parameter_itemsize
