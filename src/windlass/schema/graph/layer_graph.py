"""Graph: the ops and memory of one training step, layer by layer, by micro-batch and sequence.

A graph is a sequence of layers. Equal layers share one kind, so that 96 layers take no more space
than one. Every size of an op is a `Polynomial` in micro-batch and sequence, found exactly.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from typing import Literal, Self

from pydantic import Field

from windlass.document import Document
from windlass.schema.example_shape import ExampleShape
from windlass.schema.graph.float8_cost import SharedSums, bfloat16_in_float8, float8_cost
from windlass.schema.graph.layer_cost import LayerCost, Precision, captured_precision
from windlass.schema.optimizers.law import OptimizerLaw
from windlass.schema.tensor_grid import TensorAxis, TensorDegree

GradientReach = Literal["nothing", "weights", "input"]
"""How far a backward pass goes in a layer. `nothing`: neither the layer nor one before it is
trained, so it has no backward pass; `weights`: no layer before it is trained; `input`: its input
has a gradient too."""

_TOKEN_BYTES = 8


class ParameterInfo(Document):
    """One parameter tensor of a layer."""

    name: str
    shape: tuple[int, ...]
    tied_to: str | None = None
    """Full name of the parameter that owns the memory; None if this one does."""
    shard_dim: int | None = None
    """In a tensor-parallel shard: the dimension that is divided over all ranks, the first ones
    getting most; None if every rank has the full tensor, or a grid of ranks divides it."""
    replicated_over: TensorAxis | None = None
    """In a tensor-parallel shard: the ranks that have the same elements and each add a part of
    their gradient; None if no other rank has them."""
    frozen: Literal[True] | None = None
    """Whether it is never updated: it has no gradient, no optimizer state and no master weights.
    None means that it is trained."""
    expert: Literal[True] | None = None
    """Whether its first dimension counts experts, which expert-parallel ranks divide."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class LayerKind(Document):
    """All layers with the same structure."""

    name: str
    parameters: tuple[ParameterInfo, ...]
    costs: tuple[LayerCost, ...]
    is_embedding: bool = False
    """Whether the layer only looks up rows of its weights. It is never compiled, and its backward
    gives gradients of those rows only."""
    is_hidden: bool = False
    """Whether it is neither the first layer of the model nor the last."""
    selective_costs: tuple[LayerCost, ...] = Field(default=(), repr=False)
    """The costs, run eagerly, if only the outputs of large matrix products are saved: the backward
    passes begin with the recomputed ops. Empty if the layer cannot be recomputed selectively."""
    fused_costs: tuple[LayerCost, ...] = Field(default=(), repr=False)
    """The costs of the last layer with its projection to the vocabulary and the loss fused. Empty
    for any other layer, and if they cannot be fused."""
    chooses_attention: bool = False
    """Whether a plan decides how its attention is computed; a user's own module decides itself."""
    sliding_window: tuple[int, int] | None = None
    """How many tokens before it, and behind it, a token sees at most; None sees all that its mask
    shows."""

    @cached_property
    def _float8_shapes(self) -> tuple[frozenset[tuple[int, ...]], SharedSums]:
        """Shapes of adapters' factors, and the products whose sums tensor-parallel ranks share.

        Where ranks divide the inputs of a weight `[out in]`, its output is such a sum; where they
        divide its outputs, the gradient of its input is one.
        """
        adapters = {p.shape for p in self.parameters if ".lora_" in p.name}
        matrices = [p for p in self.parameters if len(p.shape) == 2 and p.shape not in adapters]
        shared = SharedSums(
            forward=tuple(p.shape[::-1] for p in matrices if p.shard_dim == 1),
            backward=tuple(p.shape for p in matrices if p.shard_dim == 0),
        )
        return frozenset(adapters), shared

    @cached_property
    def parameter_count(self) -> int:
        """Number of elements that the layer owns; tied parameters count where they are owned."""
        return sum(p.count for p in self.parameters if p.tied_to is None)

    @cached_property
    def trained(self) -> tuple[ParameterInfo, ...]:
        """The parameters that the layer owns and updates."""
        return tuple(p for p in self.parameters if p.tied_to is None and not p.frozen)

    @cached_property
    def trained_count(self) -> int:
        """Number of elements that the layer owns and updates."""
        return sum(p.count for p in self.trained)

    @cached_property
    def matrices(self) -> tuple[ParameterInfo, ...]:
        """The parameters that it updates and that optimizers of matrices update whole."""
        return tuple(p for p in self.trained if self.is_hidden and len(p.shape) == 2)

    def updated_as_matrices(self, law: OptimizerLaw) -> tuple[ParameterInfo, ...]:
        """The parameters that it updates and that have the moments of matrices."""
        return tuple(
            p for p in self.trained if law.updates_as_matrix(p.shape, hidden=self.is_hidden)
        )

    def replicated_count(self, axis: TensorAxis) -> int:
        """Number of elements that the layer updates and that the ranks of an axis replicate."""
        return sum(p.count for p in self.trained if p.replicated_over == axis)

    def pass_gradient_elements(self, micro_batch: float, sequence: int) -> tuple[int, ...]:
        """Elements of the gradient that one backward pass gives for each trained parameter."""
        trained = [p for p in self.parameters if not p.frozen]
        if not self.is_embedding:
            return tuple(p.count for p in trained)
        rows = round(micro_batch * sequence)
        return tuple(min(p.count, rows * p.shape[-1]) for p in trained)

    def with_costs(self, change: Callable[[LayerCost], LayerCost]) -> Self:
        """The same kind with each of its costs changed.

        Args:
            change: gives the new cost for an old one.
        """
        names = ("costs", "selective_costs", "fused_costs")
        return self.model_copy(
            update={name: tuple(map(change, getattr(self, name))) for name in names}
        )

    def of_mode(self, precision: Precision, compiled: bool) -> Self:
        """The same kind with only the costs that hold for a precision, compiled or not."""
        mode = self.captured(precision), compiled
        names = ("costs", "selective_costs", "fused_costs")
        return self.model_copy(
            update={
                name: tuple(
                    each for each in getattr(self, name) if (each.precision, each.compiled) == mode
                )
                for name in names
            }
        )

    def costs_for(self, precision: Precision) -> tuple[LayerCost, ...]:
        """The captured costs that hold for a precision."""
        captured = self.captured(precision)
        return tuple(cost for cost in self.costs if cost.precision == captured)

    def captured(self, precision: Precision) -> Precision:
        """The precision of the captured costs that hold for another one."""
        captured = captured_precision(precision)
        if captured == "float8" and all(cost.precision != "float8" for cost in self.costs):
            return "bfloat16"
        return captured

    def cost(self, precision: Precision, *, compiled: bool, selective: bool = False) -> LayerCost:
        """The cost in one precision and mode.

        Args:
            compiled: whether it runs as compiled code.
            selective: whether it is recomputed selectively.

        Raises:
            KeyError: the graph was captured without that combination.
        """
        for cost in self.selective_costs if selective else self.costs:
            if cost.precision == precision and cost.compiled == compiled:
                return cost
        if precision == "float64":
            return self.cost("float32", compiled=compiled, selective=selective).as_float64()
        captured = self.captured(precision)
        if captured != precision:
            plain = self.cost(captured, compiled=compiled, selective=selective)
            if precision == "float8":
                if not self.is_hidden:
                    return bfloat16_in_float8(plain)
                return float8_cost(plain, *self._float8_shapes)
            return plain.model_copy(update={"precision": precision})
        raise KeyError(f"{self.name} has no cost in {precision}, compiled={compiled}")


