"""Slices: what the t slices of one layer do together inside its passes.

A pass whose ops exchange waits for the same pass of the same micro-batch on every slice, so all
slices of one stage and replica run it at the same place of their programs. Gradients of parameters
that every slice has whole are partial: `reduce` sums them over the slices first.
"""

from windlass.program.activation_checkpointing import selected
from windlass.program.instruction import GRADIENT_PASSES, WEIGHT_PASSES, InstructionKind
from windlass.program.memory.layer_sizes import gradient_elements
from windlass.schema.graph import Graph, LayerCost, LayerKind, Op
from windlass.schema.plan import Plan

PASSES: tuple[InstructionKind, ...] = (*WEIGHT_PASSES, "backward_weight")
"""All that run a layer's ops."""


def ops_of(kind: InstructionKind, layer: LayerKind, cost: LayerCost, *, first: bool) -> tuple[Op, ...]:
    """The ops that an instruction runs, in turn; none if it is no pass.

    Of a backward pass in two parts, products that make a gradient are the weights' part; of a layer
    that looks rows up, and of the chain's first, whose tokens have no gradient, all is.

    Args:
        kind: of the instruction.
        layer: the kind of layer.
        cost: of that layer.
        first: whether it is the chain's first layer.
    """
    if kind in ("forward", "recompute"):
        return cost.forward
    if kind == "backward":
        return cost.backward
    if kind not in (*GRADIENT_PASSES, "backward_input"):
        return ()
    weights = kind == "backward_weight"
    return tuple(
        op
        for op in cost.backward
        if (first or layer.looks_up or gradient_elements(op) > 0) == weights
    )


def exchanging(plan: Plan, graph: Graph) -> frozenset[tuple[InstructionKind, int]]:
    """The passes, by kind and layer, in which the slices of a layer wait for each other."""
    if plan.parallel.tensor == 1:
        return frozenset()
    kinds, few = graph.shard(plan.parallel.tensor).kinds, selected(plan)
    among: dict[tuple[str, bool], tuple[InstructionKind, ...]] = {}
    takes_tokens = next(graph.layer_kinds()).name
    found: set[tuple[InstructionKind, int]] = set()
    for at, layer in enumerate(graph.layer_kinds()):
        name, selective = layer.name, at in few
        if (name, selective) not in among:
            cost = kinds[name].cost(plan.precision, compiled=plan.compile, selective=selective)
            first = name == takes_tokens
            among[name, selective] = tuple(
                kind
                for kind in PASSES
                if any(op.exchange for op in ops_of(kind, kinds[name], cost, first=first))
            )
        found.update((kind, at) for kind in among[name, selective])
    return frozenset(found)
