"""Exchanges inside a layer that is cut over slices, each the adjoint of another.

What a slice computes of a gradient are contributions whose sum over the slices is the gradient. So
what is gathered forward is summed and scattered backward, and the other way round; a sum over the
slices is its own adjoint. They are torch operations: they run eagerly, without numbers and inside
compiled code. The group is looked up by its name, and only where there are numbers.
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

_PIECE = 2**20
"""Elements of each part that are summed at a time."""


Among = Literal["all", "tokens", "features"]
"""Which slices of a layer exchange: all of them; those of one column, which share the tokens out;
or those of one row, which share the features out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Slices that exchange with one another, row by row; of one alone nothing is exchanged."""

    rows: int
    """Shares of the tokens."""
    columns: int = 1
    """Shares of the features."""
    among: Among = "all"
    group: str = ""
    """Name of their process group."""

    @property
    def degree(self) -> int:
        """How many they are."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which slice of a layer a device computes.

    Slices lie in rows and columns: those of one row have the same tokens, those of one column the
    same features. In one dimension they are one column.
    """

    degree: int
    """Slices of the layer, t."""
    index: int = 0
    """Of this slice, from 0, row by row."""
    columns: int = 1
    """Shares of the features, a divisor of the degree."""
    group: str = ""
    """Name of the process group of all slices, in their order."""
    column_group: str = ""
    """Of those of its column, row after row; in one dimension they are all."""
    row_group: str = ""
    """Of those of its row."""

    @property
    def rows(self) -> int:
        """Shares of the tokens."""
        return self.degree // self.columns

    @property
    def row(self) -> int:
        """Which share of the tokens is its own."""
        return self.index // self.columns

    @property
    def column(self) -> int:
        """Which share of the features is its own."""
        return self.index % self.columns

    @property
    def name(self) -> str:
        """`3`, or `1x0` in a grid."""
        return str(self.index) if self.columns == 1 else f"{self.row}x{self.column}"

    @property
    def all(self) -> Ring:
        """All slices of the layer."""
        return Ring(rows=self.rows, columns=self.columns, group=self.group)

    @property
    def tokens(self) -> Ring:
        """Those that share the tokens out, and have the same features."""
        if self.columns == 1:
            return self.all
        return Ring(rows=self.rows, among="tokens", group=self.column_group)

    @property
    def features(self) -> Ring:
        """Those that share the features out, and have the same tokens."""
        return Ring(rows=1, columns=self.columns, among="features", group=self.row_group)

    def answers_for(self, common: Among | None) -> bool:
        """Whether it is the first of those that have the same; None: no other slice has it."""
        first_row = common in (None, "features") or self.row == 0
        return first_row and (common in (None, "tokens") or self.column == 0)


def gathered(x: Tensor, ring: Ring) -> Tensor:
    """All tokens and features, `[b s ... d]`, of each slice's own, `[b s/r ... d/c]`.

    Its gradient is `scattered`.
    """
    if ring.degree == 1:
        return x
    return torch.ops.windlass.gather_parts(x, *_words(ring))


def scattered(x: Tensor, ring: Ring) -> Tensor:
    """Its own part `[b s/r ... d/c]` of the sum of partial sums `[b s ... d]`.

    Its gradient is `gathered`.
    """
    if ring.degree == 1:
        return x
    return torch.ops.windlass.scatter_sum(x, *_words(ring))


def summed(x: Tensor, ring: Ring) -> Tensor:
    """The sum over the slices; its gradient is the sum over the slices too."""
    return torch.ops.windlass.sum_slices(x, *_words(ring))


def agreed(x: Tensor, ring: Ring) -> Tensor:
    """The sum over the slices, of which each takes the gradient as it is.

    For a loss: all slices hold the same one, and each wants the gradient of its own share.
    """
    return torch.ops.windlass.agree_sum(x, *_words(ring))


def highest(x: Tensor, ring: Ring) -> Tensor:
    """The largest of the slices' values, element by element; it has no gradient."""
    return torch.ops.windlass.max_slices(x, *_words(ring))


def own_tokens(x: Tensor, place: Place) -> Tensor:
    """Own tokens `[b s/r ...]` of all, `[b s ...]`; no exchange, and zeros around its gradient.

    Raises:
        ModelError: the tokens cannot be shared out equally.
    """
    if x.shape[1] % place.rows:
        raise ModelError(
            f"a sequence of {x.shape[1]} tokens cannot be cut over {place.rows} slices; take a "
            f"multiple of {place.rows}"
        )
    own = x.shape[1] // place.rows
    return x.narrow(1, place.row * own, own)


def own_part(x: Tensor, place: Place) -> Tensor:
    """Own tokens and features `[b s/r ... d/c]` of all, `[b s ... d]`; as `own_tokens`."""
    tokens = own_tokens(x, place)
    if place.columns == 1:
        return tokens
    own = x.shape[-1] // place.columns
    return tokens.narrow(-1, place.column * own, own)


