"""What is learned of rows of documents: answers, masked tokens, or pairs of sentences."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from windlass.runtime.verify.plain_loop.data_order import (
    IGNORED_TARGET,
    PlainMasking,
    masked,
    number,
)
from windlass.runtime.verify.plain_loop.documents import PAIR_PLACES
from windlass.runtime.verify.plain_loop.rows import (
    PlainPiece,
    PlainRow,
    PlainRows,
    PlainSplit,
    Rows,
    RowWriter,
    cut,
    ends_of_sources,
    packed,
    read_plain_splits,
)

_AROUND = 3
"""Tokens around a pair of sentences."""


class RowForm(NamedTuple):
    """The form of a run's rows."""

    sequence: int
    """Tokens of a row."""
    batch: int
    """Global batch in rows."""
    seed: int
    weights: tuple[float, ...] | None
    """Share of each source among the samples; None takes them in proportion to their rows."""
    packing: bool
    """Whether documents share rows."""


class PairTokens(NamedTuple):
    """The special tokens of pairs of sentences."""

    first: int
    """Id of the token before a pair."""
    vocabulary: int
    """Entries of the model, which are added to the ids of a second sentence."""


def read_plain_answers(folder: Path, form: RowForm, *, drop_long: bool) -> PlainRows:
    """Conversations, of which the tokens with a weight are learned.

    Args:
        drop_long: whether a conversation that is longer than a row is left out, not cut off.
    """
    train, held_out, _, fill = read_plain_splits(folder)

    def rows(split: PlainSplit, ends: Sequence[int]) -> Rows:
        pieces = []
        for document in range(len(ends) - 1):
            start, inputs = ends[document], ends[document + 1] - ends[document] - 1
            length = min(inputs, form.sequence)
            counts = (split.weights or ())[start + 1 : start + 1 + max(length, 0)]
            if any(counts) and not (drop_long and inputs > form.sequence):
                pieces.append(PlainPiece(document, start, length))
        return packed(pieces, form.sequence) if form.packing else tuple((p,) for p in pieces)

    counts = [*(train.weights or ()), *(held_out.weights or ())]
    return _plain_rows(
        folder, form, rows, partial(_answers, form.sequence, fill), are_apart=form.packing,
        are_weighted=any(weight not in (0, 1) for weight in counts),
    )  # fmt: skip


def read_plain_masked_text(folder: Path, form: RowForm, masking: PlainMasking) -> PlainRows:
    """Packed documents, of which some tokens are masked."""
    fill = read_plain_splits(folder)[-1]

    def rows(split: PlainSplit, ends: Sequence[int]) -> Rows:
        del split
        return packed(cut(ends, form.sequence), form.sequence)

    return _plain_rows(folder, form, rows, partial(_masked_text, form.sequence, fill, masking))


def read_plain_pairs(
    folder: Path, form: RowForm, masking: PlainMasking, tokens: PairTokens
) -> PlainRows:
    """Pairs of sentences, of which every other second one is of another document."""
    separator = read_plain_splits(folder)[-1]

    def rows(split: PlainSplit, ends: Sequence[int]) -> Rows:
        del split
        pieces = cut(ends, form.sequence - _AROUND, around=_AROUND)
        return packed(pieces, form.sequence, PAIR_PLACES if form.packing else 1)

    write = partial(_pairs, form.sequence, separator, masking, tokens)
    return _plain_rows(folder, form, rows, write, places=PAIR_PLACES)


def _plain_rows(
    folder: Path,
    form: RowForm,
    rows: Callable[[PlainSplit, Sequence[int]], Rows],
    write: RowWriter,
    *,
    places: int = 0,
    are_apart: bool = True,
    are_weighted: bool = False,
) -> PlainRows:
    """The rows of a folder, which `rows` lays out and `write` writes."""
    train, held_out, nbytes, _ = read_plain_splits(folder)
    return PlainRows(
        train=train, held_out=held_out, held_out_bytes=nbytes,
        rows=tuple(rows(train, ends) for ends in ends_of_sources(folder, train.ends)),
        held_out_rows=rows(held_out, held_out.ends), write=write, weights=form.weights,
        batch=form.batch, seed=form.seed, places=places, are_apart=are_apart,
        are_weighted=are_weighted,
    )  # fmt: skip


