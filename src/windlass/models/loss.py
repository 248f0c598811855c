"""The loss that follows the last layer: mean cross-entropy, or what a sharded layer attaches."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORE_INDEX = -100
"""Target that does not count in the mean; torch's own default for cross-entropy."""

_ATTRIBUTE = "_windlass_loss"
"""Attribute in which a sharded last layer keeps its loss."""


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, computed in float32, or float64 for such logits.

    Args:
        logits: `Float[b s v]`, or `Float[b v]` of one class for each example.
        targets: `Int[b s]` or `Int[b]`; `IGNORE_INDEX` does not count.
    """
    return functional.cross_entropy(
        in_loss_precision(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX
    )


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


def layer_loss(layer: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function of (output, targets) for the last layer, sharded or not."""
    attached: Callable[[Tensor, Tensor], Tensor] = getattr(layer, _ATTRIBUTE, mean_cross_entropy)
    return attached


def set_layer_loss(layer: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Attaches the loss function that `layer_loss` returns: a sharded layer's or a user's."""
    setattr(layer, _ATTRIBUTE, loss)


def has_own_loss(layer: nn.Module) -> bool:
    """Whether a loss function was attached to a layer."""
    return hasattr(layer, _ATTRIBUTE)


def in_loss_precision(logits: Tensor) -> Tensor:
    """The logits in the precision of the loss: float64 stays, all else becomes float32."""
    return logits if logits.dtype == torch.float64 else logits.float()
