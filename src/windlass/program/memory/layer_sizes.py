"""Sizes: bytes of what one layer holds, makes and needs for one micro-batch of a plan."""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.program.activation_checkpointing import selective_layers
from windlass.program.zero_sharding import padded_elements
from windlass.schema.graph import Graph, LayerCost, LayerKind, Op, Polynomial
from windlass.schema.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Bytes of one layer's values for one micro-batch of the plan."""

    weights: int
    """What layers compute with: all of them, laid flat and padded where they are shared."""
    weight_shard: int
    """Weights that stay on a device between uses: one shard of them, or all."""
    updated_weights: int
    """Of those, what the device itself updates."""
    optimizer: int
    """The device's share of the state."""
    gradients: int
    gradient_shard: int
    """The gradient of the part that the device updates."""
    output: int
    saved: int
    forward_peak: int
    """Most that the forward pass allocates, its output and what it keeps included."""
    backward_peak: int
    """Most that the backward pass allocates above what was kept for it, fresh gradients included.
    """
    pass_gradients: int
    """Gradients that one backward pass makes, tied weights included."""
    largest_pass_gradient: int
    """The largest of them."""
    sparse_gradients: bool
    """They are rows of the weights, so that none of them becomes the sum itself."""
    replicated_gradients: int
    """Of the gradients, those of parameters that every slice has whole; 0 of whole layers."""
    replicated_in_columns: int
    """Of the gradients, those of parameters that the slices of one column of a grid have."""
    replicated_in_rows: int
    """Of the gradients, those of parameters that the slices of one row of a grid have."""
    sparse_rows: int
    """What rows of all micro-batches but the last take until they are added to the gradient, in
    float32: so much is there at the fullest moment of the last."""


class StateSizes(NamedTuple):
    """Bytes of what one layer holds whatever runs through it; each as in `LayerSizes`."""

    weights: int
    weight_shard: int
    updated_weights: int
    optimizer: int
    gradients: int
    gradient_shard: int
    replicated_gradients: int
    replicated_in_columns: int
    replicated_in_rows: int


def plan_state_sizes(plan: Plan, graph: Graph, tensor_rank: int = 0) -> tuple[StateSizes, ...]:
    """The states of every layer of the chain under a plan: what of `sizes_of` takes no time."""
    kinds = graph.shard(plan.parallel.tensor, tensor_rank).kinds
    by_kind = {name: layer_kind_state_sizes(plan, kind) for name, kind in kinds.items()}
    return tuple(by_kind[kind.name] for kind in graph.layer_kinds())


def plan_layer_sizes(plan: Plan, graph: Graph, tensor_rank: int = 0) -> tuple[LayerSizes, ...]:
    """The sizes of every layer of the chain under a plan, found once for each kind.

    Args:
        plan: the plan.
        graph: that it cuts.
        index: of the slice; the first is the largest.
    """
    kinds, few = graph.shard(plan.parallel.tensor, tensor_rank).kinds, selective_layers(plan)
    found: dict[tuple[str, bool], LayerSizes] = {}
    for at, kind in enumerate(graph.layer_kinds()):
        key = kind.name, at in few
        if key not in found:
            found[key] = layer_kind_sizes(plan, kinds[kind.name], selective=at in few)
    return tuple(found[kind.name, at in few] for at, kind in enumerate(graph.layer_kinds()))


def layer_kind_sizes(plan: Plan, kind: LayerKind, *, selective: bool = False) -> LayerSizes:
    """The sizes of all layers of one kind, whole or one slice's, under a plan.

    Args:
        plan: the plan.
        kind: of the layers.
        selective: whether they keep only what their large products give.
    """
    cost = kind.cost(plan.precision, compiled=plan.compile, selective=selective)
    micro, sequence = plan.batch.micro, plan.batch.sequence
    kept = round(cost.saved_bytes.at(micro, sequence))
    fresh = kind.pass_gradient_elements(micro, sequence)
    return LayerSizes(
        **layer_kind_state_sizes(plan, kind)._asdict(),
        output=round(cost.output_bytes.at(micro, sequence)),
        saved=kept,
        forward_peak=round(
            max((op.live_bytes.at(micro, sequence) for op in cost.forward), default=0)
        ),
        backward_peak=max(0, _backward_peak(plan, kind, cost) - kept),
        pass_gradients=sum(fresh) * plan.parameter_itemsize,
        largest_pass_gradient=max(fresh, default=0) * plan.parameter_itemsize,
        sparse_gradients=kind.is_embedding,
        sparse_rows=sparse_gradient_bytes(plan, kind),
    )


def layer_kind_state_sizes(plan: Plan, kind: LayerKind) -> StateSizes:
    """The states of all layers of one kind, whole or one slice's, under a plan."""
    counts = tuple(p.count for p in kind.parameters if p.tied_to is None)
    whole = padded_elements(kind.parameter_count, plan)
    part = whole // plan.sharding.optimizer
    shared = plan.sharding.optimizer > 1  # then it is one flat piece, not weight by weight
    return StateSizes(
        weights=whole * plan.parameter_itemsize,
        weight_shard=whole // plan.sharding.parameters * plan.parameter_itemsize,
        updated_weights=part * plan.parameter_itemsize,
        optimizer=plan.state_bytes(part) if shared else sum(map(plan.state_bytes, counts)),
        gradients=whole * plan.gradient_itemsize,
        gradient_shard=part * plan.gradient_itemsize,
        replicated_gradients=kind.replicated_count("all") * plan.gradient_itemsize,
        replicated_in_columns=kind.replicated_count("tokens") * plan.gradient_itemsize,
        replicated_in_rows=kind.replicated_count("features") * plan.gradient_itemsize,
    )


def sparse_gradient_bytes(plan: Plan, kind: LayerKind) -> int:
    """What looked-up rows of a step's earlier micro-batches take, as in `LayerSizes.rows`."""
    if not kind.is_embedding or plan.batch.accumulation == 1:
        return 0
    before = plan.batch.micro * (plan.batch.accumulation - 1)
    return 4 * sum(kind.pass_gradient_elements(before, plan.batch.sequence))


def _backward_peak(plan: Plan, kind: LayerKind, cost: LayerCost) -> int:
    """The fullest moment of a backward pass: what is alive, and the gradients made so far.

    A product whose result does not depend on micro-batch and sequence makes a weight's gradient,
    and makes it only then: at the logits' fullest moment the head has none yet. Gradients that come
    from no product (norms, the embedding) are counted from the start.
    """
    made = [weight_gradient_elements(op) for op in cost.backward]
    fresh = kind.pass_gradient_elements(plan.batch.micro, plan.batch.sequence)
    so_far = max(0, sum(fresh) - sum(made))
    peak = 0.0
    for op, elements in zip(cost.backward, made, strict=True):
        so_far += elements
        live = op.live_bytes.at(plan.batch.micro, plan.batch.sequence)
        peak = max(peak, live + so_far * plan.parameter_itemsize)
    return round(peak)


def weight_gradient_elements(op: Op) -> int:
    """Elements of a product's result if it has a fixed size; 0 of any other op."""
    if op.shape is None:
        return 0
    sides = (op.shape.batch, op.shape.m, op.shape.n)
    if any(side != Polynomial(side.one) for side in sides):
        return 0
    return round(op.shape.batch.one * op.shape.m.one * op.shape.n.one)
