"""Layer sizes: bytes of a layer's parameters, state and activations for one micro-batch."""

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, cast

from windlass.program.activation_checkpointing import selective_layers
from windlass.program.attention_costs import with_attention
from windlass.program.replicas.context_parallel import micro_of_rank
from windlass.program.replicas.expert_parallel import rank_kinds
from windlass.program.replicas.zero_sharding import (
    expert_sharding,
    padded_elements,
    padded_frozen_elements,
)
from windlass.schema import (
    Graph,
    LayerCost,
    LayerKind,
    Op,
    Plan,
    Polynomial,
    optimizer_law,
)

_NAMES_OF_SIZES = tuple(
    sorted(Plan.model_fields.keys() - {"graph", "machine", "model", "stages", "offload"})
)
"""The fields of a plan that the sizes of its layers may depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Bytes of one layer's tensors on one device, for one micro-batch of the plan."""

    weights: int
    """Full weights that the layer computes with; flattened and padded where they are sharded."""
    gathered: int
    """What an all-gather brings beside the shard: all of `weights` but experts that are
    whole in it."""
    weight_shard: int
    """Weights that stay on a device between uses: one parameter shard, or all of them."""
    updated_weights: int
    """The part of `weight_shard` that this device updates."""
    frozen: int
    """The part of `weights` that is never updated."""
    frozen_shard: int
    """The part of `weight_shard` that is never updated."""
    optimizer: int
    """This device's shard of the optimizer state."""
    gradients: int
    """Full gradients, accumulated over micro-batches."""
    gradient_shard: int
    """Gradient of the part that this device updates."""
    output: int
    """Output activations."""
    saved: int
    """Activations saved for backward, apart from the layer's input and output."""
    forward_peak: int
    """Most that the forward pass allocates, including its output and saved activations."""
    backward_peak: int
    """Most that the backward pass allocates above the saved activations, including gradients."""
    pass_gradients: int
    """Weight gradients that one backward pass makes, including those of tied weights."""
    largest_pass_gradient: int
    """The largest of these gradients."""
    sparse_gradients: bool
    """Whether these gradients cover only looked-up rows and so cannot become the sum itself."""
    replicated_gradients: int
    """Gradients of parameters that all tensor-parallel ranks replicate; 0 without tensor
    parallelism."""
    replicated_in_columns: int
    """Gradients of parameters that the ranks of one column of a tensor-parallel grid replicate."""
    replicated_in_rows: int
    """Gradients of parameters that the ranks of one row of a tensor-parallel grid replicate."""
    sparse_rows: int
    """float32 rows of all micro-batches but the last that wait to be added to a sparse gradient at
    the fullest moment of the last."""


class StateSizes(NamedTuple):
    """Bytes of a layer's model state, independent of its activations; fields as in `LayerSizes`."""

    weights: int
    weight_shard: int
    updated_weights: int
    frozen: int
    frozen_shard: int
    optimizer: int
    gradients: int
    gradient_shard: int
    replicated_gradients: int
    replicated_in_columns: int
    replicated_in_rows: int
    experts: "StateSizes | None" = None
    """The part of experts that expert-parallel ranks divide; None if that is nothing."""

    def parts(self, plan: Plan) -> "tuple[tuple[Plan, StateSizes], ...]":
        """The parts that replicas share in other ways, each with the plan as it sees it."""
        if self.experts is None:
            return ((plan, self),)
        pairs = zip(self.numbers, self.experts.numbers, strict=True)
        others = StateSizes._make((*(total - experts for total, experts in pairs), None))
        return ((plan, others), (expert_sharding(plan), self.experts))

    def plus_experts(self, experts: "StateSizes") -> "StateSizes":
        """These sizes, of all other weights, with those of experts."""
        total = map(sum, zip(self.numbers, experts.numbers, strict=True))
        return StateSizes._make((*total, experts))

    @property
    def gathered(self) -> int:
        """As in `LayerSizes`: experts may be whole where others are sharded."""
        experts = self.experts
        if experts is None or experts.weight_shard != experts.weights:
            return self.weights
        return self.weights - experts.weights

    @property
    def numbers(self) -> tuple[int, ...]:
        """All sizes, experts among them."""
        return tuple(each for each in self[:-1] if isinstance(each, int))


