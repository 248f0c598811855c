"""Which documents stand in which row of a batch, fixed for all epochs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """Rows of at most `sequence` inputs, each a document; documents without a target are left out.

    An input is a token whose successor in its document is the target, so that a document of n
    tokens has n - 1 of them.
    """

    documents: Integers
    """Index of the document of each row, `Int[row]`."""
    starts: Integers
    """Offset of its first token, `Int[row]`."""
    lengths: Integers
    """Number of its inputs, `Int[row]`."""
    target_counts: Integers
    """Targets that count in the loss, `Int[row]`."""
    truncated: int
    """Documents whose end is cut off."""
    dropped: int
    """Documents that are left out for their length."""
    without_targets: int
    """Documents that are left out because none of their targets counts."""

    def __len__(self) -> int:
        return len(self.documents)


def lay_out_rows(
    starts: Integers, weights: Weights, *, sequence: int, drop_long: bool
) -> RowLayout:
    """The rows of consecutive documents.

    Args:
        starts: token offset of each document, then the end of the last, `Int[document + 1]`.
        weights: weight of each token as a target, of the whole split, `Float[token]`.
        sequence: most inputs of a row.
        drop_long: leaves out what is longer; otherwise its end is cut off.
    """
    inputs = np.maximum(np.diff(starts) - 1, 0)
    is_long = inputs > sequence
    lengths = np.minimum(inputs, sequence)
    counted = np.concatenate([[0], np.cumsum(weights[starts[0] : starts[-1]] > 0)])
    # The first token of a document is no target; an empty document has none at all.
    first = np.minimum(starts[:-1] + 1, starts[1:]) - starts[0]
    counts = counted[first + lengths] - counted[first]
    is_dropped = is_long if drop_long else np.zeros_like(is_long)
    kept = np.flatnonzero((counts > 0) & ~is_dropped)
    return RowLayout(
        documents=kept,
        starts=starts[:-1][kept],
        lengths=lengths[kept],
        target_counts=counts[kept],
        truncated=int(is_long[kept].sum()),
        dropped=int(is_dropped.sum()),
        without_targets=int(((counts == 0) & ~is_dropped).sum()),
    )
