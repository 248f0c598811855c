"""Batches of conversations: a row is one, or several, and only answers are targets."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.examples import IGNORED_TARGET
from windlass.data.packing.row_layout import RowLayout, Weights, lay_out_rows
from windlass.data.permutation import Indices, keyed_permutation
from windlass.data.source_mixture import SourceMixture, source_mixture
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
    _train: tuple[RowLayout, ...] = field(init=False, repr=False)
    """Rows of each source."""
    _held_out: RowLayout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lays out all rows.

        Raises:
            DataError: a source has no row with a target.
            InputErrors: several have none.
        """
        held_out = self._lay_out(self._conversations.held_out_documents.starts, "held_out")
        sources = self.tokens.meta.train.sources
        ends = list(accumulate((part.documents for part in sources), initial=0))
        starts = self.tokens.documents.starts
        train = tuple(
            self._lay_out(starts[first : end + 1], "train") for first, end in pairwise(ends)
        )
        # A frozen value takes what it derives from its fields only this way.
        object.__setattr__(self, "_train", train)
        object.__setattr__(self, "_held_out", held_out)
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
    def mixture(self) -> SourceMixture:
        """How the samples are shared among the sources."""
        return source_mixture(self.weights or [len(layout) for layout in self._train], self.seed)

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of the conversations, a sentence each."""
        layouts = (*self._train, self._held_out)
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
            rows = sum(map(len, self._train))
            documents = sum(len(layout.documents) for layout in self._train)
            filled = sum(int(layout.lengths.sum()) for layout in self._train) / self.sequence / rows
            notes.append(
                f"packing factor {documents / rows:.2f}: {documents:,} training conversations in "
                f"{rows:,} rows, {100 * filled:.3g} % of which they fill"
            )
        return tuple(notes)

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
        sources, rows = self._rows(step, first, count)
        inputs, targets = self._empty(count)
        for place, (source, row) in enumerate(zip(sources.tolist(), rows.tolist(), strict=True)):
            self._fill(inputs[place], targets[place], "train", self._train[source], row)
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
        if not self.packing:
            return None
        sources, rows = self._rows(step, first, count)
        pairs = zip(sources.tolist(), rows.tolist(), strict=True)
        return self._document_ids([(self._train[source], row) for source, row in pairs])

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[TokenBatch | None]:
        """The conversations of `held_out_batches(count, rows)`, as `document_ids` has them."""
        chosen = self._held_out_rows(count)
        for first in range(0, len(chosen), rows):
            pairs = [(self._held_out, row) for row in chosen[first:][:rows]]
            yield self._document_ids(pairs) if self.packing else None

    def _document_ids(self, rows: list[tuple[RowLayout, int]]) -> TokenBatch:
        ids = np.empty((len(rows), self.sequence), dtype=np.int64)
        for place, (layout, row) in enumerate(rows):
            lengths = [int(layout.lengths[index]) for index in layout.row(row)]
            lengths.append(self.sequence - sum(lengths))
            ids[place] = np.repeat(np.arange(len(lengths)), lengths)
        return ids

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step."""
        sources, rows = self._rows(step, 0, self.batch)
        counts = np.zeros(self.batch, dtype=np.int64)
        for source, layout in enumerate(self._train):
            counts[sources == source] = layout.target_counts[rows[sources == source]]
        return counts

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the conversations in a sample of a step, in order."""
        (source,), (row,) = (part.tolist() for part in self._rows(step, sample, 1))
        before = sum(part.documents for part in self.tokens.meta.train.sources[:source])
        layout = self._train[source]
        return tuple(
            self.tokens.documents.name(before + int(layout.documents[index]))
            for index in layout.row(row)
        )

    def held_out_batches(
        self, count: int, rows: int = 1
    ) -> Iterator[tuple[TokenBatch, TokenBatch]]:
        """Inputs and targets of held-out rows, the same in every call and every run.

        Args:
            count: total number of rows, limited to those that exist, and spread evenly over them.
            rows: rows per batch; the last batch may have fewer.
        """
        chosen = self._held_out_rows(count)
        for first in range(0, len(chosen), rows):
            chunk = chosen[first:][:rows]
            inputs, targets = self._empty(len(chunk))
            for place, row in enumerate(chunk):
                self._fill(inputs[place], targets[place], "held_out", self._held_out, row)
            yield inputs, targets

    def bits_per_byte(self, loss: float, count: int) -> float | None:
        """Bits per byte of `held_out_batches(count)`: `loss * targets / ln 2 / bytes of targets`.

        A special token adds to the loss and stands for no byte. None if no target has a byte.

        Args:
            loss: mean loss over all targets of `held_out_batches(count)`, in nats per token.
            count: number of rows, as in `held_out_batches`.
        """
        counts = nbytes = 0
        for row in self._held_out_rows(count):
            for tokens in _targets(self._held_out, row):
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

    def _held_out_rows(self, count: int) -> list[int]:
        available = len(self._held_out)
        count = min(count, available)
        return [index * available // count for index in range(count)]

    def _rows(self, step: int, first: int, count: int) -> tuple[Indices, Indices]:
        """Source and row of consecutive samples of a step, `Int[sample]` each."""
        if step < 1 or first < 0 or count < 0 or first + count > self.batch:
            raise ValueError(
                f"no samples {first} to {first + count} in step {step} of {self.batch} samples"
            )
        samples = (step - 1) * self.batch + first + np.arange(count, dtype=np.int64)
        sources, indices = self.mixture.locate(samples)
        rows = np.empty(count, dtype=np.int64)
        for source in np.unique(sources).tolist():
            of_source = sources == source
            rows[of_source] = self._rows_of(source, indices[of_source])
        return sources, rows

    def _rows_of(self, source: int, indices: Indices) -> Indices:
        """Rows of a source's samples, counted over all its epochs, `Int[sample]`."""
        epochs, within = np.divmod(indices, len(self._train[source]))
        rows = np.empty(len(indices), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            order = keyed_permutation(len(self._train[source]), self.seed, source, epoch)
            rows[in_epoch] = order(within[in_epoch])
        return rows


def _targets(layout: RowLayout, row: int) -> Iterator[slice]:
    """Where the targets of each document of a row stand among the tokens."""
    for index in layout.row(row):
        first = int(layout.starts[index]) + 1
        yield slice(first, first + int(layout.lengths[index]))