def plan_state_sizes(plan: Plan, graph: Graph, tensor_rank: int = 0) -> tuple[StateSizes, ...]:
    """Model state sizes of every layer under a plan; much faster than `plan_layer_sizes`."""
    kinds = rank_kinds(plan, graph, tensor_rank)
    by_kind = {name: layer_kind_state_sizes(plan, kind) for name, kind in kinds.items()}
    return tuple(by_kind[kind.name] for kind in graph.layer_kinds())


def plan_layer_sizes(plan: Plan, graph: Graph, tensor_rank: int = 0) -> tuple[LayerSizes, ...]:
    """Sizes of every layer under a plan, computed once for each layer kind.

    Args:
        tensor_rank: tensor-parallel rank; rank 0 has the largest shard.
    """
    kinds = rank_kinds(plan, graph, tensor_rank)
    selective = selective_layers(plan)
    alike = tensor_rank, *(getattr(plan, name) for name in _NAMES_OF_SIZES)
    cache = cast(
        "dict[tuple[str, bool, bool], LayerSizes]", graph.layer_sizes.setdefault(alike, {})
    )
    keys = [
        (kind.name, index in selective, graph.gradient_reach(index) == "nothing")
        for index, kind in enumerate(graph.layer_kinds())
    ]
    for name, is_selective, runs_forward_only in set(keys) - cache.keys():
        sizes = layer_kind_sizes(plan, kinds[name], selective=is_selective)
        if runs_forward_only:
            sizes = replace(sizes, saved=0, backward_peak=0)
        cache[name, is_selective, runs_forward_only] = sizes
    return tuple(cache[key] for key in keys)


def layer_kind_sizes(plan: Plan, kind: LayerKind, *, selective: bool = False) -> LayerSizes:
    """Sizes of any layer of one kind, full or tensor-parallel shard, under a plan.

    Args:
        selective: whether the layer is recomputed selectively.
    """
    cost = kind.cost(plan.precision, compiled=plan.compile, selective=selective)
    cost = with_attention(cost, kind, plan.attention, plan.batch.sequence, selective=selective)
    micro, sequence = micro_of_rank(plan), plan.batch.sequence
    saved = round(cost.saved_bytes.at(micro, sequence))
    pass_gradients = kind.pass_gradient_elements(micro, sequence)
    state = layer_kind_state_sizes(plan, kind)
    return LayerSizes(
        **dict(zip(StateSizes._fields, state.numbers, strict=False)),
        gathered=state.gathered,
        output=round(cost.output_bytes.at(micro, sequence)),
        saved=saved,
        forward_peak=round(
            max((op.live_bytes.at(micro, sequence) for op in cost.forward), default=0)
        ),
        backward_peak=max(0, _backward_peak(plan, kind, cost) - saved),
        pass_gradients=sum(pass_gradients) * plan.parameter_itemsize,
        largest_pass_gradient=max(pass_gradients, default=0) * plan.parameter_itemsize,
        sparse_gradients=kind.is_embedding,
        sparse_rows=sparse_gradient_bytes(plan, kind),
    )


def layer_kind_state_sizes(plan: Plan, kind: LayerKind) -> StateSizes:
    """Model state sizes of any layer of one kind under a plan.

    Args:
        kind: the layer kind: full, a tensor-parallel shard, or with one rank's experts.
    """
    sizes, *experts = (_state_sizes(*part) for part in _kind_parts(plan, kind))
    return sizes.plus_experts(*experts) if experts else sizes


def updated_elements(plan: Plan, kind: LayerKind) -> int:
    """Elements of a layer that one device updates: its shard, if replicas share optimizer state."""
    return sum(
        padded_elements(part.trained_count, own) // own.sharding.optimizer
        for own, part in _kind_parts(plan, kind)
    )


def _kind_parts(plan: Plan, kind: LayerKind) -> tuple[tuple[Plan, LayerKind], ...]:
    """A layer, or its experts apart from the rest, each with the plan as that part sees it."""
    if plan.parallel.expert is None or not any(p.expert for p in kind.parameters):
        return ((plan, kind),)
    return (
        (plan, _with_parameters(kind, experts=False)),
        (expert_sharding(plan), _with_parameters(kind, experts=True)),
    )


