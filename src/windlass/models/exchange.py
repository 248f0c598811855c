"""Exchanges inside a layer that is cut over slices, each the adjoint of another.

What a slice computes of a gradient are contributions whose sum over the slices is the gradient. So
tokens gathered forward are summed and scattered backward, and the other way round; a sum over the
slices is its own adjoint. They are torch operations: they run eagerly, without numbers and inside
compiled code. The group is looked up by its name, and only where there are numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from windlass.errors import ModelError

_PIECE = 2**20
"""Elements of each part that are summed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which slice of a layer a device computes."""

    degree: int
    """Slices of the layer, t."""
    index: int = 0
    """Of this slice, from 0."""
    group: str = ""
    """Name of the process group of the t slices, in their order."""


def gathered(x: Tensor, place: Place) -> Tensor:
    """All tokens, `[b s ...]`, of each slice's own, `[b s/t ...]`; its gradient is `scattered`."""
    return torch.ops.windlass.gather_tokens(x, place.degree, place.group)


def scattered(x: Tensor, place: Place) -> Tensor:
    """Own tokens `[b s/t ...]` of the sum of partial sums `[b s ...]`; its gradient: `gathered`."""
    return torch.ops.windlass.scatter_sum(x, place.degree, place.group)


def summed(x: Tensor, place: Place) -> Tensor:
    """The sum over the slices; its gradient is the sum over the slices too."""
    return torch.ops.windlass.sum_slices(x, place.degree, place.group)


def agreed(x: Tensor, place: Place) -> Tensor:
    """The sum over the slices, of which each takes the gradient as it is.

    For a loss: all slices hold the same one, and each wants the gradient of its own share.
    """
    return torch.ops.windlass.agree_sum(x, place.degree, place.group)


def highest(x: Tensor, place: Place) -> Tensor:
    """The largest of the slices' values, element by element; it has no gradient."""
    return torch.ops.windlass.max_slices(x, place.degree, place.group)


def own_tokens(x: Tensor, place: Place) -> Tensor:
    """Own tokens `[b s/t ...]` of all, `[b s ...]`; no exchange, and zeros around its gradient.

    Raises:
        ModelError: the tokens cannot be shared out equally.
    """
    if x.shape[1] % place.degree:
        raise ModelError(
            f"a sequence of {x.shape[1]} tokens cannot be cut over {place.degree} slices; take a "
            f"multiple of {place.degree}"
        )
    own = x.shape[1] // place.degree
    return x.narrow(1, place.index * own, own)


@custom_op("windlass::gather_tokens", mutates_args=())
def _gather_tokens(x: Tensor, degree: int, group: str) -> Tensor:
    samples, tokens, *rest = x.shape
    whole = x.new_empty((samples, degree * tokens, *rest))
    # With one sample the slices' tokens lie in place as they arrive.
    parts = whole if samples == 1 else x.new_empty((degree * samples, tokens, *rest))
    all_gather(parts.view(degree * samples, tokens, *rest), x.contiguous(), group=_group(group))
    if samples > 1:
        by_slice = parts.view(degree, samples, tokens, *rest)
        whole.view(samples, degree, tokens, *rest).copy_(by_slice.transpose(0, 1))
    return whole


@custom_op("windlass::scatter_sum", mutates_args=())
def _scatter_sum(x: Tensor, degree: int, group: str) -> Tensor:
    samples, tokens, *rest = x.shape
    own = tokens // degree
    by_slice = x.reshape(samples, degree, own, *rest).transpose(0, 1).contiguous()
    out = x.new_empty((samples, own, *rest))
    reduce_scatter(out, by_slice.view(degree * samples, own, *rest), group=_group(group))
    return out


@custom_op("windlass::sum_slices", mutates_args=())
def _sum_slices(x: Tensor, degree: int, group: str) -> Tensor:  # noqa: ARG001  one shape for all
    return _all_reduced(x, dist.ReduceOp.SUM, group)


@custom_op("windlass::agree_sum", mutates_args=())
def _agree_sum(x: Tensor, degree: int, group: str) -> Tensor:  # noqa: ARG001
    return _all_reduced(x, dist.ReduceOp.SUM, group)


@custom_op("windlass::max_slices", mutates_args=())
def _max_slices(x: Tensor, degree: int, group: str) -> Tensor:  # noqa: ARG001
    return _all_reduced(x, dist.ReduceOp.MAX, group)


@_gather_tokens.register_fake
def _(x: Tensor, degree: int, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty((x.shape[0], x.shape[1] * degree, *x.shape[2:]))


@_scatter_sum.register_fake
def _(x: Tensor, degree: int, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty((x.shape[0], x.shape[1] // degree, *x.shape[2:]))


@_sum_slices.register_fake
@_agree_sum.register_fake
@_max_slices.register_fake
def _(x: Tensor, degree: int, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _keep_place(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:  # noqa: ANN401, ARG001  torch's own context
    ctx.place = Place(degree=inputs[1], group=inputs[2])


def _adjoint(of: Callable[[Tensor, Place], Tensor]) -> Callable[..., tuple[Tensor, None, None]]:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return of(gradient, ctx.place), None, None

    return backward


_gather_tokens.register_autograd(_adjoint(scattered), setup_context=_keep_place)
_scatter_sum.register_autograd(_adjoint(gathered), setup_context=_keep_place)
_sum_slices.register_autograd(_adjoint(summed), setup_context=_keep_place)
_agree_sum.register_autograd(_adjoint(lambda x, _: x), setup_context=_keep_place)


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
