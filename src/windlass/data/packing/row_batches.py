"""RowBatches: batches whose rows are whole documents, whatever is learned of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Literal, Protocol

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.packing.row_layout import Integers, RowLayout
from windlass.data.packing.row_order import RowOrder
from windlass.data.token_files import TokenDataset
from windlass.errors import raise_data_errors

Split = Literal["train", "held_out"]


class RowWriter(Protocol):
    """What rows of some kind hold, and what of it is learned."""

    def lay_out(self, starts: Integers, split: Split) -> RowLayout:
        """The rows of consecutive documents.

        Args:
            starts: token offset of each document, then the end of the last, `Int[document + 1]`.
        """

    def shortage(self, side: str, source: str, layout: RowLayout) -> str:
        """Why a source has no row, in words.

        Args:
            side: `training` or `held-out`.
            layout: its empty layout.
        """

    def empty(self, count: int) -> tuple[TokenBatch, TokenBatch]:
        """Inputs `Int[count s]` that are fill, and targets of which none counts."""

    def write(
        self, inputs: TokenBatch, targets: TokenBatch, row: "Row", key: tuple[int, ...]
    ) -> None:
        """Writes a row's inputs `Int[s]` and targets.

        Args:
            inputs: of the row, as `empty` makes them.
            key: of what is drawn for it; a held-out row has none.
        """

    def learned_offsets(self, row: "Row") -> TokenBatch:
        """Where the tokens that a held-out row's targets are stand in their split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a layout."""

    split: Split
    layout: RowLayout
    index: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First token and number of inputs of each of its documents."""
        for place in self.layout.row(self.index):
            yield int(self.layout.starts[place]), int(self.layout.lengths[place])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatches:
    """Random access to the rows of every step, as `Batches` has to its windows.

    Rows are the same in each epoch, their order is not. Sample i of step t is row
    `(t - 1) * batch + i` of that order. Several sources are mixed as windows of text are.
    """

    tokens: TokenDataset
    order: RowOrder
    writer: RowWriter
    notes: tuple[str, ...]
    """What became of the documents, a sentence each."""
    is_packed: bool
    """Whether documents share rows; none sees another."""

    @property
    def batch(self) -> int:
        """Global batch, in rows."""
        return self.order.batch

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self.order.sequence

    @property
    def packing_factor(self) -> float | None:
        """Documents per row of the training text; None without packing."""
        return self.order.factor if self.is_packed else None

    @property
    def document_tokens(self) -> float | None:
        """Mean length, over the tokens of a batch, of their documents; None without packing."""
        return self.order.document_tokens if self.is_packed else None

    def samples(
        self, step: int, first: int = 0, count: int | None = None
    ) -> tuple[TokenBatch, TokenBatch]:
        """Inputs and targets `Int[count s]` of consecutive samples of a step.

        Args:
            first: index of the first sample in the global batch, from 0.
            count: number of samples; None takes the rest of the batch.
        """
        count = self.batch - first if count is None else count
        inputs, targets = self.writer.empty(count)
        for place, (source, index) in enumerate(self.order.samples(step, first, count)):
            row = Row(split="train", layout=self.order.train[source], index=index)
            key = (self.order.seed, step, first + place)
            self.writer.write(inputs[place], targets[place], row, key)
        return inputs, targets

    def document_ids(self, step: int, first: int, count: int) -> TokenBatch | None:
        """Which document of its row each token belongs to, `Int[count s]`; fill is one, too.

        None if a row is one document, behind which only what is no target sees it.

        Args:
            first: index of the first sample in the global batch, from 0.
        """
        return self.order.document_ids(step, first, count) if self.is_packed else None

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[TokenBatch | None]:
        """The documents of `held_out_batches(count, rows)`, as `document_ids` has them."""
        return self.order.held_out_documents(count, rows) if self.is_packed else repeat(None)

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step.

        It is `Int[sample kind]` where there are several kinds of targets.
        """
        return self.order.target_counts(step)

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the documents in a sample of a step, in order."""
        return self.order.document_names(self.tokens, step, sample)

    def held_out_batches(
        self, count: int, rows: int = 1
    ) -> Iterator[tuple[TokenBatch, TokenBatch]]:
        """Inputs and targets of held-out rows, the same in every call and every run.

        Args:
            count: total number of rows, limited to those that exist, and spread evenly over them.
            rows: rows per batch; the last batch may have fewer.
        """
        for chunk in self.order.held_out_chunks(count, rows):
            inputs, targets = self.writer.empty(len(chunk))
            for place, index in enumerate(chunk):
                self.writer.write(inputs[place], targets[place], self._held_out_row(index), ())
            yield inputs, targets

    def bits_per_byte(self, loss: float, count: int) -> float | None:
        """Bits per byte of `held_out_batches(count)`: `loss * targets / ln 2 / bytes of targets`.

        A special token adds to the loss and stands for no byte. None if no target has a byte.

        Args:
            loss: mean loss over all targets of `held_out_batches(count)`, in nats per token.
            count: number of rows, as in `held_out_batches`.
        """
        targets = nbytes = 0
        for index in self.order.held_out_rows(count):
            offsets = self.writer.learned_offsets(self._held_out_row(index))
            targets += len(offsets)
            nbytes += int(self.tokens.held_out_bytes[offsets].sum())
        return loss * targets / math.log(2) / nbytes if nbytes else None

    def _held_out_row(self, index: int) -> Row:
        return Row(split="held_out", layout=self.order.held_out, index=index)


def order_rows(
    tokens: TokenDataset,
    writer: RowWriter,
    *,
    sequence: int,
    batch: int,
    seed: int,
    weights: tuple[float, ...] | None,
) -> RowOrder:
    """The rows of a data set, and which of them each step takes.

    Args:
        sequence: tokens of a row.
        batch: global batch, in rows.
        weights: share of the samples of each source; None takes them in proportion to their rows.

    Raises:
        DataError: a source has no row.
    """
    meta, starts = tokens.meta, tokens.documents.starts
    ends = list(accumulate((part.documents for part in meta.train.sources), initial=0))
    order = RowOrder(
        train=tuple(
            writer.lay_out(np.asarray(starts[low : high + 1]), "train")
            for low, high in pairwise(ends)
        ),
        held_out=writer.lay_out(np.asarray(tokens.held_out_documents.starts), "held_out"),
        sequence=sequence, batch=batch, seed=seed, weights=weights,
    )  # fmt: skip
    sides = [
        ("training", part.source, layout)
        for part, layout in zip(meta.train.sources, order.train, strict=True)
    ]
    sides.append(("held-out", meta.held_out.source, order.held_out))
    raise_data_errors([writer.shortage(*each) for each in sides if not len(each[-1])])
    return order
