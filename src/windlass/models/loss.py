"""The loss that follows the last layer: mean cross-entropy, or what a sharded layer attaches."""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from windlass.models.sentences import HeadLosses, has_sentence_head

IGNORE_INDEX = -100
"""Target that does not count in the mean; torch's own default for cross-entropy."""

_ATTRIBUTE = "_windlass_loss"
"""Attribute in which a sharded last layer keeps its loss."""


def mean_cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats per token, computed in float32, or float64 for such logits.

    Args:
        logits: `Float[b s v]`, or `Float[b v]` of one class for each example.
        targets: `Int[b s]` or `Int[b]`; `IGNORE_INDEX` does not count. With weights `Int[b 2 s]`,
            see `split_weights`: then it is the weighted mean.
        z_loss: factor of the mean of `log^2 Z`, whose gradient is added.
    """
    ids, weights = split_weights(targets)
    rows, flat = in_loss_precision(logits).flatten(0, -2), ids.flatten()
    if weights is not None:
        return weighted_mean(token_losses(rows, flat, "none", z_loss), weights.flatten())
    return token_losses(rows, flat, "mean", z_loss)


Reduction = Literal["none", "sum", "mean"]


def token_losses(
    rows: Tensor, targets: Tensor, reduction: Reduction, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy of tokens in nats, as `torch.nn.functional.cross_entropy` reduces it.

    Args:
        rows: logits in the precision of the loss, `Float[t v]`.
        targets: `Int[t]`; `IGNORE_INDEX` does not count.
        reduction: `none` gives `Float[t]`, with 0 for a token that does not count.
        z_loss: factor of `log^2 Z`, whose gradient is added.
    """
    if not z_loss:
        return functional.cross_entropy(
            rows, targets, ignore_index=IGNORE_INDEX, reduction=reduction
        )
    losses: Tensor = _WithZLoss.apply(rows, targets, reduction, z_loss)
    return losses


class _WithZLoss(torch.autograd.Function):
    """Cross-entropy with the gradient of `factor log^2 Z`, which is made in the same buffer.

    d (log^2 Z) / d logit is 2 log Z times the probability, which the cross-entropy's gradient has.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, targets: Tensor, reduction: Reduction, factor: float
    ) -> Tensor:
        counts = targets != IGNORE_INDEX
        logs = rows.log_softmax(-1)
        log_z = rows[:, :1] - logs[:, :1]
        share = counts.to(rows.dtype)
        if reduction == "mean":
            share = share / counts.sum()
        index = targets.masked_fill(~counts, 0).unsqueeze(1)
        ctx.save_for_backward(logs, index, share, 1 + 2 * factor * log_z)
        return functional.nll_loss(logs, targets, ignore_index=IGNORE_INDEX, reduction=reduction)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logs, index, share, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        by_rows = logs.exp().mul_(scale)
        by_rows.scatter_add_(1, index, torch.full_like(scale, -1.0))
        return by_rows.mul_((gradient * share).unsqueeze(1)), None, None, None


_WEIGHTED_DIMENSIONS = 3


def split_weights(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Targets and their weights, `Float32[b s]`; None if each counts once.

    Args:
        targets: `Int[b s]`, or `Int[b 2 s]`: targets, and the bits of their weights.
    """
    if targets.is_floating_point() or targets.dim() != _WEIGHTED_DIMENSIONS:
        return targets, None
    ids, bits = targets.unbind(1)
    weights = bits.to(torch.int32).view(torch.float32)
    return ids, weights.masked_fill(ids == IGNORE_INDEX, 0)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """`Float[]`: the weighted mean of losses of the same shape."""
    wide = weights.to(losses.dtype)
    return (losses * wide).sum() / wide.sum()


def gradient_of_z_loss(log_z: Tensor, counts: Tensor, factor: float) -> Tensor:
    """Zeros with the gradient of `factor log^2 Z`, where it counts.

    It keeps softmax's normaliser near 1. What is shown as the loss stays the cross-entropy.
    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5.

    Args:
        log_z: logarithm of the sum of exponentials of a token's logits.
        counts: whether the token counts, in the same shape.
    """
    loss = factor * log_z.masked_fill(~counts, 0).square()
    return loss - loss.detach()


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over the numbers of all examples, in the precision of a loss.

    Args:
        outputs: `Float[b n]`, or `Float[b]`.
        targets: `Float[b n]`; an example whose numbers are NaN, not known, does not count.
    """
    known = ~targets.isnan().any(dim=1)
    expected = in_loss_precision(targets).nan_to_num()
    squares = (in_loss_precision(outputs).view_as(expected) - expected).square().mean(dim=1)
    return (squares * known).sum() / known.sum()


def layer_loss(layer: nn.Module, z_loss: float = 0.0) -> Callable[..., Tensor]:
    """The loss function of (output, targets) for the last layer, sharded or not.

    It gives one number, or those of `HeadLosses` for a layer with a sentence head.

    Args:
        layer: the last layer.
        z_loss: factor of the mean of `log^2 Z`, whose gradient is added to that of a cross-entropy.
    """
    loss: Callable[..., Tensor] | None = getattr(layer, _ATTRIBUTE, None)
    if loss is None and has_sentence_head(layer):
        loss = HeadLosses(tokens=mean_cross_entropy, ignored=IGNORE_INDEX)
    return _with_z_loss(loss or mean_cross_entropy, z_loss)


def _with_z_loss(loss: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    """A cross-entropy with the gradient of `factor log^2 Z`."""
    if not factor:
        return loss
    if isinstance(loss, HeadLosses):
        return replace(loss, tokens=_with_z_loss(loss.tokens, factor))
    # The loss of a sharded vocabulary is a value with that factor among its fields.
    if is_dataclass(loss) and not isinstance(loss, type):
        sharded: Callable[..., Tensor] = replace(loss, z_loss=factor)
        return sharded
    return partial(mean_cross_entropy, z_loss=factor)


def set_layer_loss(layer: nn.Module, loss: Callable[..., Tensor]) -> None:
    """Attaches the loss function that `layer_loss` returns: a sharded layer's or a user's."""
    setattr(layer, _ATTRIBUTE, loss)


def has_own_loss(layer: nn.Module) -> bool:
    """Whether a loss function was attached to a layer."""
    return hasattr(layer, _ATTRIBUTE)


def in_loss_precision(logits: Tensor) -> Tensor:
    """The logits in the precision of the loss: float64 stays, all else becomes float32."""
    return logits if logits.dtype == torch.float64 else logits.float()
