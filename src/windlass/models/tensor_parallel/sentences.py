"""The sentence head that each tensor-parallel rank has in full."""

import torch
from torch import Tensor

from windlass.models.sentences.sentence_head import SentenceHead, first_places
from windlass.models.tensor_parallel.collectives import TensorParallelRank, all_reduce_autograd


class ReplicatedSentenceHead(SentenceHead):
    """A sentence head whose rank has some of the tokens.

    The ranks exchange the vectors of first tokens alone and all compute the same; the loss gives
    each an equal part of the gradient.
    """

    tp_rank: TensorParallelRank

    def first_tokens(self, x: Tensor) -> Tensor:
        """The vectors of the first tokens of a row's documents, `[b p d]`, of `[b s/t d]`."""
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
