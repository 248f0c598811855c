"""Rows of whole documents by the written specification, docs/reference/data-order.md.

They are answers of conversations, masked text, or pairs of sentences. It shares no code with
`windlass.data`: it reads the token files itself, and packs, masks and weighs piece by piece.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windlass.runtime.verify.plain_loop.data_order import permuted, source_of


class PlainPiece(NamedTuple):
    """A part of a document that stands in a row."""

    document: int
    start: int
    """Offset of its first token in the split."""
    length: int
    """Tokens that it takes in the row, with those that stand around it."""


Rows = tuple[tuple[PlainPiece, ...], ...]
"""The pieces of each row."""


class PlainRow(NamedTuple):
    """What a row holds."""

    inputs: list[int]
    targets: list[int]
    """One for each input, then what is learned of pieces as a whole."""
    weights: list[float]
    """How much each target of a token counts."""
    lengths: list[int]
    """Inputs of each piece, then of the fill."""
    learned: list[int]
    """Where the tokens that are learned stand in their split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSplit:
    """One side of the split between training and held-out documents."""

    tokens: Sequence[int]
    weights: Sequence[float] | None
    """How much each token counts as a target; None counts all alike."""
    ends: Sequence[int]
    """Where each document begins, and where the last one ends."""


RowWriter = Callable[[PlainSplit, Rows, int, tuple[int, ...]], PlainRow]
"""Writes a row, by its number, of the rows of a source; what is drawn for it has the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRows:
    """The rows of each step, and the held-out rows."""

    train: PlainSplit
    held_out: PlainSplit
    held_out_bytes: Sequence[int]
    """Bytes of text that each held-out token stands for."""
    rows: tuple[Rows, ...]
    """Those of each source."""
    held_out_rows: Rows
    write: RowWriter
    weights: tuple[float, ...] | None
    """Share of each source among the samples; None takes them in proportion to their rows."""
    batch: int
    """Global batch in rows."""
    seed: int
    places: int
    """Targets behind those of a row's tokens."""
    are_apart: bool
    """Whether no piece of a row sees another, or the fill."""
    are_weighted: bool
    """Whether targets stand beside their weights."""

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs `Int[batch s]` and targets of a step, counted from 1."""
        return self._tensors([self._row(step, index) for index in range(self.batch)])

    def documents(self, step: int) -> Tensor | None:
        """Which piece of its row each token of a step belongs to, `Int[batch s]`."""
        return self._apart([self._row(step, index) for index in range(self.batch)])

    def held_out_samples(self, count: int) -> tuple[Tensor, Tensor, int]:
        """Inputs and targets of at most `count` rows, and the bytes of what is learned of them."""
        rows = self._held_out(count)
        nbytes = sum(self.held_out_bytes[offset] for row in rows for offset in row.learned)
        return (*self._tensors(rows), nbytes)

    def held_out_documents(self, count: int) -> Tensor | None:
        """As `documents` of `held_out_samples`."""
        return self._apart(self._held_out(count))

    def _row(self, step: int, index: int) -> PlainRow:
        sizes = [len(rows) for rows in self.rows]
        sample = (step - 1) * self.batch + index
        source, position = source_of(sample, self.weights or sizes, self.seed)
        epoch, within = divmod(position, sizes[source])
        chosen = permuted(within, sizes[source], self.seed, source, epoch)
        return self.write(self.train, self.rows[source], chosen, (self.seed, step, index))

    def _held_out(self, count: int) -> list[PlainRow]:
        available = len(self.held_out_rows)
        count = min(count, available)
        return [
            self.write(self.held_out, self.held_out_rows, index * available // count, ())
            for index in range(count)
        ]

    def _tensors(self, rows: Sequence[PlainRow]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
        if not self.are_weighted:
            return inputs, targets
        weights = torch.tensor([row.weights for row in rows], dtype=torch.float32)
        return inputs, torch.stack((targets, weights.view(torch.int32).long()), dim=1)

    def _apart(self, rows: Sequence[PlainRow]) -> Tensor | None:
        if not self.are_apart:
            return None
        return torch.tensor(
            [[n for n, length in enumerate(row.lengths) for _ in range(length)] for row in rows]
        )


def read_plain_splits(folder: Path) -> tuple[PlainSplit, PlainSplit, list[int], int]:
    """Both sides of the split, bytes of each held-out token, and the id of the end of a text."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    dtype = {"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]]
    sides = []
    for name in ("train", "held_out"):
        weights = folder / f"{name}.weights.bin"
        sides.append(
            PlainSplit(
                tokens=np.fromfile(folder / f"{name}.bin", dtype=dtype).tolist(),
                weights=np.fromfile(weights, dtype="<f4").tolist() if weights.exists() else None,
                ends=np.load(folder / f"{name}.documents.npy")[0].tolist(),
            )
        )
    nbytes = np.fromfile(folder / "held_out.bytes.bin", dtype="<u4").tolist()
    return sides[0], sides[1], nbytes, int(meta["end_of_text"])


def ends_of_sources(folder: Path, ends: Sequence[int]) -> list[Sequence[int]]:
    """The documents of each source: where each begins, and where the last one ends."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    parts, begun = [], 0
    for source in meta["train"]["sources"]:
        parts.append(ends[begun : begun + int(source["documents"]) + 1])
        begun += int(source["documents"])
    return parts


def cut(ends: Sequence[int], longest: int, *, around: int = 0) -> list[PlainPiece]:
    """Consecutive documents, cut into pieces of at most so many tokens, and of at least two.

    Args:
        longest: most tokens of a piece.
        around: tokens that a row holds beside those of each piece, one of which is the end of a
            text, which no piece has then.
    """
    pieces = []
    for document in range(len(ends) - 1):
        start, end = ends[document], ends[document + 1] - (1 if around else 0)
        while start < end:
            length = min(longest, end - start)
            if length > 1:
                pieces.append(PlainPiece(document, start, length + around))
            start += length
    return pieces


def packed(pieces: Sequence[PlainPiece], capacity: int, most: int | None = None) -> Rows:
    """Rows by best fit: the longest piece first, into the row with the least space for it.

    Of rows with the same space it takes the one that was filled last.

    Args:
        most: most pieces of a row; None sets no limit.
    """
    rows: list[list[PlainPiece]] = []
    filled: list[int] = []
    """When each row was filled last."""
    for turn, piece in enumerate(sorted(pieces, key=lambda piece: -piece.length)):
        best: tuple[int, int, int] | None = None
        for index, row in enumerate(rows):
            space = capacity - sum(other.length for other in row) - piece.length
            if space >= 0 and len(row) != most:
                place = (space, -filled[index], index)
                best = place if best is None else min(best, place)
        if best is None:
            rows.append([])
            filled.append(turn)
        index = len(rows) - 1 if best is None else best[-1]
        rows[index].append(piece)
        filled[index] = turn
    return tuple(map(tuple, rows))
