"""Pairs of sentences by the written specification, docs/reference/data-order.md, in plain Python.

It shares no code with `windlass.data`. A row is one pair.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windlass.runtime.verify.plain_loop.data_order import (
    IGNORED_TARGET,
    PlainMasking,
    masked,
    number,
    permuted,
    source_of,
)

PAIR_PLACES = 3
"""Targets of pairs behind those of a row's tokens; a row of one pair uses the first."""
_AROUND = 3


class PlainPiece(NamedTuple):
    """A part of a document that makes a pair."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPairs:
    """The samples of each step, and the held-out pairs."""

    train: Sequence[int]
    held_out: Sequence[int]
    held_out_bytes: Sequence[int]
    """Bytes of text that each held-out token stands for."""
    pieces: tuple[tuple[PlainPiece, ...], ...]
    """Those of each source, in the order of its rows."""
    held_out_pieces: tuple[PlainPiece, ...]
    weights: tuple[float, ...] | None
    sequence: int
    batch: int
    """Global batch in pairs."""
    seed: int
    masking: PlainMasking
    first: int
    """Id of the token before a pair."""
    separator: int
    vocabulary: int
    """Entries of the model."""

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs `Int[batch s]` and targets `Int[batch s+3]` of a step, counted from 1."""
        rows = [self._row(step, index) for index in range(self.batch)]
        return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

    def documents(self, step: int) -> Tensor:
        """0 for each token of a pair and 1 for the fill behind it, `Int[batch s]`."""
        return self._apart([self._row(step, index)[2] for index in range(self.batch)])

    def held_out_samples(self, count: int) -> tuple[Tensor, Tensor, int]:
        """Inputs and targets of at most `count` pairs, and the bytes of their masked tokens."""
        rows = [self._held_out_row(place) for place in self._held_out_places(count)]
        nbytes = sum(
            self.held_out_bytes[offset]
            for _, targets, _, offsets in rows
            for offset, target in zip(offsets, targets, strict=False)
            if target != IGNORED_TARGET and offset is not None
        )
        inputs, targets = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
        return inputs, targets, nbytes

    def held_out_documents(self, count: int) -> Tensor:
        """As `documents` of `held_out_samples`."""
        places = self._held_out_places(count)
        return self._apart([self._held_out_row(place)[2] for place in places])

    def _row(self, step: int, index: int) -> tuple[list[int], list[int], int, list[int | None]]:
        sizes = [len(pieces) for pieces in self.pieces]
        source, position = source_of(
            (step - 1) * self.batch + index, self.weights or sizes, self.seed
        )
        epoch, within = divmod(position, sizes[source])
        pieces = self.pieces[source]
        chosen = permuted(within, len(pieces), self.seed, source, epoch)
        return self._pair(self.train, pieces, chosen, (self.seed, step, index))

    def _held_out_places(self, count: int) -> list[int]:
        available = len(self.held_out_pieces)
        count = min(count, available)
        return [index * available // count for index in range(count)]

    def _held_out_row(self, place: int) -> tuple[list[int], list[int], int, list[int | None]]:
        return self._pair(self.held_out, self.held_out_pieces, place, ())

    def _pair(
        self, tokens: Sequence[int], pieces: Sequence[PlainPiece], chosen: int, key: tuple[int, ...]
    ) -> tuple[list[int], list[int], int, list[int | None]]:
        """Inputs, targets, tokens that are no fill, and where each token stands in the text."""
        piece = pieces[chosen]
        key = (*key, piece.start)
        length = 1 + number(piece.length - 1, *key, 0, 0)
        one = [piece.start + at for at in range(length)]
        two = [piece.start + at for at in range(length, piece.length)]
        sentence = 0
        if number(2, *key, 0, 1):
            other = self._elsewhere(pieces, chosen, len(two), key)
            two, sentence = (two, 0) if other is None else (other, 1)
        hidden, learned = masked([tokens[at] for at in one + two], self.masking, key)
        inputs, targets = [self.first], [IGNORED_TARGET]
        offsets: list[int | None] = [None]
        for begin, part, added in ((0, one, 0), (len(one), two, self.vocabulary)):
            inputs += [token + added for token in hidden[begin : begin + len(part)]]
            inputs.append(self.separator + added)
            targets += [*learned[begin : begin + len(part)], IGNORED_TARGET]
            offsets += [*part, None]
        used, fill = len(inputs), self.sequence - len(inputs)
        inputs += [self.separator] * fill
        targets += [IGNORED_TARGET] * fill
        targets += [sentence] + [IGNORED_TARGET] * (PAIR_PLACES - 1)
        return inputs, targets, used, offsets

    def _elsewhere(
        self, pieces: Sequence[PlainPiece], chosen: int, length: int, key: tuple[int, ...]
    ) -> list[int] | None:
        for attempt in range(16):
            place = number(len(pieces), *key, 0, 2 + 2 * attempt)
            other, spare = pieces[place], pieces[place].length - length
            same = other.document == pieces[chosen].document
            if place == chosen or spare < 0 or (same and attempt < 8):
                continue
            start = other.start + number(spare + 1, *key, 0, 3 + 2 * attempt)
            return [start + at for at in range(length)]
        return None

    def _apart(self, used: Sequence[int]) -> Tensor:
        return torch.tensor([[0] * n + [1] * (self.sequence - n) for n in used])


def read_plain_pairs(
    folder: Path,
    *,
    sequence: int,
    batch: int,
    seed: int,
    weights: Sequence[float] | None,
    masking: PlainMasking,
    first: int,
    vocabulary: int,
) -> PlainPairs:
    """The pairs of the tokens in a folder.

    Args:
        folder: a complete token folder.
        sequence: tokens of a row.
        batch: global batch in pairs.
        seed: seed of the run.
        weights: share of each source; None takes them in proportion to their rows.
        masking: how tokens are masked.
        first: id of the token before a pair.
        vocabulary: entries of the model.
    """
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    dtype = {"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]]
    ends = np.load(folder / "train.documents.npy")[0].tolist()
    counts = [int(source["documents"]) for source in meta["train"]["sources"]]
    pieces, begun = [], 0
    for count in counts:
        pieces.append(_pieces(ends[begun : begun + count + 1], sequence))
        begun += count
    return PlainPairs(
        train=np.fromfile(folder / "train.bin", dtype=dtype).tolist(),
        held_out=np.fromfile(folder / "held_out.bin", dtype=dtype).tolist(),
        held_out_bytes=np.fromfile(folder / "held_out.bytes.bin", dtype="<u4").tolist(),
        pieces=tuple(pieces),
        held_out_pieces=_pieces(np.load(folder / "held_out.documents.npy")[0].tolist(), sequence),
        weights=None if weights is None else tuple(weights),
        sequence=sequence, batch=batch, seed=seed, masking=masking, first=first,
        separator=int(meta["end_of_text"]), vocabulary=vocabulary,
    )  # fmt: skip


def _pieces(ends: Sequence[int], sequence: int) -> tuple[PlainPiece, ...]:
    """The pieces of consecutive documents, the longest first."""
    pieces = []
    for document in range(len(ends) - 1):
        at, end = ends[document], ends[document + 1] - 1
        while at < end:
            length = min(sequence - _AROUND, end - at)
            if length > 1:
                pieces.append(PlainPiece(document, at, length))
            at += length
    return tuple(sorted(pieces, key=lambda piece: -piece.length))
