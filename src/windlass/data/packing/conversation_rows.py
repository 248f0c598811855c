"""Rows of conversations: a row is one, or several, and only answers are targets."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.packing.row_batches import Row, RowBatches, Split, order_rows
from windlass.data.packing.row_layout import (
    Integers,
    RowLayout,
    Weights,
    has_fractions,
    lay_out_rows,
)
from windlass.data.packing.row_order import RowOrder
from windlass.data.targets import IGNORED_TARGET, weight_bits
from windlass.data.token_files import Conversations, StoredTokenIds, TokenDataset
from windlass.errors import DataError

_WORTH_PACKING = 0.5
"""Share of the rows that conversations fill below which packing is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationRows:
    """A row begins with the first token of a conversation and is filled up with ends of text.

    No target asks for these. With packing several conversations share a row, none of which sees
    another.
    """

    tokens: TokenDataset
    sequence: int
    drop_long: bool
    packing: bool
    is_weighted: bool = False
    """Whether targets stand beside their weights, `Int[2 s]` in each row."""

    def lay_out(self, starts: Integers, split: Split) -> RowLayout:
        """The rows of consecutive conversations."""
        return lay_out_rows(
            starts, self._split(split)[1], sequence=self.sequence, drop_long=self.drop_long,
            packing=self.packing,
        )  # fmt: skip

    def shortage(self, side: str, source: str, layout: RowLayout) -> str:
        """Why a source has no row."""
        return (
            f"none of the {layout.dropped + layout.without_targets} {side} conversations of "
            f"`{source}` has an answer within {self.sequence} tokens; raise `train.sequence`"
            + (", or cut long ones with `data.long_documents`" if layout.dropped else "")
        )

    def empty(self, count: int) -> tuple[TokenBatch, TokenBatch]:
        """Inputs `Int[count s]` that are fill, and targets of which none counts."""
        shape = (count, self.sequence)
        end = self.tokens.meta.end_of_text
        inputs = np.full(shape, end, dtype=np.int64)
        if not self.is_weighted:
            return inputs, np.full(shape, IGNORED_TARGET, dtype=np.int64)
        targets = np.zeros((count, 2, self.sequence), dtype=np.int64)
        targets[:, 0] = IGNORED_TARGET
        return inputs, targets

    def write(
        self, inputs: TokenBatch, targets: TokenBatch, row: Row, key: tuple[int, ...]
    ) -> None:
        """Writes a row's inputs `Int[s]` and targets, `Int[s]` or beside their weights."""
        del key  # nothing is drawn
        tokens, weights = self._split(row.split)
        targets, bits = (targets[0], targets[1]) if self.is_weighted else (targets, None)
        begin = 0
        for learned in _targets(row):
            end = begin + learned.stop - learned.start
            counts = weights[learned] > 0
            inputs[begin:end] = tokens[learned.start - 1 : learned.stop - 1]
            targets[begin:end][counts] = tokens[learned][counts]
            if bits is not None:
                bits[begin:end][counts] = weight_bits(weights[learned][counts])
            begin = end

    def learned_offsets(self, row: Row) -> TokenBatch:
        """Where the tokens that a held-out row's targets are stand in their split."""
        weights = self._split(row.split)[1]
        return np.concatenate(
            [each.start + np.flatnonzero(weights[each] > 0) for each in _targets(row)]
        )

    def _split(self, split: Split) -> tuple[StoredTokenIds, Weights]:
        """Tokens of a split, and their weights."""
        if split == "train":
            return self.tokens.train, self._conversations.train_weights
        return self.tokens.held_out, self._conversations.held_out_weights

    @property
    def _conversations(self) -> Conversations:
        if self.tokens.conversations is None:
            raise DataError(f"`{self.tokens.meta.train.source}` holds text and no conversations")
        return self.tokens.conversations


def conversation_batches(
    tokens: TokenDataset,
    *,
    sequence: int,
    batch: int,
    seed: int,
    weights: tuple[float, ...] | None = None,
    drop_long: bool = False,
    packing: bool = False,
) -> RowBatches:
    """Batches of conversations.

    Args:
        sequence: most tokens of a row.
        batch: global batch, in rows.
        seed: of the order.
        weights: share of the samples of each source; None takes them in proportion to their rows.
        drop_long: leaves out conversations that are longer than a row; otherwise their end is cut
            off.
        packing: whether conversations share rows, which are the same in each epoch.

    Raises:
        DataError: a source has no row with a target.
    """
    stored = tokens.conversations
    sides = () if stored is None else (stored.train_weights, stored.held_out_weights)
    writer = ConversationRows(
        tokens=tokens, sequence=sequence, drop_long=drop_long, packing=packing,
        is_weighted=any(map(has_fractions, sides)),
    )  # fmt: skip
    order = order_rows(
        tokens, writer, sequence=sequence, batch=batch, seed=seed, weights=weights
    )  # fmt: skip
    notes = tuple(_notes(tokens, order, packing=packing))
    return RowBatches(tokens=tokens, order=order, writer=writer, notes=notes, is_packed=packing)


def _notes(tokens: TokenDataset, order: RowOrder, *, packing: bool) -> Iterator[str]:
    """What became of the conversations, a sentence each."""
    layouts, meta = (*order.train, order.held_out), tokens.meta
    total = meta.train.documents + meta.held_out.documents
    learned = 100 * (meta.train.targets or 0) / meta.train.tokens
    by = f"by the chat template {meta.chat_template}"
    yield f"{total:,} conversations {by}; {learned:.3g} % of their tokens are learned"
    truncated = sum(layout.truncated for layout in layouts)
    dropped = sum(layout.dropped for layout in layouts)
    without = sum(layout.without_targets for layout in layouts)
    longer = f"conversations are longer than {order.sequence:,} tokens and"
    if truncated:
        yield f"{truncated:,} {longer} lose their end"
    if dropped:
        yield f"{dropped:,} {longer} are left out"
    if without:
        yield (
            f"{without:,} conversations have no answer within {order.sequence:,} tokens and are "
            "left out"
        )
    if packing:
        yield order.packing_note("conversations")
    elif (filled := _filled_share(order)) < _WORTH_PACKING:
        yield (
            f"{100 * filled:.0f} % of the rows is conversations, and the rest is fill; "
            "`data.packing=true` lets several share a row"
        )


def _filled_share(order: RowOrder) -> float:
    """Share of the training rows that conversations fill."""
    inputs = sum(int(layout.lengths.sum()) for layout in order.train)
    return inputs / (order.sequence * max(1, sum(map(len, order.train))))


def _targets(row: Row) -> Iterator[slice]:
    """Where the targets of each conversation of a row stand among the tokens."""
    for start, length in row.pieces():
        yield slice(start + 1, start + 1 + length)
