"""Graph: what one step computes, layer by layer, as a function of micro-batch and sequence.

A graph is a chain of layers. Equal layers are folded into one kind, so that 96 layers cost as much
to write down as one. Every number of an op is a `Quantity`, a polynomial in b and s, found exactly.
"""

from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Self

from pydantic import Field

from windlass.document import Document
from windlass.schema.tensor_grid import TensorAxis, TensorDegree

Precision = Literal["float32", "bfloat16", "float64"]
"""What layers compute in; with bfloat16 the optimizer keeps float32 master weights. `float64` is
for proofs on a CPU, and never chosen by search."""

OpKind = Literal["matmul", "attention", "memory", "collective"]
"""`memory` is all that is bound by traffic: element-wise, normalisation, look-up, copy. `exchange`
is what the slices of one layer put together inside a pass."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
"""What the slices of a layer do together: put a buffer together from their parts, sum it and leave
each its part, or have the sum (or the largest) of it on all."""

_OP_BYTES = ("read_bytes", "written_bytes", "live_bytes")
_LAYER_BYTES = ("saved_bytes", "input_bytes", "output_bytes")

PRECISION_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2, "float64": 8}


class Polynomial(NamedTuple):
    """The polynomial `one + s*S + ss*S^2 + B*(b + bs*S + bss*S^2)` of micro-batch B, sequence S."""

    one: float = 0
    s: float = 0
    ss: float = 0
    b: float = 0
    bs: float = 0
    bss: float = 0

    def at(self, micro_batch: int, sequence: int) -> float:
        """The value for `micro` sequences of `sequence` tokens."""
        fixed = self.one + sequence * (self.s + sequence * self.ss)
        return fixed + micro_batch * (self.b + sequence * (self.bs + sequence * self.bss))

    @property
    def doubled(self) -> Self:
        """Two of it."""
        return type(self)(*(2 * part for part in self))


class MatmulShape(NamedTuple):
    """A matrix product: `batch` products of (m, k) by (k, n)."""

    batch: Polynomial
    m: Polynomial
    n: Polynomial
    k: Polynomial


class Collective(NamedTuple):
    """What an op sends to the other slices of its layer."""

    kind: CollectiveKind
    nbytes: Polynomial
    """Of the whole buffer: what a gather puts together, or a scatter parts."""
    axis: TensorAxis = "all"

    @property
    def doubled(self) -> Self:
        """Of numbers twice as wide."""
        return self._replace(nbytes=self.nbytes.doubled)


class Op(Document):
    """One ATen operation, or the run of them that a compiler fuses into one."""

    name: str
    kind: OpKind
    flop: Polynomial = Polynomial()
    read_bytes: Polynomial
    written_bytes: Polynomial
    live_bytes: Polynomial
    """Bytes of this layer that are alive while the op runs, beyond what the caller holds.

    In forward: all that the pass has allocated and not freed, the layer's output and what it keeps
    for backward included. In backward: what was kept from forward and is not yet freed, and all
    that this pass has allocated, the gradient of the layer's input included. The caller holds, and
    counts by itself: parameters, the layer's input and, in backward, its output, the gradient
    handed in for the output, and the gradients of parameters that the pass makes."""
    shape: MatmulShape | None = None
    """Only of a `matmul`."""
    collective: Collective | None = None
    """Only of an `exchange`."""
    calls: int = 1
    """How many ATen calls stand behind it: each pays the launch overhead once."""


class LayerCost(Document):
    """What a layer costs in one precision, run eagerly or compiled."""

    precision: Precision
    compiled: bool
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    saved_bytes: Polynomial
    """Held from forward to backward, apart from parameters, the layer's input and its output."""
    input_bytes: Polynomial
    output_bytes: Polynomial

    def as_float64(self) -> Self:
        """The same in float64: every byte twice."""

        def twice(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            return tuple(
                op.model_copy(
                    update={name: getattr(op, name).doubled for name in _OP_BYTES}
                    | {"collective": op.collective and op.collective.doubled}
                )
                for op in ops
            )

        return self.model_copy(
            update={
                "precision": "float64",
                "forward": twice(self.forward),
                "backward": twice(self.backward),
                **{name: getattr(self, name).doubled for name in _LAYER_BYTES},
            }
        )


class ParameterInfo(Document):
    """One weight tensor of a layer."""

    name: str
    shape: tuple[int, ...]
    tied_to: str | None = None
    """Full name of the parameter that owns the memory; None if this one does."""
    shard_dim: int | None = None
    """Of a slice: the dimension along which all slices share it, the first with the most; None if
    each has it whole, or their grid shares it."""
    replicated_over: TensorAxis | None = None
    """Of a slice: which slices have the same, and contributions to its gradient; None: no other."""

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)


