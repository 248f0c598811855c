"""Batches of packed text for masked language models: a row is several documents, each masked."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.mlm_masking import MlmMasking
from windlass.data.packing.row_layout import Integers, RowLayout, lay_out_pieces
from windlass.data.packing.row_order import RowOrder
from windlass.data.token_files import StoredTokenIds, TokenDataset
from windlass.errors import raise_data_errors


@dataclass(frozen=True, slots=True, eq=False)
class MaskedBatches:
    """Random access to the packed rows of every step, as `Batches` has to its windows.

    Documents share rows and none sees another; one that is longer than a row is cut into pieces.
    What fills a row up is ends of text, which no target asks for. Rows are the same in each epoch,
    their order and their masks are not.

    Why: a window of text goes on from the end of a document into the next, and padded rows compute
    what nobody learns (Krell et al. 2021, arXiv:2107.02027).
    """

    tokens: TokenDataset
    _: KW_ONLY
    sequence: int
    """Tokens of a row."""
    batch: int
    """Global batch, in rows."""
    seed: int
    masking: MlmMasking
    weights: tuple[float, ...] | None = None
    """Share of the samples of each source; None takes them in proportion to their rows."""
    _order: RowOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lays out all rows.

        Raises:
            DataError: a source has no document of two tokens.
            InputErrors: several have none.
        """
        meta, starts = self.tokens.meta, self.tokens.documents.starts
        ends = list(accumulate((part.documents for part in meta.train.sources), initial=0))
        order = RowOrder(
            train=tuple(self._lay_out(starts[low : high + 1]) for low, high in pairwise(ends)),
            held_out=self._lay_out(self.tokens.held_out_documents.starts),
            sequence=self.sequence, batch=self.batch, seed=self.seed, weights=self.weights,
        )  # fmt: skip
        # A frozen value takes what it derives from its fields only this way.
        object.__setattr__(self, "_order", order)
        sides = [
            (part.source, "training", layout)
            for part, layout in zip(meta.train.sources, order.train, strict=True)
        ]
        sides.append((meta.held_out.source, "held-out", order.held_out))
        raise_data_errors(
            [
                f"none of the {layout.without_targets} {side} sequences of `{source}` has two "
                "tokens; raise `train.sequence`, or take more text"
                for source, side, layout in sides
                if not len(layout)
            ]
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many sequences share a row, in a sentence."""
        return (self._order.packing_note("sequences"),)

    @property
    def packing_factor(self) -> float:
        """Sequences per row of the training text."""
        return self._order.factor

    def samples(
        self, step: int, first: int = 0, count: int | None = None
    ) -> tuple[TokenBatch, TokenBatch]:
        """Inputs and targets `Int[count s]` of consecutive samples of a step.

        Args:
            step: step, counted from 1.
            first: index of the first sample in the global batch, from 0.
            count: number of samples; None takes the rest of the batch.
        """
        count = self.batch - first if count is None else count
        inputs, targets = self._empty(count)
        for place, (source, row) in enumerate(self._order.samples(step, first, count)):
            layout, key = self._order.train[source], (self.seed, step, first + place)
            self._fill(inputs[place], targets[place], self.tokens.train, layout, row, key)
        return inputs, targets

    def document_ids(self, step: int, first: int, count: int) -> TokenBatch:
        """Which sequence of its row each token belongs to, `Int[count s]`; fill is one, too.

        Args:
            step: step, counted from 1.
            first: index of the first sample in the global batch, from 0.
            count: number of samples.
        """
        return self._order.document_ids(step, first, count)

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[TokenBatch]:
        """The sequences of `held_out_batches(count, rows)`, as `document_ids` has them."""
        return self._order.held_out_documents(count, rows)

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step."""
        return self._order.target_counts(step)

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the documents in a sample of a step, in order."""
        return self._order.document_names(self.tokens, step, sample)

    def held_out_batches(
        self, count: int, rows: int = 1
    ) -> Iterator[tuple[TokenBatch, TokenBatch]]:
        """Inputs and targets of held-out rows, the same in every call and every run.

        Args:
            count: total number of rows, limited to those that exist, and spread evenly over them.
            rows: rows per batch; the last batch may have fewer.
        """
        for chunk in self._order.held_out_chunks(count, rows):
            inputs, targets = self._empty(len(chunk))
            for place, row in enumerate(chunk):
                layout = self._order.held_out
                self._fill(inputs[place], targets[place], self.tokens.held_out, layout, row, ())
            yield inputs, targets

    def bits_per_byte(self, loss: float, count: int) -> float | None:
        """Bits per byte of `held_out_batches(count)`: `loss * targets / ln 2 / bytes of targets`.

        None if no target has a byte.

        Args:
            loss: mean loss over all targets of `held_out_batches(count)`, in nats per token.
            count: number of rows, as in `held_out_batches`.
        """
        targets = nbytes = 0
        for row in self._order.held_out_rows(count):
            for start, length, key in _pieces(self._order.held_out, row, ()):
                offsets = start + self.masking.masked_positions(length, *key)
                targets += len(offsets)
                nbytes += int(self.tokens.held_out_bytes[offsets].sum())
        return loss * targets / math.log(2) / nbytes if nbytes else None

    def _lay_out(self, starts: Integers) -> RowLayout:
        return lay_out_pieces(np.asarray(starts), self.sequence, self.masking.target_counts)

    def _empty(self, count: int) -> tuple[TokenBatch, TokenBatch]:
        shape, fill = (count, self.sequence), self.tokens.meta.end_of_text
        ignored = self.masking.ignore_index
        return np.full(shape, fill, dtype=np.int64), np.full(shape, ignored, dtype=np.int64)

    def _fill(
        self,
        inputs: TokenBatch,
        targets: TokenBatch,
        tokens: StoredTokenIds,
        layout: RowLayout,
        row: int,
        key: tuple[int, ...],
    ) -> None:
        """Writes a row's inputs and targets, each `Int[s]`."""
        begin = 0
        for start, length, piece_key in _pieces(layout, row, key):
            piece = tokens[start : start + length].astype(np.int64)
            end = begin + length
            inputs[begin:end], targets[begin:end] = self.masking.mask(piece, *piece_key)
            begin = end


def _pieces(
    layout: RowLayout, row: int, key: tuple[int, ...]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """First token and length of each sequence of a row, and the key of its mask."""
    for index in layout.row(row):
        start = int(layout.starts[index])
        yield start, int(layout.lengths[index]), (*key, start)
