"""SentenceHead: classes of each document of a row, by the vector of its first token.

Source: Devlin et al. 2018, arXiv:1810.04805, and its code, google-research/bert. Shape letters: b
micro-batch, s sequence, d width, p documents of a row, c classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.positions.documents import SeesDocuments
from windlass.schema import SENTENCES_PER_ROW


class HeadOutputs(NamedTuple):
    """What a last layer gives that says something of tokens and of sentences."""

    tokens: Tensor
    """Logits `[b s v]`, or the loss of tokens where that is fused."""
    sentences: Tensor
    """Logits `[b p c]`."""


class SentenceHead(nn.Module):
    """The pooler of BERT, a linear layer and a tanh, and a projection to the classes.

    Args:
        pooler: maps d to d.
        classes: maps d to c.
        dropout: probability that a feature is dropped between them.
        is_alone: whether nothing is said of tokens beside it.
    """

    def __init__(
        self,
        pooler: nn.Linear,
        classes: nn.Linear,
        *,
        dropout: float = 0.0,
        is_alone: bool = False,
    ) -> None:
        super().__init__()
        self.is_alone = is_alone
        self.first_tokens = FirstTokens()
        self.pooler = pooler
        self.dropout = nn.Dropout(dropout)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b p c]`; without documents a row is one, and p is 1."""
        return self.classes(self.dropout(torch.tanh(self.pooler(self.first_tokens(x)))))


def has_sentence_head(layer: nn.Module) -> bool:
    """Whether a layer gives `HeadOutputs`."""
    return any(isinstance(each, SentenceHead) and not each.is_alone for each in layer.modules())


def gives_text_classes(layer: nn.Module) -> bool:
    """Whether a layer gives logits of a class of each row, `[b c]`."""
    return any(isinstance(each, SentenceHead) and each.is_alone for each in layer.modules())


def token_output(output: Tensor | HeadOutputs) -> Tensor:
    """What a last layer says of tokens."""
    return output.tokens if isinstance(output, HeadOutputs) else output


class FirstTokens(SeesDocuments):
    """The vectors of the first tokens of a row's documents; without documents a row is one."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b p d]`."""
        if self.documents is None:
            return x[:, :1]
        places = first_places(self.documents)
        return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def first_places(documents: Tensor) -> Tensor:
    """Where the first documents of each row begin, `Int[b p]`, with p of `SENTENCES_PER_ROW`.

    Args:
        documents: which document of its row each token belongs to, `Int[b s]`, from 0 on; of those
            that a row does not have, place 0 is given.
    """
    numbers = torch.arange(SENTENCES_PER_ROW, device=documents.device)
    is_of = documents.unsqueeze(1) == numbers.unsqueeze(-1)  # [b p s]
    return is_of.int().argmax(dim=-1)


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
