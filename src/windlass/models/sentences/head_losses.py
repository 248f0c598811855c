"""HeadLosses: the losses of a head of masked tokens and of one of sentences, side by side."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from windlass.models.sentences.sentence_head import HeadOutputs
from windlass.schema import SENTENCES_PER_ROW

HEAD_RESULTS = 3
"""Numbers that `HeadLosses` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLosses:
    """Each head's mean over its own targets, so that each can be weighed by its share of them.

    One number would need both counts of the whole batch: a mean of sums is none of means.
    """

    tokens: Callable[[Tensor, Tensor], Tensor]
    """The loss of tokens: mean cross-entropy, or that of a sharded vocabulary."""
    ignored: int
    """Target that does not count."""
    ranks: int = 1
    """Tensor-parallel ranks that all compute the sentence head; each adds a part of its
    gradient."""

    def __call__(self, output: HeadOutputs, targets: Tensor) -> Tensor:
        """Mean loss of tokens, of sentences, and the share of sentences that are right, `[3]`.

        Args:
            output: of the last layer; its loss of tokens may be computed already.
            targets: `Int[b s+p]`: those of tokens, then of documents in their order.
        """
        loss = output.tokens
        if loss.dim():
            loss = self.tokens(loss, token_targets(targets))
        count = output.sentences.shape[1]
        classes = targets[:, targets.shape[1] - SENTENCES_PER_ROW :][:, :count]
        logits = output.sentences.to(loss.dtype).flatten(0, 1)
        expected = classes.flatten()
        of_sentences = ClassLoss(ignored=self.ignored, ranks=self.ranks)(logits, expected)
        counts = expected != self.ignored
        right = (logits.argmax(dim=-1) == expected) & counts
        return torch.stack((loss, of_sentences, (right.sum() / counts.sum()).to(loss.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoss:
    """Mean cross-entropy of classes that each tensor-parallel rank computes in full."""

    ignored: int
    """Target that does not count."""
    ranks: int = 1
    """Ranks, each of which adds a part of the gradient."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats.

        Args:
            logits: `Float[b c]`.
            targets: `Int[b]`.
        """
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = functional.cross_entropy(wide, targets, ignore_index=self.ignored)
        if self.ranks == 1:
            return loss
        own = loss / self.ranks
        return own + (loss - own).detach()


def token_targets(targets: Tensor) -> Tensor:
    """The targets of tokens, `Int[b s]`, among those of both heads, `Int[b s+p]`."""
    return targets[:, : targets.shape[1] - SENTENCES_PER_ROW]