def _with_parameters(kind: LayerKind, *, experts: bool) -> LayerKind:
    """A layer kind with its experts alone, or without them."""
    return LayerKind.model_construct(
        name=kind.name,
        parameters=tuple(p for p in kind.parameters if bool(p.expert) == experts),
        costs=(),
        is_hidden=kind.is_hidden,
    )


def _state_sizes(plan: Plan, kind: LayerKind) -> StateSizes:
    padded = padded_elements(kind.trained_count, plan)
    updated = padded // plan.sharding.optimizer
    frozen = padded_frozen_elements(kind.parameter_count - kind.trained_count, plan)
    weights = padded + frozen
    return StateSizes(
        weights=weights * plan.parameter_itemsize,
        weight_shard=weights // plan.sharding.parameters * plan.parameter_itemsize,
        updated_weights=updated * plan.parameter_itemsize,
        frozen=frozen * plan.parameter_itemsize,
        frozen_shard=frozen // plan.sharding.parameters * plan.parameter_itemsize,
        optimizer=_optimizer_bytes(plan, kind, updated),
        gradients=padded * plan.gradient_itemsize,
        gradient_shard=updated * plan.gradient_itemsize,
        replicated_gradients=kind.replicated_count("all") * plan.gradient_itemsize,
        replicated_in_columns=kind.replicated_count("tokens") * plan.gradient_itemsize,
        replicated_in_rows=kind.replicated_count("features") * plan.gradient_itemsize,
    )


def _optimizer_bytes(plan: Plan, kind: LayerKind, updated: int) -> int:
    """Bytes of the optimizer state of a layer on one device, which updates so many elements of it.

    Where it is sharded the state is one flat tensor, in which matrices have an even share, beside
    the means over rows and columns of the weights, of which a rank has all at most.
    """
    law = optimizer_law(plan.optimizer)
    own = kind.updated_as_matrices(law)
    matrices = {p.name: p.count for p in own}
    factors = max(4, plan.parameter_itemsize) * sum(law.factor_elements(p.shape) for p in own)
    if plan.sharding.optimizer > 1:
        in_matrices = sum(matrices.values()) // plan.sharding.optimizer
        others = plan.state_bytes(updated - in_matrices)
        return others + plan.state_bytes(in_matrices, matrix=True) + factors
    states = (plan.state_bytes(p.count, matrix=p.name in matrices) for p in kind.trained)
    return sum(states) + factors


def sparse_gradient_bytes(plan: Plan, kind: LayerKind) -> int:
    """Bytes of the looked-up rows of a step's earlier micro-batches, `LayerSizes.sparse_rows`."""
    if not kind.is_embedding or plan.batch.accumulation == 1:
        return 0
    before = micro_of_rank(plan) * (plan.batch.accumulation - 1)
    return 4 * sum(kind.pass_gradient_elements(before, plan.batch.sequence))


def _backward_peak(plan: Plan, kind: LayerKind, cost: LayerCost) -> int:
    """The fullest moment of a backward pass: live activations and the gradients made so far.

    A matrix product makes a weight gradient if its result size depends on neither micro-batch nor
    sequence, and the gradient exists only from then on: at the fullest moment of the logits the
    head has none yet. Gradients that come from no product (norms, the embedding) are counted from
    the start.
    """
    op_elements = [weight_gradient_elements(op) for op in cost.backward]
    micro = micro_of_rank(plan)
    pass_elements = kind.pass_gradient_elements(micro, plan.batch.sequence)
    so_far = max(0, sum(pass_elements) - sum(op_elements))
    peak = 0.0
    for op, elements in zip(cost.backward, op_elements, strict=True):
        so_far += elements
        live = op.live_bytes.at(micro, plan.batch.sequence)
        peak = max(peak, live + so_far * plan.parameter_itemsize)
    return round(peak)


def weight_gradient_elements(op: Op) -> int:
    """Elements of a matrix product's result if its size is fixed; 0 for any other op.

    The gradient of a sparse weight has those of its kept blocks.
    """
    if op.shape is None:
        return 0
    sides = (op.shape.batch, op.shape.m, op.shape.n)
    if any(side != Polynomial(side.constant) for side in sides):
        return 0
    density = 1.0 if op.kept is None else op.kept.density
    return round(prod(side.constant for side in sides) * density)
