"""Holding: the layers of one stage, how large their values are, and whose weights they use."""

from windlass.program.activation_checkpointing import recomputed, selected
from windlass.program.device_mesh import layers_of_stage
from windlass.program.memory.layer_sizes import LayerSizes, sizes_of
from windlass.program.memory.values import AWAY, BOUNCE_BYTES, STAGING_BYTES, Name, Value
from windlass.program.phases import travelling
from windlass.program.tied_weights import loans, owners
from windlass.schema.graph import Graph
from windlass.schema.plan import HOST, Plan

_TOKEN_BYTES = 8
"""Token numbers are int64, as torch's embedding and cross-entropy take them."""


class Holding:
    """What one stage of a plan holds.

    Args:
        plan: the plan.
        graph: the graph that it cuts.
        stage: index of the stage.
    """

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self.plan = plan
        self.layers = layers_of_stage(plan, stage)
        self.on = frozenset(self.layers)
        self.end = graph.layers - 1
        """The chain's last layer, which makes the loss."""
        self.boundaries = frozenset(
            at for at in range(self.end) if (at in self.on) != (at + 1 in self.on)
        )
        """The layers whose outputs cross to or from another stage."""
        self.kinds = tuple(span.kind for span in graph.chain for _ in range(span.count))
        self.sizes = sizes_of(plan, graph)
        self.again = frozenset(at for at in self.layers if recomputed(plan, at))
        """Layers whose forward runs again before their backward."""
        self.selective = selected(plan)
        """Layers whose backward begins with most of their forward, of any stage."""
        lent = loans(plan, graph)
        self.borrows = {loan.user_layer: loan for loan in lent if loan.user_stage == stage}
        """By the layer that they go by."""
        self.lends = {loan.user_layer: loan for loan in lent if loan.owner_stage == stage}
        self._borrowed = {loan.owner_layer: loan.elements for loan in self.borrows.values()}
        self._owners = owners(graph)
        self._passing = _passing(plan, stage, self.sizes)
        self._tokens = 2 * plan.batch.micro * plan.batch.sequence * _TOKEN_BYTES
        self._held: Name = "weights shard" if plan.sharding.parameters > 1 else "weights"
        self._summed: Name = "gradient shard" if plan.sharding.optimizer > 1 else "gradients"

    @property
    def takes_tokens(self) -> bool:
        """Whether the stage holds the embedding or the loss."""
        return 0 in self.on or self.end in self.on

    def targets(self, layer: int) -> tuple[int, ...]:
        """The layers at which the gradients of a layer's weights are summed: its own and tied."""
        return (layer, *(owner for owner in self._owners[layer] if owner != layer))

    def weights(self, layer: int) -> tuple[Value, ...]:
        """What a layer computes with."""
        return tuple(
            Value("weights" if at in self.on else "borrowed weights", at)
            for at in self.targets(layer)
            if self.sizes[at].weights
        )

    def sums(self, layer: int) -> tuple[Value, ...]:
        """What a layer's backward passes add to."""
        return tuple(
            Value("gradients" if at in self.on else "borrowed gradients", at)
            for at in self.targets(layer)
            if self.sizes[at].gradients
        )

    def reduces(self, layer: int) -> bool:
        """Whether a gradient is summed over replicas, or over slices what they have whole."""
        sizes = self.sizes[layer]
        common = sizes.common + sizes.common_in_columns + sizes.common_in_rows
        return self.plan.parallel.data > 1 or common > 0

    def held(self, layer: int) -> Value:
        """A layer's weights between uses: the device's shard, or all where none are shared."""
        return Value(self._held, layer)

    def gradient(self, layer: int) -> Value:
        """What norm and update read: the device's shard, or all where none is shared."""
        return Value(self._summed, layer)

    def gradients(self, layers: tuple[int, ...]) -> tuple[Value, ...]:
        """The same of those layers that have weights."""
        return tuple(self.gradient(at) for at in layers if self.sizes[at].gradients)

    def bytes_of(self, value: Value) -> int:
        """How large a value is."""
        if value.name in AWAY:
            return 0
        if value.name == "tokens":
            return self._tokens
        if value.name == "staging":
            return STAGING_BYTES
        if value.name == "passing":
            return self._passing
        layer = value.layer or 0
        if value.name == "borrowed weights":
            return self._borrowed[layer] * self.plan.weight_bytes
        if value.name == "borrowed gradients":
            return self._borrowed[layer] * self.plan.gradient_bytes
        sizes = self.sizes[layer]
        known: dict[Name, int] = {
            "weights": sizes.weights,
            "weights shard": sizes.held,
            "optimizer": sizes.optimizer,
            "gradients": sizes.gradients + sizes.rows,
            "gradient shard": sizes.shard,
            "kept": sizes.kept,
            "inner gradients": sizes.kept,
        }
        return known.get(value.name, sizes.output)


def _passing(plan: Plan, stage: int, sizes: tuple[LayerSizes, ...]) -> int:
    """The largest output that goes home, and for files both halves of a bounce; 0 if none does."""
    largest = max((sizes[at].output for at in travelling(plan, stage)), default=0)
    bounced = largest > 0 and plan.offload.activations != HOST
    return largest + (2 * BOUNCE_BYTES if bounced else 0)
