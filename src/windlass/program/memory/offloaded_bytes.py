"""Far: what lies in the tiers beyond the near one, the same all through a run."""

from collections.abc import Iterator

from windlass.program.device_mesh import chunks_of_stage
from windlass.program.memory.layer_sizes import LayerSizes, StateSizes, plan_layer_sizes
from windlass.program.phases import owned_layers, deferred_update_layers, gradients_reuse_weight_space, offloaded_activation_layers
from windlass.program.pipeline_schedules import stage_passes
from windlass.schema.graph import Graph
from windlass.schema.plan import OffloadClass, Plan


def offloaded_bytes_by_tier(plan: Plan, graph: Graph, stage: int = 0) -> dict[str, dict[OffloadClass, int]]:
    """Bytes in each far tier of one device, by class; nothing for a plan that keeps all near.

    In float32 the weights are the masters too, and lie there once; if they stay near, the masters
    lie there with the moments. A gradient has a place there only if it waits there for its update,
    and where it may lie in place of the weights only as far as it is larger. Of what replicas share
    each has its own shard there.

    Args:
        plan: the plan.
        graph: that it cuts.
        stage: of the device.
    """
    tiers: dict[str, dict[OffloadClass, int]] = {}
    if not plan.offloads:
        return tiers
    held = dict(_held(plan, graph, stage))
    for name, tier in plan.offload_tiers.items():
        tiers.setdefault(tier, {})[name] = held[name]
    return tiers


def offloaded_state_bytes(plan: Plan, layer: LayerSizes | StateSizes) -> int:
    """Bytes of a layer's optimizer state at home, which an update reads and writes back.

    Masters that stay near as weights have a twin there, which is updated with the moments.
    """
    twins = not plan.has_master_weights and not plan.is_offloaded("parameters")
    return layer.optimizer + (layer.updated_weights if twins else 0)


def _held(plan: Plan, graph: Graph, stage: int) -> Iterator[tuple[OffloadClass, int]]:
    sizes = plan_layer_sizes(plan, graph)
    own = [sizes[layer] for layer in owned_layers(plan, graph, stage)]
    shares = gradients_reuse_weight_space(plan)
    yield "parameters", sum(layer.weight_shard for layer in own)
    yield "optimizer", sum(offloaded_state_bytes(plan, layer) for layer in own)
    waiting = [sizes[layer] for layer in deferred_update_layers(plan, graph, stage)]
    yield "gradients", sum(max(0, each.gradient_shard - (each.weight_shard if shares else 0)) for each in waiting)
    yield "activations", _outputs(plan, stage, sizes)


def _outputs(plan: Plan, stage: int, sizes: tuple[LayerSizes, ...]) -> int:
    """The most that outputs take there at once."""
    travels = offloaded_activation_layers(plan, stage)
    if plan.is_offloaded(
        "parameters"
    ):  # every micro-batch has gone forward before the first one goes back
        return sum(sizes[layer].output for layer in travels) * plan.batch.accumulation
    chunks = [plan.stages[chunk] for chunk in chunks_of_stage(plan, stage)]
    each = [
        sum(sizes[layer].output for layer in travels if chunk.first_layer <= layer < chunk.end_layer)
        for chunk in chunks
    ]
    now = most = 0
    for turn in stage_passes(plan, stage):
        if turn.kind == "forward":
            now += each[turn.chunk]
            most = max(most, now)
        elif turn.kind != "backward_weight":
            now -= each[turn.chunk]
    return most
