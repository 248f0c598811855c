"""SentenceHead: classes of each document of a row, by the vector of its first token.

Source: Devlin et al. 2018, arXiv:1810.04805, and its code, google-research/bert. Shape letters: b
micro-batch, s sequence, d width, p documents of a row, c classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.models.packing.documents import SeesDocuments
from windlass.schema import SENTENCES_PER_ROW


class HeadOutputs(NamedTuple):
    """What a last layer gives that says something of tokens and of sentences."""

    tokens: Tensor
    """Logits `[b s v]`, or the loss of tokens where that is fused."""
    sentences: Tensor
    """Logits `[b p c]`."""


class SentenceHead(SeesDocuments):
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
        self.pooler = pooler
        self.dropout = nn.Dropout(dropout)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b p c]`; without documents a row is one, and p is 1."""
        return self.classes(self.dropout(torch.tanh(self.pooler(self.first_tokens(x)))))

    def first_tokens(self, x: Tensor) -> Tensor:
        """The vectors of the first tokens of a row's documents, `[b p d]`."""
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


def has_sentence_head(layer: nn.Module) -> bool:
    """Whether a layer gives `HeadOutputs`."""
    return any(isinstance(each, SentenceHead) and not each.is_alone for each in layer.modules())


def gives_text_classes(layer: nn.Module) -> bool:
    """Whether a layer gives logits of a class of each row, `[b c]`."""
    return any(isinstance(each, SentenceHead) and each.is_alone for each in layer.modules())


def token_output(output: Tensor | HeadOutputs) -> Tensor:
    """What a last layer says of tokens."""
    return output.tokens if isinstance(output, HeadOutputs) else output
