"""Rows of tokens in the order of their experts, and back, as operators with their own gradients.

torch's backward of an index adds rows in any order on an accelerator, and needs the sum of all k
rows of a token in memory of its own. These gather rows, and add a token's in the order of its
choices. Shape letters: n tokens, k experts of a token, d width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from windlass.models.experts.routing_ops import RowOrder


def rows_by_expert(x: Tensor, order: RowOrder) -> Tensor:
    """The row of each token `[n d]` at the place of each of its experts, `[n*k d]`."""
    rows: Tensor = _gather_op(x, order.by_expert, order.by_token)
    return rows


def weighted_sum(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """The sum of the rows of each token's experts `[n*k d]` by their weights `[n k]`, `[n d]`."""
    y: Tensor = _sum_op(rows, weights, order.by_expert, order.by_token)
    return y


@custom_op("windlass::rows_by_expert", mutates_args=())
def _gather_op(x: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    return x.index_select(0, by_expert // (len(by_expert) // len(x)))


@custom_op("windlass::rows_by_expert_grad", mutates_args=())
def _gather_grad_op(gradient: Tensor, by_token: Tensor, tokens: int) -> Tensor:
    return gradient.index_select(0, by_token).unflatten(0, (tokens, -1)).sum(1)


@custom_op("windlass::weighted_sum", mutates_args=())
def _sum_op(rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    picked = rows.index_select(0, by_token).unflatten(0, weights.shape)
    return picked.mul_(weights.unsqueeze(-1)).sum(1)


@custom_op("windlass::weighted_sum_grads", mutates_args=())
def _sum_grads_op(
    gradient: Tensor, rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor
) -> tuple[Tensor, Tensor]:
    per_token = weights.shape[1]
    by_rows = gradient.index_select(0, by_expert // per_token)
    wide = torch.promote_types(rows.dtype, torch.float32)
    by_weights = (by_rows.to(wide) * rows).sum(1).index_select(0, by_token).view_as(weights)
    by_rows *= weights.flatten().index_select(0, by_expert).unsqueeze(1)
    return by_rows, by_weights.to(weights.dtype)


@_gather_op.register_fake
def _(x: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty((by_expert.shape[0], x.shape[1]))


@_gather_grad_op.register_fake
def _(gradient: Tensor, by_token: Tensor, tokens: int) -> Tensor:  # noqa: ARG001
    return gradient.new_empty((tokens, gradient.shape[1]))


@_sum_op.register_fake
def _(rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    return rows.new_empty((weights.shape[0], rows.shape[1]))


@_sum_grads_op.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    rows: Tensor,
    weights: Tensor,
    by_expert: Tensor,  # noqa: ARG001
    by_token: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _save_places(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,  # noqa: ARG001
) -> None:
    x, _, by_token = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(by_token)


def _gather_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor, None, None]:
    (by_token,) = ctx.saved_tensors
    return _gather_grad_op(gradient, by_token, ctx.tokens), None, None


def _save_rows(
    ctx: Any,  # noqa: ANN401
    inputs: tuple[Tensor, ...],
    output: Tensor,  # noqa: ARG001
) -> None:
    ctx.save_for_backward(*inputs)


def _sum_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor, Tensor, None, None]:
    return *_sum_grads_op(gradient, *ctx.saved_tensors), None, None


_gather_op.register_autograd(_gather_backward, setup_context=_save_places)
_sum_op.register_autograd(_sum_backward, setup_context=_save_rows)
