"""SentenceHead: classes of each document of a row, by the vector of its first token.

Source: Devlin et al. 2018, arXiv:1810.04805, and its code, google-research/bert. Shape letters: b
micro-batch, s sequence, d width, p documents of a row, c classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.models.sentences.first_tokens import FirstTokens


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