class LayerRun(Document):
    """Consecutive layers of one kind."""

    kind: str
    count: int


class Graph(Document):
    """A model as a sequence of layers, with the cost of each kind in full and by tensor shard."""

    fingerprint_excludes = frozenset(
        {
            "tensor_shards", "unshardable", "unsharded", "kinds.selective_costs",
            "kinds.fused_costs", "kinds.chooses_attention", "kinds.is_hidden", "looks_ahead",
            "kinds.sliding_window", "base", "document_tokens",
        }
    )  # fmt: skip

    name: str
    vocabulary: int
    """Entries of the vocabulary, classes, or numbers that are predicted."""
    max_sequence: int | None = None
    """Longest sequence the model takes, in tokens; None if it sets no limit."""
    examples: ExampleShape | None = None
    """What the model takes if it takes no tokens."""
    looks_ahead: str | None = None
    """A layer of a user's model in which a token sees later ones; None if none was found."""
    base: Precision | None = None
    """The numbers of the files in which all frozen weights stand as they are computed with, so that
    phases may read them there; None if some stand nowhere."""
    document_tokens: float | None = None
    """Mean length, over the tokens of a batch, of the document that a token belongs to, where
    documents share rows; None if they do not, or if the lengths are not known."""
    layer_runs: tuple[LayerRun, ...]
    """All layers in order, embedding and head included."""
    kinds: dict[str, LayerKind]
    """Layer kinds by name."""
    tensor_shards: dict[TensorDegree, dict[str, LayerKind]] = Field(
        default_factory=dict, repr=False
    )
    """For each tensor-parallel degree that was captured, the layer kinds of rank 0, which has the
    largest shard. All parameters but those of an uneven vocabulary are divided into equal parts."""
    unshardable: dict[TensorDegree, tuple[str, ...]] = Field(default_factory=dict)
    """For each tensor-parallel degree that is impossible, the reasons and what to do instead."""
    unsharded: "Graph | None" = Field(default=None, repr=False)
    """In a tensor-parallel shard, and with a fused loss: the full, plain graph."""

    @cached_property
    def label(self) -> str:
        """`name@fingerprint`: how plans refer to this graph, and to each shard of it."""
        if self.unsharded is not None:
            return self.unsharded.label
        return f"{self.name}@{self.fingerprint()}"

    @cached_property
    def rank_kinds(self) -> dict[tuple[object, ...], dict[str, LayerKind]]:
        """Layer kinds of a rank that `program` has made of these, by the degrees that divide them.

        A search asks for the same few of them thousands of times.
        """
        return {}

    @cached_property
    def layer_sizes(self) -> dict[tuple[object, ...], dict[object, object]]:
        """Sizes of layers that `program` has counted, by what they depend on of a plan."""
        return {}

    @property
    def can_fuse_loss(self) -> bool:
        """Whether the last layer was captured with its loss fused."""
        return bool(self.kinds[self.layer_runs[-1].kind].fused_costs)

    @property
    def chooses_attention(self) -> bool:
        """Whether a plan decides how the attention of any layer is computed."""
        return any(kind.chooses_attention for kind in self.kinds.values())

    @cached_property
    def _with_fused_loss(self) -> "Graph":
        """The same graph, whose last layer costs what it does with its loss fused."""
        last = self.layer_runs[-1].kind
        if not self.can_fuse_loss:
            raise KeyError(f"{self.name} was not captured with a fused loss")
        kind = self.kinds[last]
        fused = kind.model_copy(update={"costs": kind.fused_costs})
        return Graph.model_construct(
            name=self.name,
            vocabulary=self.vocabulary,
            max_sequence=self.max_sequence,
            examples=self.examples,
            layer_runs=self.layer_runs,
            kinds=self.kinds | {last: fused},
            unsharded=self,
        )

    def shard(
        self, degree: int, tensor_rank: int = 0, *, loss: Literal["fused"] | None = None
    ) -> "Graph":
        """The graph of one tensor-parallel rank: the same layers with sharded sizes.

        Parameters are those of `tensor_rank`. Costs are those of rank 0, which has the most rows of
        an uneven vocabulary: the other ranks wait for it.

        Args:
            degree: tensor-parallel degree; 1 is the full graph.
            loss: `fused` for the costs of a fused loss, which has no shards.

        Raises:
            KeyError: the graph was not captured for that degree, or without that loss.
        """
        if degree == 1:
            return self._with_fused_loss if loss == "fused" else self
        kinds = self.tensor_shards.get(degree)
        if kinds is None:
            raise KeyError(f"{self.name} was not captured for tensor-parallel degree {degree}")
        if tensor_rank:
            kinds = {
                name: _kind_of_rank(kind, self.kinds[name], degree, tensor_rank)
                for name, kind in kinds.items()
            }
        return Graph.model_construct(
            name=self.name,
            vocabulary=self.vocabulary,
            max_sequence=self.max_sequence,
            examples=self.examples,
            layer_runs=self.layer_runs,
            kinds=kinds,
            unsharded=self,
        )

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Numbers of experts that its layers have, ascending; empty without mixtures of experts."""
        stacked = (p for kind in self.kinds.values() for p in kind.parameters if p.expert)
        return tuple(sorted({p.shape[0] for p in stacked}))

    def example_bytes(self, sequence: int, itemsize: int) -> int:
        """Bytes of the inputs and targets of one sample of a batch."""
        if self.examples is None:
            return 2 * _TOKEN_BYTES * sequence
        return self.examples.batch_bytes(itemsize)

    @property
    def layers(self) -> int:
        """Number of layers, embedding and head included."""
        return sum(run.count for run in self.layer_runs)

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters, tied ones counted once."""
        return sum(run.count * self.kinds[run.kind].parameter_count for run in self.layer_runs)

    @cached_property
    def trained_count(self) -> int:
        """Number of elements that are updated."""
        return sum(run.count * self.kinds[run.kind].trained_count for run in self.layer_runs)

    @property
    def has_frozen(self) -> bool:
        """Whether any parameter is frozen."""
        return self.trained_count < self.parameter_count

    @cached_property
    def first_trained(self) -> int:
        """Index of the first layer with a trained parameter: the backward pass ends there."""
        trains = (
            any(not parameter.frozen for parameter in kind.parameters)
            for kind in self.layer_kinds()
        )
        return next((layer for layer, any_trained in enumerate(trains) if any_trained), 0)

    def gradient_reach(self, layer: int) -> GradientReach:
        """How far the gradient of a layer's output goes."""
        if layer > self.first_trained:
            return "input"
        return "weights" if layer == self.first_trained else "nothing"

    def layer_kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer, in order."""
        for run in self.layer_runs:
            for _ in range(run.count):
                yield self.kinds[run.kind]

    def micro_batch_flop(self, micro_batch: int, sequence: int) -> float:
        """FLOP of forward and backward for one micro-batch, without recomputation."""
        total = 0.0
        for run in self.layer_runs:
            cost = next(each for each in self.kinds[run.kind].costs if not each.compiled)
            total += run.count * sum(
                op.flop.at(micro_batch, sequence) for op in (*cost.forward, *cost.backward)
            )
        return total


def _kind_of_rank(first: LayerKind, full: LayerKind, degree: int, tensor_rank: int) -> LayerKind:
    """A layer kind with the parameters of another rank than the first."""
    parameters = tuple(
        _parameter_of_rank(shard, unsharded, degree, tensor_rank)
        for shard, unsharded in zip(first.parameters, full.parameters, strict=True)
    )
    if parameters == first.parameters:
        return first
    return LayerKind(
        name=first.name,
        parameters=parameters,
        costs=first.costs,
        is_embedding=first.is_embedding,
        is_hidden=first.is_hidden,
        chooses_attention=first.chooses_attention,
        sliding_window=first.sliding_window,
    )


def _parameter_of_rank(
    first: ParameterInfo, full: ParameterInfo, degree: int, tensor_rank: int
) -> ParameterInfo:
    """A rank's shard of a parameter: as large as the first rank's, or what is left."""
    dim = first.shard_dim
    if dim is None or first.shape[dim] * degree == full.shape[dim]:
        return first
    largest, total = first.shape[dim], full.shape[dim]
    size = min((tensor_rank + 1) * largest, total) - min(tensor_rank * largest, total)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return first.model_copy(update={"shape": shape})
