"""Holding: the layers of one stage, how large their values are, and whose weights they use."""

from windlass.program.activation_checkpointing import is_recomputed, selective_layers
from windlass.program.device_mesh import layers_of_stage
from windlass.program.memory.layer_sizes import LayerSizes, plan_layer_sizes
from windlass.program.memory.values import OFFLOADED_NAMES, BOUNCE_BYTES, STAGING_BYTES, TensorName, TensorId
from windlass.program.phases import offloaded_activation_layers
from windlass.program.tied_weights import tied_across_stages, tied_owner_layers
from windlass.schema.graph import Graph
from windlass.schema.plan import HOST_TIER, Plan

_TOKEN_BYTES = 8
"""Token numbers are int64, as torch's embedding and cross-entropy take them."""


class StageTensors:
    """What one stage of a plan holds.

    Args:
        plan: the plan.
        graph: the graph that it cuts.
        stage: index of the stage.
    """

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self.plan = plan
        self.layers = layers_of_stage(plan, stage)
        self.layer_set = frozenset(self.layers)
        self.last_layer = graph.layers - 1
        """The chain's last layer, which makes the loss."""
        self.boundaries = frozenset(
            at for at in range(self.last_layer) if (at in self.layer_set) != (at + 1 in self.layer_set)
        )
        """The layers whose outputs cross to or from another stage."""
        self.kinds = tuple(span.kind for span in graph.layer_runs for _ in range(span.count))
        self.sizes = plan_layer_sizes(plan, graph)
        self.recomputed_layers = frozenset(at for at in self.layers if is_recomputed(plan, at))
        """Layers whose forward runs again before their backward."""
        self.selective = selective_layers(plan)
        """Layers whose backward begins with most of their forward, of any stage."""
        lent = tied_across_stages(plan, graph)
        self.tied_as_user = {loan.user_layer: loan for loan in lent if loan.user_stage == stage}
        """By the layer that they go by."""
        self.tied_as_owner = {loan.user_layer: loan for loan in lent if loan.owner_stage == stage}
        self._borrowed = {loan.owner_layer: loan.elements for loan in self.tied_as_user.values()}
        self._owners = tied_owner_layers(graph)
        self._passing = _passing(plan, stage, self.sizes)
        self._tokens = 2 * plan.batch.micro * plan.batch.sequence * _TOKEN_BYTES
        self._held: TensorName = "weights shard" if plan.sharding.parameters > 1 else "weights"
        self._summed: TensorName = "gradient shard" if plan.sharding.optimizer > 1 else "gradients"

    @property
    def loads_batches(self) -> bool:
        """Whether the stage holds the embedding or the loss."""
        return 0 in self.layer_set or self.last_layer in self.layer_set

    def gradient_targets(self, layer: int) -> tuple[int, ...]:
        """The layers at which the gradients of a layer's weights are summed: its own and tied."""
        return (layer, *(owner for owner in self._owners[layer] if owner != layer))

    def pass_weights(self, layer: int) -> tuple[TensorId, ...]:
        """What a layer computes with."""
        return tuple(
            TensorId("weights" if at in self.layer_set else "borrowed weights", at)
            for at in self.gradient_targets(layer)
            if self.sizes[at].weights
        )

    def pass_gradient_sums(self, layer: int) -> tuple[TensorId, ...]:
        """What a layer's backward passes add to."""
        return tuple(
            TensorId("gradients" if at in self.layer_set else "borrowed gradients", at)
            for at in self.gradient_targets(layer)
            if self.sizes[at].gradients
        )

    def reduces_gradients(self, layer: int) -> bool:
        """Whether a gradient is summed over replicas, or over slices what they have whole."""
        sizes = self.sizes[layer]
        common = sizes.replicated_gradients + sizes.replicated_in_columns + sizes.replicated_in_rows
        return self.plan.parallel.data > 1 or common > 0

    def weights_between_passes(self, layer: int) -> TensorId:
        """A layer's weights between uses: the device's shard, or all where none are shared."""
        return TensorId(self._held, layer)

    def final_gradient(self, layer: int) -> TensorId:
        """What norm and update read: the device's shard, or all where none is shared."""
        return TensorId(self._summed, layer)

    def final_gradients(self, layers: tuple[int, ...]) -> tuple[TensorId, ...]:
        """The same of those layers that have weights."""
        return tuple(self.final_gradient(at) for at in layers if self.sizes[at].gradients)

    def bytes_of(self, value: TensorId) -> int:
        """How large a value is."""
        if value.name in OFFLOADED_NAMES:
            return 0
        if value.name == "tokens":
            return self._tokens
        if value.name == "staging":
            return STAGING_BYTES
        if value.name == "passing":
            return self._passing
        layer = value.layer or 0
        if value.name == "borrowed weights":
            return self._borrowed[layer] * self.plan.parameter_itemsize
        if value.name == "borrowed gradients":
            return self._borrowed[layer] * self.plan.gradient_itemsize
        sizes = self.sizes[layer]
        known: dict[TensorName, int] = {
            "weights": sizes.weights,
            "weights shard": sizes.weight_shard,
            "optimizer": sizes.optimizer,
            "gradients": sizes.gradients + sizes.sparse_rows,
            "gradient shard": sizes.gradient_shard,
            "kept": sizes.saved,
            "inner gradients": sizes.saved,
        }
        return known.get(value.name, sizes.output)


def _passing(plan: Plan, stage: int, sizes: tuple[LayerSizes, ...]) -> int:
    """The largest output that goes home, and for files both halves of a bounce; 0 if none does."""
    largest = max((sizes[at].output for at in offloaded_activation_layers(plan, stage)), default=0)
    bounced = largest > 0 and plan.offload.activations != HOST_TIER
    return largest + (2 * BOUNCE_BYTES if bounced else 0)
