"""Positions and boundaries of the documents that share a row, and the modules that need them."""

import torch
from torch import Tensor, nn

_BUFFER = "documents"


class SeesDocuments(nn.Module):
    """A module whose output depends on where the documents of a row begin.

    Its `documents`, `Int[b s]`, say which document of its row each token belongs to; tokens of one
    follow each other. None means that a row is one document.
    """

    documents: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(_BUFFER, None, persistent=False)


def document_buffers(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's buffers that take `documents`; none if it looks at no other token."""
    return tuple(
        f"{path}.{_BUFFER}" if path else _BUFFER
        for path, module in layer.named_modules()
        if isinstance(module, SeesDocuments)
    )


def positions_in_documents(documents: Tensor) -> Tensor:
    """The place of each token in its document, from 0; maps `Int[b s]` to `Int[b s]`."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(dim=1).values


def document_lengths(documents: Tensor) -> list[int]:
    """Tokens of each document of one row, of `Int[s]`."""
    lengths: list[int] = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
    return lengths


def hidden_documents(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, `[queries keys]`: minus infinity between documents, else 0.

    Args:
        queries: the document of each token that sees, of one row.
        keys: the document of each token that is seen.
    """
    apart = queries[:, None] != keys[None]
    return torch.zeros_like(apart, dtype=dtype).masked_fill(apart, float("-inf"))
