"""Rows of text for masked language models: each is several documents, each masked."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.keyed_choices import MlmMasking
from windlass.data.packing.row_batches import Row, RowBatches, Split, order_rows
from windlass.data.packing.row_layout import Integers, RowLayout, lay_out_pieces
from windlass.data.token_files import TokenDataset


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskedRows:
    """Documents share rows and none sees another; a longer one is cut into pieces.

    What fills a row up is ends of text, which no target asks for.

    Why: a window of text goes on from the end of a document into the next, and padded rows compute
    what nobody learns (Krell et al. 2021, arXiv:2107.02027).
    """

    tokens: TokenDataset
    sequence: int
    masking: MlmMasking

    def lay_out(self, starts: Integers, split: Split) -> RowLayout:
        """The rows of consecutive documents."""
        del split
        return lay_out_pieces(starts, self.sequence, self.masking.target_counts)

    def shortage(self, side: str, source: str, layout: RowLayout) -> str:
        """Why a source has no row."""
        return (
            f"none of the {layout.without_targets} {side} sequences of `{source}` has two tokens; "
            "raise `train.sequence`, or take more text"
        )

    def empty(self, count: int) -> tuple[TokenBatch, TokenBatch]:
        """Inputs `Int[count s]` that are fill, and targets of which none counts."""
        shape, fill = (count, self.sequence), self.tokens.meta.end_of_text
        ignored = self.masking.ignore_index
        return np.full(shape, fill, dtype=np.int64), np.full(shape, ignored, dtype=np.int64)

    def write(
        self, inputs: TokenBatch, targets: TokenBatch, row: Row, key: tuple[int, ...]
    ) -> None:
        """Writes a row's inputs and targets, each `Int[s]`."""
        tokens = self.tokens.train if row.split == "train" else self.tokens.held_out
        begin = 0
        for start, length, piece_key in _keyed_pieces(row, key):
            piece = tokens[start : start + length].astype(np.int64)
            end = begin + length
            inputs[begin:end], targets[begin:end] = self.masking.mask(piece, *piece_key)
            begin = end

    def learned_offsets(self, row: Row) -> TokenBatch:
        """Where the tokens that a held-out row's targets are stand in their split."""
        return np.concatenate(
            [
                start + self.masking.masked_positions(length, *key)
                for start, length, key in _keyed_pieces(row, ())
            ]
        )


def masked_batches(
    tokens: TokenDataset,
    *,
    sequence: int,
    batch: int,
    seed: int,
    masking: MlmMasking,
    weights: tuple[float, ...] | None = None,
) -> RowBatches:
    """Batches of packed rows of masked text; masks differ from epoch to epoch.

    Args:
        sequence: tokens of a row.
        batch: global batch, in rows.
        seed: of the order and the masks.
        weights: share of the samples of each source; None takes them in proportion to their rows.

    Raises:
        DataError: a source has no document of two tokens.
    """
    writer = MaskedRows(tokens=tokens, sequence=sequence, masking=masking)
    order = order_rows(
        tokens, writer, sequence=sequence, batch=batch, seed=seed, weights=weights
    )  # fmt: skip
    notes = (order.packing_note("sequences"),)
    return RowBatches(tokens=tokens, order=order, writer=writer, notes=notes, is_packed=True)


def _keyed_pieces(row: Row, key: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """First token and length of each sequence of a row, and the key of its mask."""
    for start, length in row.pieces():
        yield start, length, (*key, start)
