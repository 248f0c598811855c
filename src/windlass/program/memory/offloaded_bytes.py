"""Offloaded bytes: what a plan keeps in its offload tiers, the same all through a run."""

from collections.abc import Iterator

from windlass.program.device_mesh import chunks_of_stage
from windlass.program.memory.layer_sizes import LayerSizes, StateSizes, plan_layer_sizes
from windlass.program.phases import (
    deferred_update_layers,
    gradients_reuse_weight_space,
    offloaded_activation_layers,
    owned_layers,
)
from windlass.program.pipeline_schedules import stage_passes
from windlass.schema import (
    HOST_TIER,
    PRECISION_BYTES,
    Graph,
    OffloadClass,
    Plan,
    Precision,
    optimizer_law,
)


def offloaded_bytes_by_tier(
    plan: Plan, graph: Graph, stage: int = 0, sizes: tuple[LayerSizes, ...] | None = None
) -> dict[str, dict[OffloadClass, int]]:
    """Bytes in each offload tier of one device, by class; empty if the plan offloads nothing.

    In float32 the weights are the master weights and are stored once; if the weights stay in device
    memory, the masters are stored with the moments. A gradient is stored only if it waits for a
    deferred update; where it may overwrite the layer's weights, only what it takes beyond them
    counts. Each replica stores only its own shards, and nobody
    what is read in the files of a base.

    Args:
        sizes: sizes of the plan's layers, where they are known; None counts them.
    """
    tiers: dict[str, dict[OffloadClass, int]] = {}
    if not plan.offloads:
        return tiers
    by_class = dict(_bytes_by_class(plan, graph, stage, sizes or plan_layer_sizes(plan, graph)))
    for name, tier in plan.offload_tiers.items():
        tiers.setdefault(tier, {})[name] = by_class[name]
    return tiers


def offloaded_state_bytes(plan: Plan, layer: LayerSizes | StateSizes) -> int:
    """Bytes of a layer's offloaded optimizer state.

    Master weights that stay in device memory as weights also have a copy there, which is updated
    with the moments.
    """
    copies_masters = not plan.has_master_weights and not plan.is_offloaded("parameters")
    return layer.optimizer + (layer.updated_weights if copies_masters else 0)


def offloaded_layer_bytes(
    plan: Plan, graph: Graph, layer: LayerSizes | StateSizes
) -> tuple[int, int]:
    """Offloaded bytes of a layer's weights and optimizer state; and of its gradient, if it waits.

    A gradient waits for a deferred update. Where it may overwrite the layer's weights, only what it
    takes beyond them counts.
    """
    reused = layer.updated_weights if gradients_reuse_weight_space(plan) else 0
    state = stored_weight_bytes(plan, graph, layer) + offloaded_state_bytes(plan, layer)
    return state, max(0, layer.gradient_shard - reused)


def update_state_bytes(plan: Plan, layer: LayerSizes | StateSizes) -> int:
    """Bytes of a layer's offloaded state that an update reads, and writes back, in all passes."""
    return optimizer_law(plan.optimizer).passes * offloaded_state_bytes(plan, layer)


def _bytes_by_class(
    plan: Plan, graph: Graph, stage: int, sizes: tuple[LayerSizes, ...]
) -> Iterator[tuple[OffloadClass, int]]:
    owned = [sizes[layer] for layer in owned_layers(plan, graph, stage)]
    deferred = [sizes[layer] for layer in deferred_update_layers(plan, graph, stage)]
    yield "parameters", sum(stored_weight_bytes(plan, graph, layer) for layer in owned)
    yield "optimizer", sum(offloaded_state_bytes(plan, layer) for layer in owned)
    yield "gradients", sum(offloaded_layer_bytes(plan, graph, layer)[1] for layer in deferred)
    yield "activations", offloaded_output_bytes(plan, graph, stage, sizes)


def offloaded_output_bytes(
    plan: Plan, graph: Graph, stage: int, sizes: tuple[LayerSizes, ...]
) -> int:
    """Most bytes of offloaded outputs of one device at once, as in `offloaded_bytes_by_tier`."""
    offloaded = offloaded_activation_layers(plan, graph, stage)
    if plan.is_offloaded("parameters"):  # all micro-batches run forward before the first backward
        return sum(sizes[layer].output for layer in offloaded) * plan.batch.accumulation
    chunks = [plan.stages[chunk] for chunk in chunks_of_stage(plan, stage)]
    chunk_bytes = [
        sum(
            sizes[layer].output
            for layer in offloaded
            if chunk.first_layer <= layer < chunk.end_layer
        )
        for chunk in chunks
    ]
    current = peak = 0
    for item in stage_passes(plan, stage):
        if item.kind == "forward":
            current += chunk_bytes[item.chunk]
            peak = max(peak, current)
        elif item.kind != "backward_weight":
            current -= chunk_bytes[item.chunk]
    return peak


_COMPUTED_IN: dict[Precision, Precision] = {
    "tf32": "float32",
    "float8": "bfloat16",
    "float4": "bfloat16",
}
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
