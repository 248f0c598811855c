"""Which documents stand in which row of a batch, fixed for all epochs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """Rows of at most `sequence` inputs; documents without a target that counts are left out.

    An input is a token whose successor in its document is the target, so that a document of n
    tokens has n - 1 of them.
    """

    row_starts: Integers
    """Where the documents of each row begin in the next three, `Int[row + 1]`."""
    documents: Integers
    """Index of each document, row after row, `Int[document]`."""
    starts: Integers
    """Offset of the first token of each, `Int[document]`."""
    lengths: Integers
    """Number of inputs of each, `Int[document]`."""
    target_counts: Integers | npt.NDArray[np.float64]
    """Targets that count in the loss, `Int[row]`, or of several kinds, `Int[row kind]`; if weights
    are fractions, their sum."""
    truncated: int
    """Documents whose end is cut off."""
    dropped: int
    """Documents that are left out for their length."""
    without_targets: int
    """Documents that are left out because none of their targets counts."""

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def row(self, index: int) -> range:
        """Places of a row's documents in `documents`, `starts` and `lengths`."""
        return range(int(self.row_starts[index]), int(self.row_starts[index + 1]))


def lay_out_rows(
    starts: Integers, weights: Weights, *, sequence: int, drop_long: bool, packing: bool
) -> RowLayout:
    """The rows of consecutive documents.

    Args:
        starts: token offset of each document, then the end of the last, `Int[document + 1]`.
        weights: weight of each token as a target, of the whole split, `Float[token]`.
        sequence: most inputs of a row.
        drop_long: leaves out what is longer; otherwise its end is cut off.
        packing: whether documents share rows.
    """
    inputs = np.maximum(np.diff(starts) - 1, 0)
    is_long = inputs > sequence
    lengths = np.minimum(inputs, sequence)
    counted = np.concatenate([[0], np.cumsum(weights[starts[0] : starts[-1]] > 0)])
    # The first token of a document is no target; an empty document has none at all.
    first = np.minimum(starts[:-1] + 1, starts[1:]) - starts[0]
    counts = counted[first + lengths] - counted[first]
    sums: Integers | npt.NDArray[np.float64] = counts
    if has_fractions(weights):
        total = np.cumsum(weights[starts[0] : starts[-1]], dtype=np.float64)
        added = np.concatenate([[0.0], total])
        sums = added[first + lengths] - added[first]
    is_dropped = is_long if drop_long else np.zeros_like(is_long)
    kept = np.flatnonzero((counts > 0) & ~is_dropped)
    row_starts = np.arange(len(kept) + 1)
    if packing:
        rows = pack(lengths[kept], sequence)
        kept = kept[np.array([each for row in rows for each in row], dtype=np.int64)]
        row_starts = np.cumsum([0, *map(len, rows)])
    return RowLayout(
        row_starts=row_starts,
        documents=kept,
        starts=starts[:-1][kept],
        lengths=lengths[kept],
        target_counts=np.add.reduceat(sums[kept], row_starts[:-1]) if len(kept) else sums[:0],
        truncated=int(is_long[kept].sum()),
        dropped=int(is_dropped.sum()),
        without_targets=int(((counts == 0) & ~is_dropped).sum()),
    )


def has_fractions(weights: Weights) -> bool:
    """Whether some targets count otherwise than once or not at all."""
    return bool(((weights != 0) & (weights != 1)).any())


def lay_out_pieces(
    starts: Integers,
    sequence: int,
    targets: Callable[[Integers], Integers],
    *,
    added: int = 0,
    most: int | None = None,
) -> RowLayout:
    """Packed rows of consecutive documents whose own tokens are learned, as masked ones are.

    A document that is longer than a row is cut into pieces, each but the last as long as a row. A
    piece of one token, the end of a text, is left out: nothing beside it says what it was.

    Args:
        starts: token offset of each document, then the end of the last, `Int[document + 1]`.
        sequence: most tokens of a row.
        targets: number of targets of pieces of such lengths, `Int[piece]`, or of several kinds of
            targets, `Int[piece kind]`.
        added: tokens that a row holds beside those of each piece; the end of a text is none of a
            piece then.
        most: most pieces of a row; None sets no limit.
    """
    sizes = np.maximum(np.diff(starts) - 1, 0) if added else np.diff(starts)
    longest = max(sequence - added, 1)
    pieces = -(-sizes // longest)
    documents = np.repeat(np.arange(len(sizes)), pieces)
    index = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lengths = np.minimum(sizes[documents] - index * longest, longest)
    kept = np.flatnonzero((lengths > 1) & (lengths + added <= sequence))
    rows = pack(lengths[kept] + added, sequence, most)
    kept = kept[np.array([each for row in rows for each in row], dtype=np.int64)]
    row_starts = np.cumsum([0, *map(len, rows)])
    counts = targets(lengths[kept])
    return RowLayout(
        row_starts=row_starts,
        documents=documents[kept],
        starts=(starts[:-1][documents] + index * longest)[kept],
        lengths=lengths[kept] + added,
        target_counts=np.add.reduceat(counts, row_starts[:-1]) if len(kept) else counts,
        truncated=0,
        dropped=0,
        without_targets=len(documents) - len(kept),
    )


def pack(lengths: Integers, capacity: int, most: int | None = None) -> list[list[int]]:
    """Indices of the lengths in each row, by best fit: the longest first, into the fullest row.

    It takes at most 11/9 as many rows as the best packing, and one more.
    Source: Johnson 1973, Near-optimal bin packing algorithms, MIT, MAC-TR-109.

    Args:
        lengths: of 1 to `capacity` each, `Int[document]`.
        capacity: most that a row holds.
        most: most lengths of a row; None sets no limit.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Rows with so much space left."""
    spaces = 0  # bit n is set if a row has exactly n left
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            spaces &= ~(0 if by_space[space] else 1 << space)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if len(rows[row]) != most:
            by_space[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows
