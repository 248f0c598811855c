"""Stage tensors: the layers of one pipeline stage, their tensors and the sizes of these."""

from windlass.program.activation_checkpointing import is_recomputed, selective_layers
from windlass.program.device_mesh import layers_of_stage
from windlass.program.memory.layer_sizes import LayerSizes, plan_layer_sizes
from windlass.program.memory.values import (
    BOUNCE_BYTES,
    OFFLOADED_NAMES,
    STAGING_BYTES,
    TensorId,
    TensorName,
)
from windlass.program.phases import offloaded_activation_layers
from windlass.program.tied_weights import tied_across_stages, tied_owner_layers
from windlass.schema import HOST_TIER, Graph, Plan


class StageTensors:
    """The tensors of one stage of a plan."""

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self.plan, self.graph = plan, graph
        self.layers = layers_of_stage(plan, stage)
        self.layer_set = frozenset(self.layers)
        self.last_layer = graph.layers - 1
        """The model's last layer, which computes the loss."""
        self.boundaries = frozenset(
            layer
            for layer in range(self.last_layer)
            if (layer in self.layer_set) != (layer + 1 in self.layer_set)
        )
        """The layers whose outputs cross to or from another stage; their gradients cross back from
        `first_trained` on."""
        self.kinds = tuple(run.kind for run in graph.layer_runs for _ in range(run.count))
        self.sizes = plan_layer_sizes(plan, graph)
        self.first_trained = graph.first_trained
        """The layer where the backward pass ends, of any stage; those before it have none."""
        self.recomputed_layers = frozenset(
            layer
            for layer in self.layers
            if layer >= self.first_trained and is_recomputed(plan, layer)
        )
        """Layers that run their full forward again before their backward."""
        self.selective = selective_layers(plan)
        """Selectively recomputed layers, of any stage."""
        tied = tied_across_stages(plan, graph)
        self.tied_as_user = {item.user_layer: item for item in tied if item.user_stage == stage}
        """Tied weights that another stage owns, by user layer."""
        self.tied_as_owner = {item.user_layer: item for item in tied if item.owner_stage == stage}
        """Tied weights that this stage owns, by user layer."""
        self._tied_elements = {
            item.owner_layer: (item.elements, item.gradient_elements)
            for item in self.tied_as_user.values()
        }
        self._owners = tied_owner_layers(graph)
        self._transfer_buffer_bytes = _transfer_buffer_bytes(plan, graph, stage, self.sizes)
        self._token_bytes = plan.batch.micro * graph.example_bytes(
            plan.batch.sequence, plan.parameter_itemsize
        )
        self._weights_name: TensorName = (
            "weight shard" if plan.sharding.parameters > 1 else "weights"
        )
        self._keeps_shards = plan.sharding.parameters > 1 and not plan.is_offloaded("parameters")
        """Whether the shard of a layer stays beside its unsharded weights."""
        self._gradient_name: TensorName = (
            "gradient shard" if plan.sharding.optimizer > 1 else "gradients"
        )

    @property
    def loads_batches(self) -> bool:
        """Whether the stage has the embedding or the loss, which take tokens."""
        return 0 in self.layer_set or self.last_layer in self.layer_set

    def gradient_targets(self, layer: int) -> tuple[int, ...]:
        """The layers whose gradients a layer's backward adds to: itself and its tied owners."""
        return (layer, *(owner for owner in self._owners[layer] if owner != layer))

    def pass_weights(self, layer: int) -> tuple[TensorId, ...]:
        """The weights that a layer computes with."""
        return tuple(
            TensorId("weights" if target in self.layer_set else "tied weights", target)
            for target in self.gradient_targets(layer)
            if self.sizes[target].weights
        )

    def pass_gradient_sums(self, layer: int) -> tuple[TensorId, ...]:
        """The gradients that a layer's backward passes accumulate into."""
        sums = tuple(
            TensorId("gradients" if target in self.layer_set else "tied gradients", target)
            for target in self.gradient_targets(layer)
            if self.sizes[target].gradients
        )
        return (*sums, *self.gradient_rows(layer))

    def gradient_rows(self, layer: int) -> tuple[TensorId, ...]:
        """Rows of a table that wait to be added to its gradient, if there are any."""
        return (TensorId("gradient rows", layer),) if self.sizes[layer].sparse_rows else ()

    def reduces_gradients(self, layer: int) -> bool:
        """Whether a gradient is summed over replicas or, if replicated, tensor-parallel ranks."""
        sizes = self.sizes[layer]
        if not sizes.gradients:
            return False
        replicated = (
            sizes.replicated_gradients + sizes.replicated_in_columns + sizes.replicated_in_rows
        )
        return self.plan.parallel.replicas > 1 or replicated > 0

    def weights_between_passes(self, layer: int) -> TensorId:
        """A layer's weights between uses: this device's shard, or all weights without sharding."""
        return TensorId(self._weights_name, layer)

    def final_gradient(self, layer: int) -> TensorId:
        """What norm and update read: this device's gradient shard, or all without sharding."""
        return TensorId(self._gradient_name, layer)

    def final_gradients(self, layers: tuple[int, ...]) -> tuple[TensorId, ...]:
        """`final_gradient` of each layer that has weights."""
        return tuple(self.final_gradient(layer) for layer in layers if self.sizes[layer].gradients)

    def bytes_of(self, tensor: TensorId) -> int:
        """Device memory that a tensor takes; 0 if it is offloaded."""
        if tensor.name in OFFLOADED_NAMES:
            return 0
        if tensor.name == "tokens":
            return self._token_bytes
        if tensor.name == "staging buffer":
            return STAGING_BYTES
        if tensor.name == "activation transfer buffer":
            return self._transfer_buffer_bytes
        layer = tensor.layer or 0
        if tensor.name == "tied weights":
            return self._tied_elements[layer][0] * self.plan.parameter_itemsize
        if tensor.name == "tied gradients":
            return self._tied_elements[layer][1] * self.plan.gradient_itemsize
        sizes = self.sizes[layer]
        by_name: dict[TensorName, int] = {
            "weights": sizes.gathered if self._keeps_shards else sizes.weights,
            "weight shard": sizes.weight_shard,
            "optimizer state": sizes.optimizer,
            "gradients": sizes.gradients,
            "gradient rows": sizes.sparse_rows,
            "gradient shard": sizes.gradient_shard,
            "saved activations": sizes.saved,
            "inner gradients": sizes.saved,
        }
        return by_name.get(tensor.name, sizes.output)


def _transfer_buffer_bytes(
    plan: Plan, graph: Graph, stage: int, sizes: tuple[LayerSizes, ...]
) -> int:
    """The largest offloaded output and, for files, two bounce buffers; 0 if none is offloaded."""
    offloaded = offloaded_activation_layers(plan, graph, stage)
    largest = max((sizes[layer].output for layer in offloaded), default=0)
    uses_bounce_buffers = largest > 0 and plan.offload.activations != HOST_TIER
    return largest + (2 * BOUNCE_BYTES if uses_bounce_buffers else 0)
