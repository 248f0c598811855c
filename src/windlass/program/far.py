"""Far: what lies in the tiers beyond the near one, the same all through a run."""

from collections.abc import Iterator

from windlass.program.phases import put_off, shares_room, travelling
from windlass.program.sizes import layer_sizes
from windlass.spec.graph import Graph
from windlass.spec.plan import HomeClass, Plan


def far_bytes(plan: Plan, graph: Graph) -> dict[str, dict[HomeClass, int]]:
    """Bytes in each far tier, by class; nothing for a plan that keeps all near.

    In float32 the weights are the masters too, and lie there once; if they stay near, the masters
    lie there with the moments. A gradient has a place there only if it waits there for its update,
    and where it may lie in place of the weights only as far as it is larger.

    Args:
        plan: of one stage.
        graph: that it cuts.
    """
    tiers: dict[str, dict[HomeClass, int]] = {}
    if not plan.streamed:
        return tiers
    held = dict(_held(plan, graph))
    for name, tier in plan.far_homes.items():
        tiers.setdefault(tier, {})[name] = held[name]
    return tiers


def _held(plan: Plan, graph: Graph) -> Iterator[tuple[HomeClass, int]]:
    kinds = tuple(graph.layer_kinds())
    waiting = sum(kinds[layer].parameter_count for layer in put_off(plan, graph))
    sizes = {name: layer_sizes(plan, kind) for name, kind in graph.kinds.items()}
    outputs = sum(sizes[kinds[layer].name].output for layer in travelling(plan, graph))
    # With one phase each micro-batch goes back before the next one comes.
    micros = plan.batch.accumulation if len(plan.stages[0].phases) > 1 else 1
    yield "weights", plan.weight_bytes * graph.parameter_count
    twins = 0 if plan.masters_apart or plan.far("weights") else 4 * graph.parameter_count
    yield "optimizer", sum(sizes[kind.name].optimizer for kind in kinds) + twins
    shared = plan.weight_bytes if shares_room(plan) else 0
    yield "gradients", max(0, plan.gradient_bytes - shared) * waiting
    yield "activations", outputs * micros
