"""Collectives between tensor-parallel ranks, each with its adjoint as gradient.

They mirror `models.tensor_parallel.collectives`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import DTYPE_BYTES, Gradients, Needs, Node, Tensor
from windlass.schema import CollectiveKind, TensorAxis

_Collective = Callable[[Tensor, "Group"], Tensor]


class Group(NamedTuple):
    """Tensor-parallel ranks that take part in a collective."""

    rows: int
    columns: int
    axis: TensorAxis = "all"


class Rank(NamedTuple):
    """The first tensor-parallel rank of a grid; one rank alone is a grid of 1 x 1."""

    rows: int = 1
    columns: int = 1

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.rows * self.columns

    @property
    def all_group(self) -> Group:
        """All ranks of the layer."""
        return Group(self.rows, self.columns)

    @property
    def token_group(self) -> Group:
        """The ranks of this column, which shard the tokens."""
        return self.all_group if self.columns == 1 else Group(self.rows, 1, "tokens")

    @property
    def feature_group(self) -> Group:
        """The ranks of this row, which shard the features."""
        return Group(1, self.columns, "features")


def all_gather(x: Tensor, group: Group) -> Tensor:
    """All tokens and features, of each rank's `[b s/r ... d/c]`."""
    if group.rows * group.columns == 1:
        return x
    samples, tokens, *between, features = x.shape
    shape = (samples, tokens * group.rows, *between, features * group.columns)
    node = _node(x, reduce_scatter, group)
    return attach(node, _emit("all_gather", x, shape, group))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The rank's part `[b s/r ... d/c]` of the sum of `[b s ... d]` over the ranks."""
    if group.rows * group.columns == 1:
        return x
    samples, tokens, *between, features = x.shape
    shape = (samples, tokens // group.rows, *between, features // group.columns)
    node = _node(x, all_gather, group)
    return attach(node, _reduced("reduce_scatter", x, shape, group))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks; the gradient is summed over the ranks too."""
    node = _node(x, all_reduce, group)
    return attach(node, _reduced("all_reduce", x, x.shape, group))


def all_reduce_identity_grad(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, whose gradient each rank takes as it is."""
    node = _node(x, lambda gradient, _: gradient, group)
    return attach(node, _emit("all_reduce_identity_grad", x, x.shape, group))


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """The maximum over the ranks, without a gradient."""
    return _emit("all_reduce_max", x, x.shape, group)


def _node(x: Tensor, adjoint: _Collective, group: Group) -> Node | None:
    return new_node((x,), partial(_backward, adjoint, group))


def _backward(
    adjoint: _Collective, group: Group, gradients: Gradients, _: Sequence[Tensor], __: Needs
) -> list[Tensor]:
    return [adjoint(only(gradients), group)]


def _reduced(name: CollectiveKind, x: Tensor, shape: Shape, group: Group) -> Tensor:
    """The output of a reduction, which selective activation checkpointing keeps."""
    checkpoint = x.tape.checkpoint
    if checkpoint is None:
        return _emit(name, x, shape, group)
    (out,) = checkpoint.kept(lambda: (_emit(name, x, shape, group),), x)
    return out


def _emit(name: str, x: Tensor, shape: Shape, group: Group) -> Tensor:
    out = Tensor(x.tape, shape, x.dtype)
    kind: CollectiveKind = "all_gather" if name == "all_gather" else "all_reduce"
    if name == "reduce_scatter":
        kind = "reduce_scatter"
    full = out if kind == "all_gather" else x
    nbytes = prod(full.shape) * DTYPE_BYTES[full.dtype]
    x.tape.call(name, [x], [out], kind="collective", collective=(kind, group.axis, nbytes))
    return out
