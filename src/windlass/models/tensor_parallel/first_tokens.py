"""First tokens of documents and images, which each rank gets from the rank that has them."""

import torch
from torch import Tensor

from windlass.models.sentences.first_tokens import FirstTokens, first_places
from windlass.models.tensor_parallel.collectives import TensorParallelRank, all_reduce_autograd


class ExchangedFirstTokens(FirstTokens):
    """First tokens of rows of which a rank has some of the tokens.

    The ranks exchange these vectors alone, and all compute the same of them; the loss gives each an
    equal part of the gradient.
    """

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """Maps the rank's tokens, `[b s/t d]`, to `[b p d]`."""
        count = x.shape[1]
        if self.documents is None:
            places = torch.zeros((len(x), 1), dtype=torch.int64, device=x.device)
        else:
            places = first_places(self.documents)
        places = places - self.tp_rank.row * count
        on_other_rank = ((places < 0) | (places >= count)).unsqueeze(-1)
        index = places.unsqueeze(-1).masked_fill(on_other_rank, 0).expand(-1, -1, x.shape[-1])
        vectors = x.gather(1, index).masked_fill(on_other_rank, 0)
        return all_reduce_autograd(vectors, self.tp_rank.all_group)
