"""Collectives between the tensor-parallel ranks of a layer, each with its adjoint as gradient.

What a rank computes of a gradient is a contribution; the sum over the ranks is the gradient. So an
all-gather in forward is a reduce-scatter in backward and the other way round; an all-reduce is its
own adjoint. They are torch operators: they run eagerly, on fake tensors and inside compiled code.
The process group is looked up by name, and only when the tensors are real.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from windlass.errors import ModelError
from windlass.schema import TensorAxis

_CHUNK_ELEMENTS = 2**20
"""Elements of each rank's part that gloo's reduce-scatter sums at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelGroup:
    """Tensor-parallel ranks that take part in a collective; a group of one exchanges nothing."""

    rows: int
    """Number of shards of the tokens."""
    columns: int = 1
    """Number of shards of the features."""
    axis: TensorAxis = "all"
    name: str = ""
    """Name of the process group."""

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelRank:
    """One tensor-parallel rank of a layer.

    Ranks form a grid of rows and columns: those of one row have the same tokens, those of one
    column the same features. In one dimension the grid is a single column.
    """

    degree: int
    """Tensor-parallel degree t, the number of ranks."""
    index: int = 0
    """Index of this rank, from 0, row by row."""
    columns: int = 1
    """Number of shards of the features, a divisor of the degree."""
    group_name: str = ""
    """Name of the process group of all ranks, in order."""
    column_group_name: str = ""
    """Name of the process group of this rank's column; in one dimension that is all ranks."""
    row_group_name: str = ""
    """Name of the process group of this rank's row."""

    @property
    def rows(self) -> int:
        """Number of shards of the tokens."""
        return self.degree // self.columns

    @property
    def row(self) -> int:
        """Index of this rank's shard of the tokens."""
        return self.index // self.columns

    @property
    def column(self) -> int:
        """Index of this rank's shard of the features."""
        return self.index % self.columns

    @property
    def label(self) -> str:
        """`3`, or `1x0` in a grid."""
        return str(self.index) if self.columns == 1 else f"{self.row}x{self.column}"

    @property
    def all_group(self) -> TensorParallelGroup:
        """All ranks of the layer."""
        return TensorParallelGroup(rows=self.rows, columns=self.columns, name=self.group_name)

    @property
    def token_group(self) -> TensorParallelGroup:
        """The ranks of this column, which shard the tokens and have the same features."""
        if self.columns == 1:
            return self.all_group
        return TensorParallelGroup(rows=self.rows, axis="tokens", name=self.column_group_name)

    @property
    def feature_group(self) -> TensorParallelGroup:
        """The ranks of this row, which shard the features and have the same tokens."""
        return TensorParallelGroup(
            rows=1, columns=self.columns, axis="features", name=self.row_group_name
        )

    def is_first_replica(self, replicated_over: TensorAxis | None) -> bool:
        """Whether this is the first of the ranks that hold the same shard.

        Args:
            replicated_over: the ranks that hold the same; None if no other rank does.
        """
        first_row = replicated_over in (None, "features") or self.row == 0
        return first_row and (replicated_over in (None, "tokens") or self.column == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSplit:
    """Which features of a linear layer are a part of those of all tensor-parallel ranks."""

    side: Literal["inputs", "outputs"]
    group: TensorParallelGroup
    """The ranks that have the other parts."""

    @property
    def words(self) -> tuple[Literal["inputs", "outputs"], int, str]:
        """The side, the number of ranks and the name of their process group."""
        return self.side, self.group.degree, self.group.name


def all_gather_autograd(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Gathers all tokens and features, `[b s ... d]`, from each rank's `[b s/r ... d/c]`.

    Its gradient is `reduce_scatter_autograd`.
    """
    if group.degree == 1:
        return x
    return torch.ops.windlass.all_gather(x, *_op_arguments(group))


def reduce_scatter_autograd(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sums partial sums `[b s ... d]` over the ranks; each gets its part `[b s/r ... d/c]`.

    Its gradient is `all_gather_autograd`.
    """
    if group.degree == 1:
        return x
    return torch.ops.windlass.reduce_scatter(x, *_op_arguments(group))


def all_reduce_autograd(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sums over the ranks; the gradient is summed over the ranks too."""
    return torch.ops.windlass.all_reduce(x, *_op_arguments(group))


def all_reduce_identity_grad(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sums over the ranks; each rank takes the gradient of the sum as it is.

    This is for a loss, which is the same on all ranks: each needs the gradient of its own term.
    """
    return torch.ops.windlass.all_reduce_identity_grad(x, *_op_arguments(group))


def all_reduce_max(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Element-wise maximum over the ranks; it has no gradient."""
    return torch.ops.windlass.all_reduce_max(x, *_op_arguments(group))


def local_tokens(x: Tensor, tp_rank: TensorParallelRank) -> Tensor:
    """This rank's tokens `[b s/r ...]` of `[b s ...]`, without communication.

    Its gradient is zero outside of these tokens.

    Raises:
        ModelError: the tokens cannot be shared equally.
    """
    if x.shape[1] % tp_rank.rows:
        raise ModelError(
            f"a sequence of {x.shape[1]} tokens cannot be sharded over {tp_rank.rows} ranks; use a "
            f"multiple of {tp_rank.rows}"
        )
    count = x.shape[1] // tp_rank.rows
    return x.narrow(1, tp_rank.row * count, count)


def local_part(x: Tensor, tp_rank: TensorParallelRank) -> Tensor:
    """This rank's tokens and features `[b s/r ... d/c]` of `[b s ... d]`, like `local_tokens`."""
    tokens = local_tokens(x, tp_rank)
    if tp_rank.columns == 1:
        return tokens
    width = x.shape[-1] // tp_rank.columns
    return tokens.narrow(-1, tp_rank.column * width, width)


def _op_arguments(group: TensorParallelGroup) -> tuple[int, int, str, str]:
    """The arguments by which a torch operator takes a group."""
    return group.rows, group.columns, group.axis, group.name


# All operators have the same arguments; capture reads the axis from recorded calls.


@custom_op("windlass::all_gather", mutates_args=())
def _all_gather_op(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    samples, tokens, *rest = x.shape
    full = x.new_empty(_full_shape(x, rows, columns))
    # With one sample the ranks' tokens arrive where they belong.
    in_place = samples == 1 and columns == 1
    parts = full if in_place else x.new_empty((rows * columns * samples, tokens, *rest))
    all_gather(parts.view(-1, tokens, *rest), x.contiguous(), group=process_group(group))
    if not in_place:
        by_rank = parts.view(rows, columns, samples, tokens, *rest)
        _by_rank(full, rows, columns).copy_(by_rank)
    return full


@custom_op("windlass::reduce_scatter", mutates_args=())
def _reduce_scatter_op(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    by_rank = _by_rank(x, rows, columns).contiguous()
    out = x.new_empty(by_rank.shape[2:])
    parts = by_rank.view(rows * columns * len(out), *out.shape[1:])
    reduce_scatter(out, parts, group=process_group(group))
    return out


@custom_op("windlass::all_reduce", mutates_args=())
def _all_reduce_op(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    return _all_reduce(x, dist.ReduceOp.SUM, group)


@custom_op("windlass::all_reduce_identity_grad", mutates_args=())
def _all_reduce_identity_grad_op(
    x: Tensor, rows: int, columns: int, axis: str, group: str  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return _all_reduce(x, dist.ReduceOp.SUM, group)


@custom_op("windlass::all_reduce_max", mutates_args=())
def _all_reduce_max_op(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    return _all_reduce(x, dist.ReduceOp.MAX, group)


@_all_gather_op.register_fake
def _(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(_full_shape(x, rows, columns))


@_reduce_scatter_op.register_fake
def _(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    samples, tokens, *between, features = x.shape
    return x.new_empty((samples, tokens // rows, *between, features // columns))


@_all_reduce_op.register_fake
@_all_reduce_identity_grad_op.register_fake
@_all_reduce_max_op.register_fake
def _(x: Tensor, rows: int, columns: int, axis: str, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _full_shape(x: Tensor, rows: int, columns: int) -> tuple[int, ...]:
    samples, tokens, *between, features = x.shape
    return (samples, tokens * rows, *between, features * columns)


def _by_rank(full: Tensor, rows: int, columns: int) -> Tensor:
    """The parts of `[b s ... d]` rank by rank, `[r c b s/r ... d/c]`: a view, or a copy."""
    samples, tokens, *between, features = full.shape
    parts = full.reshape(
        samples, rows, tokens // rows, *between, columns, features // columns
    )  # fmt: skip
    return parts.movedim((1, -2), (0, 1))


def _save_group(ctx: Any, inputs: tuple[Tensor, int, int, TensorAxis, str], output: Tensor) -> None:  # noqa: ANN401, ARG001  torch's own context
    _, rows, columns, axis, name = inputs
    ctx.group = TensorParallelGroup(rows=rows, columns=columns, axis=axis, name=name)


_Gradients = tuple[Tensor, None, None, None, None]


def _adjoint(
    collective: Callable[[Tensor, TensorParallelGroup], Tensor],
) -> Callable[..., _Gradients]:
    def backward(ctx: Any, gradient: Tensor) -> _Gradients:  # noqa: ANN401
        return collective(gradient, ctx.group), None, None, None, None

    return backward


_all_gather_op.register_autograd(_adjoint(reduce_scatter_autograd), setup_context=_save_group)
_reduce_scatter_op.register_autograd(_adjoint(all_gather_autograd), setup_context=_save_group)
_all_reduce_op.register_autograd(_adjoint(all_reduce_autograd), setup_context=_save_group)
_all_reduce_identity_grad_op.register_autograd(_adjoint(lambda x, _: x), setup_context=_save_group)


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=process_group(group))
    return out


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    # Torch's functional collectives find their group in this registry, which has no public name.
    registry: Any = distributed_c10d
    return registry._resolve_process_group(name)  # noqa: SLF001


def all_gather(
    out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None, waits: bool = True
) -> dist.Work | None:
    """Concatenates the `[n/r ...]` of a group's r ranks into `[n ...]`, in the group's order.

    Args:
        out: contiguous output.
        x: contiguous input.
        group: the process group of r ranks; None for the default group.
        waits: whether the output can be used at once.

    Returns:
        torch's handle, to be waited for before the output is used; None if there is no need to.
    """
    # Torch 2.13 renamed this and the next one, and warns about the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, x, group=group, async_op=not waits)
    return work


def reduce_scatter(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
    """Sums `[n ...]` over a group and leaves each rank its own part, `[n/r ...]`.

    gloo would sum all parts on all ranks and so send twice as much. On a CPU each rank therefore
    sends every other rank its part and sums what it receives, chunk by chunk.

    Args:
        out: contiguous output.
        x: contiguous input, its parts in the order of the group.
        group: the process group of r ranks; None for the default group.
    """
    if not x.is_cpu:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out, x, group=group)
        return
    parts, local = x.view(dist.get_world_size(group), -1), out.view(-1)
    for start in range(0, len(local), _CHUNK_ELEMENTS):
        sent = parts[:, start : start + _CHUNK_ELEMENTS].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received, 0, out=local[start : start + _CHUNK_ELEMENTS])