class LayerKind(Document):
    """All layers of one structure."""

    name: str
    parameters: tuple[ParameterInfo, ...]
    costs: tuple[LayerCost, ...]
    is_embedding: bool = False
    """All it does is look rows of its weights up: it is never compiled, and its backward gives
    gradients of those rows only."""
    selective_costs: tuple[LayerCost, ...] = Field(default=(), repr=False)
    """The same run eagerly, with only what its large products give kept: its backward passes begin
    with what is run again. None of a layer that cannot be run so."""

    @cached_property
    def parameter_count(self) -> int:
        """Elements that the layer owns; tied parameters are counted where they live."""
        return sum(p.count for p in self.parameters if p.tied_to is None)

    def replicated_count(self, axis: TensorAxis) -> int:
        """Elements that it owns and that those slices, of whose layer it is one, all have."""
        return sum(
            p.count for p in self.parameters if p.tied_to is None and p.replicated_over == axis
        )

    def pass_gradient_elements(self, micro_batch: int, sequence: int) -> tuple[int, ...]:
        """Elements of the gradient that one backward pass gives of each parameter, tied or not."""
        if not self.is_embedding:
            return tuple(p.count for p in self.parameters)
        rows = micro_batch * sequence
        return tuple(min(p.count, rows * p.shape[-1]) for p in self.parameters)

    def cost(self, precision: Precision, *, compiled: bool, selective: bool = False) -> LayerCost:
        """The cost in one precision and mode.

        Args:
            precision: that it computes in.
            compiled: whether it runs as compiled code.
            selective: whether it keeps only what its large products give.

        Raises:
            KeyError: the graph was captured without that combination.
        """
        for cost in self.selective_costs if selective else self.costs:
            if cost.precision == precision and cost.compiled == compiled:
                return cost
        if precision == "float64":
            return self.cost("float32", compiled=compiled, selective=selective).as_float64()
        raise KeyError(f"{self.name} has no cost in {precision}, compiled={compiled}")


class LayerRun(Document):
    """Consecutive layers of one kind."""

    kind: str
    count: int


class Graph(Document):
    """A chain of layers with the cost of each kind, whole and as one of t slices computes it."""

    fingerprint_excludes = frozenset({"tensor_shards", "unshardable", "unsharded", "kinds.selective_costs"})

    name: str
    vocabulary: int
    max_sequence: int | None = None
    """Longest sequence the model takes; None if it sets no limit."""
    layer_runs: tuple[LayerRun, ...]
    kinds: dict[str, LayerKind]
    tensor_shards: dict[TensorDegree, dict[str, LayerKind]] = Field(
        default_factory=dict, repr=False
    )
    """For each degree t that it was captured for, the kinds as the first of t slices computes them,
    which is the largest. All parameters but those of an uneven vocabulary are cut in equal parts.
    """
    unshardable: dict[TensorDegree, tuple[str, ...]] = Field(default_factory=dict)
    """Degrees that were asked for and cannot be: what is wrong, and the way out."""
    unsharded: "Graph | None" = Field(default=None, repr=False)
    """Of a slice: the graph that it is one of."""

    @property
    def label(self) -> str:
        """`name@fingerprint`: how plans refer to this graph, and to each slice of it."""
        return (
            f"{self.name}@{self.fingerprint()}" if self.unsharded is None else self.unsharded.label
        )

    def shard(self, degree: int, tensor_rank: int = 0) -> "Graph":
        """What one of `degree` slices computes: the same chain, of smaller layers.

        Parameters are those of slice `index`. Costs are those of the first slice, which has most of
        an uneven vocabulary: the others wait for it.

        Raises:
            KeyError: it was not captured for that degree.
        """
        if degree == 1:
            return self
        kinds = self.tensor_shards.get(degree)
        if kinds is None:
            raise KeyError(f"{self.name} was not captured for {degree} slices")
        if tensor_rank:
            kinds = {
                name: _of_slice(kind, self.kinds[name], degree, tensor_rank)
                for name, kind in kinds.items()
            }
        return Graph.model_construct(
            name=self.name,
            vocabulary=self.vocabulary,
            max_sequence=self.max_sequence,
            layer_runs=self.layer_runs,
            kinds=kinds,
            unsharded=self,
        )

    @property
    def layers(self) -> int:
        """Length of the chain, embedding and head included."""
        return sum(span.count for span in self.layer_runs)

    @property
    def parameter_count(self) -> int:
        """Elements of all weights, tied ones once."""
        return sum(span.count * self.kinds[span.kind].parameter_count for span in self.layer_runs)

    def layer_kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer, in the order of the chain."""
        for span in self.layer_runs:
            for _ in range(span.count):
                yield self.kinds[span.kind]

    def micro_batch_flop(self, micro_batch: int, sequence: int) -> float:
        """FLOP of forward and backward over one micro-batch, nothing computed twice."""
        total = 0.0
        for span in self.layer_runs:
            cost = self.kinds[span.kind].cost("float32", compiled=False)
            total += span.count * sum(
                op.flop.at(micro_batch, sequence) for op in (*cost.forward, *cost.backward)
            )
        return total


def _of_slice(first: LayerKind, whole: LayerKind, degree: int, index: int) -> LayerKind:
    """The kind with the parameters of another slice than the first."""
    parameters = tuple(
        _share(mine, full, degree, index)
        for mine, full in zip(first.parameters, whole.parameters, strict=True)
    )
    if parameters == first.parameters:
        return first
    return LayerKind(
        name=first.name, parameters=parameters, costs=first.costs, is_embedding=first.is_embedding
    )


def _share(first: ParameterInfo, whole: ParameterInfo, degree: int, index: int) -> ParameterInfo:
    """What slice `index` has of a parameter: as much as the first, or what is left."""
    at = first.shard_dim
    if at is None or first.shape[at] * degree == whole.shape[at]:
        return first
    most, total = first.shape[at], whole.shape[at]
    own = min((index + 1) * most, total) - min(index * most, total)
    shape = (*first.shape[:at], own, *first.shape[at + 1 :])
    return first.model_copy(update={"shape": shape})