def _words(ring: Ring) -> tuple[int, int, str, str]:
    """A ring as an operation of torch takes it."""
    return ring.rows, ring.columns, ring.among, ring.group


@custom_op("windlass::gather_parts", mutates_args=())
def _gather_parts(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001  for whoever records it
    samples, tokens, *rest = x.shape
    whole = x.new_empty(_whole_shape(x, rows, columns))
    # With one sample the slices' tokens lie in place as they arrive.
    in_place = samples == 1 and columns == 1
    parts = whole if in_place else x.new_empty((rows * columns * samples, tokens, *rest))
    all_gather(parts.view(-1, tokens, *rest), x.contiguous(), group=_group(group))
    if not in_place:
        by_slice = parts.view(rows, columns, samples, tokens, *rest)
        _by_slice(whole, rows, columns).copy_(by_slice)
    return whole


@custom_op("windlass::scatter_sum", mutates_args=())
def _scatter_sum(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001
    by_slice = _by_slice(x, rows, columns).contiguous()
    out = x.new_empty(by_slice.shape[2:])
    parts = by_slice.view(rows * columns * len(out), *out.shape[1:])
    reduce_scatter(out, parts, group=_group(group))
    return out


@custom_op("windlass::sum_slices", mutates_args=())
def _sum_slices(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001  one shape for all
    return _all_reduced(x, dist.ReduceOp.SUM, group)


@custom_op("windlass::agree_sum", mutates_args=())
def _agree_sum(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001
    return _all_reduced(x, dist.ReduceOp.SUM, group)


@custom_op("windlass::max_slices", mutates_args=())
def _max_slices(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001
    return _all_reduced(x, dist.ReduceOp.MAX, group)


@_gather_parts.register_fake
def _(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(_whole_shape(x, rows, columns))


@_scatter_sum.register_fake
def _(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001
    samples, tokens, *between, features = x.shape
    return x.new_empty((samples, tokens // rows, *between, features // columns))


@_sum_slices.register_fake
@_agree_sum.register_fake
@_max_slices.register_fake
def _(x: Tensor, rows: int, columns: int, among: str, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _whole_shape(x: Tensor, rows: int, columns: int) -> tuple[int, ...]:
    samples, tokens, *between, features = x.shape
    return (samples, tokens * rows, *between, features * columns)


def _by_slice(whole: Tensor, rows: int, columns: int) -> Tensor:
    """`[r c b s/r ... d/c]`, the parts of `[b s ... d]` slice by slice: a view, or a copy."""
    samples, tokens, *between, features = whole.shape
    parts = whole.reshape(
        samples, rows, tokens // rows, *between, columns, features // columns
    )  # fmt: skip
    return parts.movedim((1, -2), (0, 1))


def _keep_ring(ctx: Any, inputs: tuple[Tensor, int, int, Among, str], output: Tensor) -> None:  # noqa: ANN401, ARG001  torch's own context
    _, rows, columns, among, group = inputs
    ctx.ring = Ring(rows=rows, columns=columns, among=among, group=group)


_Gradients = tuple[Tensor, None, None, None, None]


def _adjoint(of: Callable[[Tensor, Ring], Tensor]) -> Callable[..., _Gradients]:
    def backward(ctx: Any, gradient: Tensor) -> _Gradients:  # noqa: ANN401
        return of(gradient, ctx.ring), None, None, None, None

    return backward


_gather_parts.register_autograd(_adjoint(scattered), setup_context=_keep_ring)
_scatter_sum.register_autograd(_adjoint(gathered), setup_context=_keep_ring)
_sum_slices.register_autograd(_adjoint(summed), setup_context=_keep_ring)
_agree_sum.register_autograd(_adjoint(lambda x, _: x), setup_context=_keep_ring)


def _all_reduced(x: Tensor, how: dist.ReduceOp.RedOpType, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=how, group=_group(group))
    return out


def _group(name: str) -> dist.ProcessGroup:
    # Torch's functional collectives find their group in this registry, which has no public name.
    registry: Any = distributed_c10d
    return registry._resolve_process_group(name)  # noqa: SLF001


def all_gather(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
    """Puts the parts of a group's devices together: `[n ...]` of `[n/r ...]`, in its order."""
    # Torch 2.13 gave it and its like new names, and warns of the old ones.
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    named(out, x, group=group)


def reduce_scatter(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
    """Sums equal parts over a group, and leaves each device its own: `[n/r ...]` of `[n ...]`.

    gloo would sum all parts on all devices, and so send twice as much: there each device sends
    every other one its part, and sums what comes, piece by piece.

    Args:
        out: contiguous.
        x: contiguous; its parts are in the order of the group.
        group: r devices.
    """
    if x.is_cuda:
        named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        named(out, x, group=group)
        return
    rows, own = x.view(dist.get_world_size(group), -1), out.view(-1)
    for at in range(0, len(own), _PIECE):
        goes = rows[:, at : at + _PIECE].contiguous()
        comes = torch.empty_like(goes)
        dist.all_to_all_single(comes, goes, group=group)
        torch.sum(comes, 0, out=own[at : at + _PIECE])
