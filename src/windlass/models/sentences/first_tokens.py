"""FirstTokens: the vector by which a document, or an image, is told apart as a whole."""

import torch
from torch import Tensor

from windlass.models.packing.documents import SeesDocuments
from windlass.schema import SENTENCES_PER_ROW


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
