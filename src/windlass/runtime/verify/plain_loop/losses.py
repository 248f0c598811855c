"""Losses of a micro-batch in plain PyTorch, which share no code with those of a run."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from windlass.runtime.verify.plain_loop.data_order import IGNORED_TARGET


class Sums(NamedTuple):
    """Sums over the targets of some samples."""

    nats: Tensor
    """Losses of tokens, or of examples."""
    sentence_nats: Tensor
    """Losses of pairs of sentences; 0 without any."""
    z_loss: Tensor | float
    """`log^2 Z` of the tokens."""
    right: int
    """Examples or pairs whose class is predicted right."""


class Counts(NamedTuple):
    """Numbers of targets of some samples."""

    tokens: float
    """Targets of tokens, or the sum of their weights, or examples."""
    sentences: int
    """Pairs of sentences."""
    learned: int
    """Targets of tokens, whatever their weights, or examples."""

    @classmethod
    def of(cls, targets: Tensor, places: int) -> "Counts":
        """Counts those that are known.

        Args:
            places: how many of each row's, the last ones, are of pairs.
        """
        if targets.is_floating_point():
            known = int((~targets.isnan().any(dim=1)).sum())
            return cls(known, 0, known)
        if targets.ndim == 3:
            learned = int((targets[:, 0] != IGNORED_TARGET).sum())
            return cls(float(_weights(targets).sum()), 0, learned)
        tokens, sentences = (
            int((part != IGNORED_TARGET).sum()) for part in _parts(targets, places)
        )
        return cls(tokens, sentences, tokens)


def sums_of(outputs: Any, targets: Tensor, places: int) -> Sums:  # noqa: ANN401  one tensor or two
    """The losses of all targets of a micro-batch together.

    They are the cross-entropy of classes, or the mean squared error of an example's numbers.

    Args:
        outputs: what the model gives; with pairs of sentences, logits of tokens `[b s v]` and of
            pairs `[b n 2]`.
        places: how many of each row's targets, the last ones, are of pairs.
    """
    zero = torch.zeros(())
    if targets.is_floating_point():
        known = ~targets.isnan().any(dim=1)
        squares = (outputs.reshape(targets.shape) - targets)[known].square()
        return Sums(squares.mean(dim=1).sum(), zero, 0.0, 0)
    if targets.ndim == 3:
        weights, logits = _weights(targets), outputs.movedim(-1, 1)
        losses = functional.cross_entropy(
            logits, targets[:, 0], ignore_index=IGNORED_TARGET, reduction="none"
        )
        squares = outputs.logsumexp(-1).square()
        return Sums((weights * losses).sum(), zero, (weights * squares).sum(), 0)
    tokens, sentences = _parts(targets, places)
    if not places:
        right = int((outputs.argmax(dim=-1) == targets).sum()) if targets.ndim == 1 else 0
        return Sums(_cross_entropy(outputs, tokens), zero, _squares(outputs, tokens), right)
    logits, classes = outputs
    sentences = sentences[:, : classes.shape[1]]
    return Sums(
        _cross_entropy(logits, tokens), _cross_entropy(classes, sentences),
        _squares(logits, tokens), int((classes.argmax(dim=-1) == sentences).sum()),
    )  # fmt: skip


def _weights(targets: Tensor) -> Tensor:
    """`Float64[b s]`: how much each target counts, of targets beside the bits of their weights."""
    weights = targets[:, 1].to(torch.int32).view(torch.float32).double()
    return torch.where(targets[:, 0] == IGNORED_TARGET, 0.0, weights)


def _parts(targets: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Targets of tokens, and those of pairs of sentences."""
    if not places:
        return targets, targets[:0]
    return targets[:, :-places], targets[:, -places:]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED_TARGET,
        reduction="sum",
    )  # fmt: skip


def _squares(logits: Tensor, targets: Tensor) -> Tensor:
    """`log^2 Z` of all targets together, with Z the sum of a target's exponentials."""
    rows = logits.reshape(-1, logits.shape[-1])[targets.reshape(-1) != IGNORED_TARGET]
    return rows.exp().sum(dim=1).log().square().sum()
