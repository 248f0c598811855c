"""Batches of conversations: a row is one, or several, and only answers are targets."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate, pairwise, repeat

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.examples import IGNORED_TARGET
from windlass.data.packing.row_layout import RowLayout, Weights, lay_out_rows
from windlass.data.packing.row_order import RowOrder
from windlass.data.permutation import Indices
from windlass.data.token_files import Conversations, StoredTokenIds, TokenDataset
from windlass.errors import DataError, raise_data_errors


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatches:
    """Random access to the rows of every step, as `Batches` has to its windows.

    A row begins with the first token of a conversation and is filled up with ends of text, which no
    target asks for. With packing several conversations share a row, none of which sees another.
    Each epoch takes all rows of a source in a keyed order; sample i of step t is row
    `(t - 1) * batch + i` of that order. Several sources are mixed as windows of text are.
    """

    tokens: TokenDataset
    _: KW_ONLY
    sequence: int
    """Most tokens of a row."""
    batch: int
    """Global batch, in rows."""
    seed: int
    weights: tuple[float, ...] | None = None
    """Share of the samples of each source; None takes them in proportion to their rows."""
    drop_long: bool = False
    """Leaves out conversations that are longer than a row; otherwise their end is cut off."""
    packing: bool = False
    """Whether conversations share rows, which are the same in each epoch."""
    _order: RowOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lays out all rows.

        Raises:
            DataError: a source has no row with a target.
            InputErrors: several have none.
        """
        held_out = self._lay_out(self.tokens.held_out_documents.starts, "held_out")
        sources = self.tokens.meta.train.sources
        ends = list(accumulate((part.documents for part in sources), initial=0))
        starts = self.tokens.documents.starts
        train = tuple(
            self._lay_out(starts[first : end + 1], "train") for first, end in pairwise(ends)
        )
        order = RowOrder(
            train=train, held_out=held_out, sequence=self.sequence, batch=self.batch,
            seed=self.seed, weights=self.weights,
        )  # fmt: skip
        # A frozen value takes what it derives from its fields only this way.
        object.__setattr__(self, "_order", order)
        sides = [
            (part.source, "training", layout) for part, layout in zip(sources, train, strict=True)
        ]
        sides.append((self.tokens.meta.held_out.source, "held-out", held_out))
        raise_data_errors(
            [
                f"none of the {layout.dropped + layout.without_targets} {side} conversations of "
                f"`{source}` has an answer within {self.sequence} tokens; raise `train.sequence`"
                + (", or cut long ones with `data.long_documents`" if layout.dropped else "")
                for source, side, layout in sides
                if not len(layout)
            ]
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of the conversations, a sentence each."""
        layouts = (*self._order.train, self._order.held_out)
        meta = self.tokens.meta
        total = meta.train.documents + meta.held_out.documents
        learned = 100 * (meta.train.targets or 0) / meta.train.tokens
        by = f"by the chat template {meta.chat_template}"
        notes = [f"{total:,} conversations {by}; {learned:.3g} % of their tokens are learned"]
        truncated = sum(layout.truncated for layout in layouts)
        dropped = sum(layout.dropped for layout in layouts)
        without = sum(layout.without_targets for layout in layouts)
        longer = f"conversations are longer than {self.sequence:,} tokens and"
        if truncated:
            notes.append(f"{truncated:,} {longer} lose their end")
        if dropped:
            notes.append(f"{dropped:,} {longer} are left out")
        if without:
            notes.append(
                f"{without:,} conversations have no answer within {self.sequence:,} tokens and are "
                "left out"
            )
        if self.packing:
            notes.append(self._order.packing_note("conversations"))
        return tuple(notes)

    @property
    def packing_factor(self) -> float | None:
        """Conversations per row of the training data; None without packing."""
        return self._order.factor if self.packing else None

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
            self._fill(inputs[place], targets[place], "train", self._order.train[source], row)
        return inputs, targets

    def document_ids(self, step: int, first: int, count: int) -> TokenBatch | None:
        """Which conversation of its row each token belongs to, `Int[count s]`.

        What fills a row up is one of its own. None if a row is one conversation, behind which only
        what is no target sees it.

        Args:
            step: step, counted from 1.
            first: index of the first sample in the global batch, from 0.
            count: number of samples.
        """
        return self._order.document_ids(step, first, count) if self.packing else None

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[TokenBatch | None]:
        """The conversations of `held_out_batches(count, rows)`, as `document_ids` has them."""
        if self.packing:
            return self._order.held_out_documents(count, rows)
        return repeat(None)

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step."""
        return self._order.target_counts(step)

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the conversations in a sample of a step, in order."""
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
                self._fill(inputs[place], targets[place], "held_out", self._order.held_out, row)
            yield inputs, targets

    def bits_per_byte(self, loss: float, count: int) -> float | None:
        """Bits per byte of `held_out_batches(count)`: `loss * targets / ln 2 / bytes of targets`.

        A special token adds to the loss and stands for no byte. None if no target has a byte.

        Args:
            loss: mean loss over all targets of `held_out_batches(count)`, in nats per token.
            count: number of rows, as in `held_out_batches`.
        """
        counts = nbytes = 0
        for row in self._order.held_out_rows(count):
            for tokens in _targets(self._order.held_out, row):
                is_target = self._conversations.held_out_weights[tokens] > 0
                counts += int(is_target.sum())
                nbytes += int(self.tokens.held_out_bytes[tokens][is_target].sum())
        return loss * counts / math.log(2) / nbytes if nbytes else None

    @property
    def _conversations(self) -> Conversations:
        if self.tokens.conversations is None:
            raise DataError(f"`{self.tokens.meta.train.source}` holds text and no conversations")
        return self.tokens.conversations

    def _lay_out(self, starts: Indices, split: str) -> RowLayout:
        weights = self._split(split)[1]
        return lay_out_rows(
            np.asarray(starts), weights, sequence=self.sequence, drop_long=self.drop_long,
            packing=self.packing,
        )  # fmt: skip

    def _split(self, split: str) -> tuple[StoredTokenIds, Weights]:
        """Tokens of a split, and their weights."""
        if split == "train":
            return self.tokens.train, self._conversations.train_weights
        return self.tokens.held_out, self._conversations.held_out_weights

    def _empty(self, count: int) -> tuple[TokenBatch, TokenBatch]:
        shape = (count, self.sequence)
        end = self.tokens.meta.end_of_text
        return np.full(shape, end, dtype=np.int64), np.full(shape, IGNORED_TARGET, dtype=np.int64)

    def _fill(
        self, inputs: TokenBatch, targets: TokenBatch, split: str, layout: RowLayout, row: int
    ) -> None:
        """Writes a row's inputs and targets, each `Int[s]`."""
        tokens, weights = self._split(split)
        begin = 0
        for learned in _targets(layout, row):
            end = begin + learned.stop - learned.start
            counts = weights[learned] > 0
            inputs[begin:end] = tokens[learned.start - 1 : learned.stop - 1]
            targets[begin:end][counts] = tokens[learned][counts]
            begin = end


def _targets(layout: RowLayout, row: int) -> Iterator[slice]:
    """Where the targets of each document of a row stand among the tokens."""
    for index in layout.row(row):
        first = int(layout.starts[index]) + 1
        yield slice(first, first + int(layout.lengths[index]))
