"""The ops of each pass, and which passes contain collectives.

A pass whose ops communicate waits for the same pass of the same micro-batch on every rank that
takes part (tensor-, expert- or context-parallel), so all those ranks run it at the same position of
their programs. With tensor parallelism gradients of replicated parameters are partial sums:
`reduce_grads` first adds them over tensor-parallel ranks.
"""

from windlass.program.activation_checkpointing import selective_layers
from windlass.program.instruction import GRADIENT_PASSES, WEIGHT_PASSES, InstructionKind
from windlass.program.memory.layer_sizes import weight_gradient_elements
from windlass.program.replicas.expert_parallel import rank_kinds
from windlass.schema import GradientReach, Graph, LayerCost, LayerKind, Op, Plan

LAYER_PASSES: tuple[InstructionKind, ...] = (*WEIGHT_PASSES, "backward_weight")
"""All kinds that run a layer's ops."""


def pass_ops(
    kind: InstructionKind, layer: LayerKind, cost: LayerCost, *, reach: GradientReach
) -> tuple[Op, ...]:
    """The ops that an instruction runs, in order; none if it is no pass.

    In a split backward pass, matrix products that make a gradient belong to the weight-gradient
    part. For an embedding, and for the first trained layer, whose input has no gradient, the whole
    backward pass does.
    """
    if reach == "nothing" and kind != "forward":
        return ()
    if kind in ("forward", "recompute"):
        repeated = cost.recompute if kind == "recompute" else None
        return cost.forward if repeated is None else repeated
    if kind == "backward":
        return cost.backward
    if kind not in (*GRADIENT_PASSES, "backward_input"):
        return ()
    wants_weights = kind == "backward_weight"
    whole = reach == "weights" or layer.is_embedding
    return tuple(
        op for op in cost.backward if (whole or weight_gradient_elements(op) > 0) == wants_weights
    )


def has_collectives(plan: Plan) -> bool:
    """Whether passes of any layer contain collectives."""
    parallel = plan.parallel
    divides_tokens = parallel.expert is not None or parallel.context is not None
    return parallel.tensor > 1 or divides_tokens


def passes_with_collectives(plan: Plan, graph: Graph) -> frozenset[tuple[InstructionKind, int]]:
    """The passes, by kind and layer, in which ranks of a stage wait for each other."""
    if not has_collectives(plan):
        return frozenset()
    kinds, selective = rank_kinds(plan, graph), selective_layers(plan)
    cache: dict[tuple[str, bool, GradientReach], tuple[InstructionKind, ...]] = {}
    passes: set[tuple[InstructionKind, int]] = set()
    for index, layer in enumerate(graph.layer_kinds()):
        key = layer.name, index in selective, graph.gradient_reach(index)
        if key not in cache:
            kind = kinds[layer.name]
            cost = kind.cost(plan.precision, compiled=plan.compile, selective=index in selective)
            cache[key] = tuple(
                pass_kind
                for pass_kind in LAYER_PASSES
                if any(op.collective for op in pass_ops(pass_kind, kind, cost, reach=key[2]))
            )
        passes.update((pass_kind, index) for pass_kind in cache[key])
    return frozenset(passes)
