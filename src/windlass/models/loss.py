"""The loss that follows a chain: mean cross-entropy, of whole logits or of a slice's share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.tensor_parallel.collectives import Place, agreed, highest, own_tokens

NO_TARGET = -100
"""A target that does not count in the mean; torch's own default for cross-entropy."""

_LOSS = "slice_loss"
"""Where the last layer's twin keeps its loss."""


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, in float32 unless the logits are in float64."""
    return functional.cross_entropy(
        _wide(logits).flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLoss:
    """Mean cross-entropy of logits of which each slice has a share.

    The loss is the same number on every slice; its gradient is that of the slice's own logits.
    """

    place: Place
    first: int | None
    """The slice's first column of the logits; None: it has all columns of its own tokens."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats a token.

        Args:
            logits: `[b s v/t]`, or `[b s/t v]` of own tokens.
            targets: `Int[b s]`; `NO_TARGET` does not count.
        """
        counts = targets != NO_TARGET
        if self.first is not None:
            losses = self._of_columns(_wide(logits), targets, self.first)
            return losses.masked_fill(~counts, 0).sum() / counts.sum()
        own = functional.cross_entropy(
            _wide(logits).flatten(0, 1),
            own_tokens(targets, self.place).flatten(),
            ignore_index=NO_TARGET,
            reduction="sum",
        )
        return agreed(own, self.place.all) / counts.sum()

    def _of_columns(self, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        """`[b s]`: the loss of each token, `log(sum(exp(z))) - z[target]`."""
        top = highest(logits.detach().amax(-1), self.place.all)
        shifted = logits - top.unsqueeze(-1)
        column = targets - first
        elsewhere = (column < 0) | (column >= logits.shape[-1])
        place = column.masked_fill(elsewhere, 0).unsqueeze(-1)
        aimed = shifted.gather(-1, place).squeeze(-1).masked_fill(elsewhere, 0)
        # One exchange for both sums.
        sums = agreed(torch.stack((shifted.exp().sum(-1), aimed)), self.place.all)
        return sums[0].log() - sums[1]


def loss_of(layer: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of what the last layer gives, whole or one slice's twin: of (output, targets)."""
    found = getattr(layer, _LOSS, None)
    return found if isinstance(found, SliceLoss) else mean_loss


def put_loss(layer: nn.Module, loss: SliceLoss) -> None:
    """Gives the twin of a last layer its loss."""
    setattr(layer, _LOSS, loss)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