def _answers(
    sequence: int, fill: int, split: PlainSplit, rows: Rows, row: int, key: tuple[int, ...]
) -> PlainRow:
    del key  # nothing is drawn
    inputs, targets, weights, lengths, learned = [], [], [], [], []
    for piece in rows[row]:
        for at in range(piece.start, piece.start + piece.length):
            weight = (split.weights or ())[at + 1]
            inputs.append(split.tokens[at])
            targets.append(split.tokens[at + 1] if weight else IGNORED_TARGET)
            weights.append(weight)
            learned += [at + 1] if weight else []
        lengths.append(piece.length)
    return _filled(sequence, fill, inputs, targets, weights, lengths, learned)


def _masked_text(
    sequence: int,
    fill: int,
    masking: PlainMasking,
    split: PlainSplit,
    rows: Rows,
    row: int,
    key: tuple[int, ...],
) -> PlainRow:
    inputs, targets, lengths, learned = [], [], [], []
    for piece in rows[row]:
        span = range(piece.start, piece.start + piece.length)
        hidden, asked = masked([split.tokens[at] for at in span], masking, (*key, piece.start))
        inputs += hidden
        targets += asked
        lengths.append(piece.length)
        learned += [at for at, target in zip(span, asked, strict=True) if target != IGNORED_TARGET]
    return _filled(sequence, fill, inputs, targets, [1.0] * len(inputs), lengths, learned)


def _filled(
    sequence: int,
    fill: int,
    inputs: list[int],
    targets: list[int],
    weights: list[float],
    lengths: list[int],
    learned: list[int],
) -> PlainRow:
    """A row, filled up with ends of text, which nothing asks for."""
    missing = sequence - len(inputs)
    return PlainRow(
        inputs=inputs + [fill] * missing, targets=targets + [IGNORED_TARGET] * missing,
        weights=weights + [0.0] * missing, lengths=[*lengths, missing], learned=learned,
    )  # fmt: skip


def _pairs(
    sequence: int,
    separator: int,
    masking: PlainMasking,
    special: PairTokens,
    split: PlainSplit,
    rows: Rows,
    row: int,
    key: tuple[int, ...],
) -> PlainRow:
    pieces = [piece for each in rows for piece in each]
    first = sum(map(len, rows[:row]))
    inputs, targets, lengths, learned = [], [], [], []
    sentences = [IGNORED_TARGET] * PAIR_PLACES
    for place, piece in enumerate(rows[row]):
        own = (*key, piece.start)
        one, two, sentences[place] = _sentences(pieces, first + place, own)
        hidden, asked = masked([split.tokens[at] for at in one + two], masking, own)
        inputs.append(special.first)
        targets.append(IGNORED_TARGET)
        for begin, part, added in ((0, one, 0), (len(one), two, special.vocabulary)):
            inputs += [token + added for token in hidden[begin : begin + len(part)]]
            inputs.append(separator + added)
            targets += [*asked[begin : begin + len(part)], IGNORED_TARGET]
        lengths.append(piece.length)
        learned += [at for at, t in zip(one + two, asked, strict=True) if t != IGNORED_TARGET]
    whole = _filled(sequence, separator, inputs, targets, [], lengths, learned)
    return whole._replace(targets=whole.targets + sentences)


def _sentences(
    pieces: Sequence[PlainPiece], chosen: int, key: tuple[int, ...]
) -> tuple[list[int], list[int], int]:
    """Where the tokens of both sentences of a pair stand, and 1 if the second was exchanged."""
    piece = pieces[chosen]
    tokens = piece.length - _AROUND
    length = 1 + number(tokens - 1, *key, 0, 0)
    one = [piece.start + at for at in range(length)]
    two = [piece.start + at for at in range(length, tokens)]
    if not number(2, *key, 0, 1):
        return one, two, 0
    for attempt in range(16):
        place = number(len(pieces), *key, 0, 2 + 2 * attempt)
        other, spare = pieces[place], pieces[place].length - _AROUND - len(two)
        same = other.document == piece.document
        if place == chosen or spare < 0 or (same and attempt < 8):
            continue
        start = other.start + number(spare + 1, *key, 0, 3 + 2 * attempt)
        return one, [start + at for at in range(len(two))], 1
    return one, two, 0
