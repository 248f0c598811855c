"""Packed rows, computed document by document: none is in the memory of another's attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.runtime.verify.plain_loop.dropout import PlainKeyedDropout

PAIR_PLACES = 3
"""Targets of pairs behind those of a row's tokens; a row of one pair uses the first."""


class PlainDocuments:
    """Gives the modules of a model that look at other tokens one document at a time.

    What they do with the boundaries of documents themselves is never asked for: attention that
    sees a neighbour, or positions that go on in it, differ from this.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lengths: list[list[int]] | None = None
        for module in model.modules():
            if "documents" in module._buffers:  # noqa: SLF001  None is in no public list
                is_plain = next(module.parameters(), None) is None
                apart = _first_tokens_apart if is_plain else _apart
                call = partial(self._call, module, module.forward, apart)
                module.forward = call

    def begin(self, documents: Tensor | None) -> None:
        """Begins a micro-batch.

        Args:
            documents: which document of its row each token belongs to, `Int[b s]`; None if each
                row is one.
        """
        self._lengths = None if documents is None else [_lengths(row) for row in documents.tolist()]

    def _call(
        self,
        module: nn.Module,
        forward: Callable[[Tensor], Tensor],
        apart: Callable[[list[Tensor]], Tensor],
        x: Tensor,
    ) -> Tensor:
        if self._lengths is None:
            return forward(x)
        dropouts = [each for each in module.modules() if isinstance(each, PlainKeyedDropout)]
        calls = [dropout.calls for dropout in dropouts]
        rows = []
        for row, lengths in enumerate(self._lengths):
            begin, parts = 0, []
            for length in lengths:
                for dropout, done in zip(dropouts, calls, strict=True):
                    dropout.calls, dropout.place = done, (row, begin)
                parts.append(forward(x[row : row + 1, begin : begin + length]))
                begin += length
            rows.append(apart(parts))
        for dropout in dropouts:
            dropout.place = (0, 0)
        return torch.cat(rows)


def _apart(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1)


def _first_tokens_apart(parts: list[Tensor]) -> Tensor:
    """The first vectors of a row's first documents; those of the first one in place of missing."""
    firsts = [part[:, :1] for part in parts[:PAIR_PLACES]]
    return torch.cat(firsts + firsts[:1] * (PAIR_PLACES - len(firsts)), dim=1)


def _lengths(row: list[Any]) -> list[int]:
    """Tokens of each document of a row."""
    lengths: list[int] = []
    for index, document in enumerate(row):
        if index and document == row[index - 1]:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths
