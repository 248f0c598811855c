"""Which rows the samples of each step are, and which documents share them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.keyed_choices import (
    Indices,
    SourceMixture,
    by_group,
    epoch_places,
    sample_indices,
    source_mixture,
)
from windlass.data.packing.row_layout import RowLayout
from windlass.data.token_files import TokenDataset


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOrder:
    """Random access to the rows of every step; there is no state to save or restore.

    Each epoch takes all rows of a source in a keyed order; sample i of step t is row
    `(t - 1) * batch + i` of that order. Several sources are mixed as windows of text are.
    """

    train: tuple[RowLayout, ...]
    """Rows of each source."""
    held_out: RowLayout
    sequence: int
    """Tokens of a row."""
    batch: int
    """Global batch, in rows."""
    seed: int
    weights: tuple[float, ...] | None
    """Share of the samples of each source; None takes them in proportion to their rows."""

    @property
    def mixture(self) -> SourceMixture:
        """How the samples are shared among the sources."""
        return source_mixture(self.weights or [len(layout) for layout in self.train], self.seed)

    @property
    def factor(self) -> float:
        """Documents per row of the training text: the packing factor."""
        return self._documents / self._rows

    @property
    def document_tokens(self) -> float:
        """Mean length, over all tokens of training rows, of their documents; fill is one, too."""
        squares = 0
        for layout in self.train:
            filled = np.add.reduceat(layout.lengths, layout.row_starts[:-1])
            squares += int((layout.lengths**2).sum() + ((self.sequence - filled) ** 2).sum())
        return squares / (self.sequence * self._rows)

    def packing_note(self, noun: str) -> str:
        """How much packing gives, in words.

        Args:
            noun: what a row holds, in the plural.
        """
        tokens = sum(int(layout.lengths.sum()) for layout in self.train)
        return (
            f"packing factor {self.factor:.2f}: {self._documents:,} training {noun} in "
            f"{self._rows:,} rows, {100 * tokens / self.sequence / self._rows:.3g} % of which they "
            "fill"
        )

    @property
    def _documents(self) -> int:
        return sum(len(layout.documents) for layout in self.train)

    @property
    def _rows(self) -> int:
        return sum(map(len, self.train))

    def samples(self, step: int, first: int, count: int) -> list[tuple[int, int]]:
        """Source and row of consecutive samples of a step.

        Args:
            first: index of the first sample in the global batch, from 0.
        """
        sources, rows = self._sources_and_rows(step, first, count)
        return list(zip(sources.tolist(), rows.tolist(), strict=True))

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step.

        It is `Int[sample kind]` where there are several kinds of targets.
        """
        sources, rows = self._sources_and_rows(step, 0, self.batch)
        kinds = self.held_out.target_counts.shape[1:]
        layouts = (*self.train, self.held_out)
        dtype = np.result_type(*(layout.target_counts.dtype for layout in layouts))
        counts: TokenBatch = np.zeros((self.batch, *kinds), dtype=dtype)
        for source, layout in enumerate(self.train):
            counts[sources == source] = layout.target_counts[rows[sources == source]]
        return counts

    def document_names(self, tokens: TokenDataset, step: int, sample: int) -> tuple[str, ...]:
        """Names of the documents in a sample of a step, in order.

        Args:
            tokens: the data set whose rows these are.
            sample: index of the sample in the global batch, from 0.
        """
        ((source, row),) = self.samples(step, sample, 1)
        before = sum(part.documents for part in tokens.meta.train.sources[:source])
        layout = self.train[source]
        return tuple(
            tokens.documents.name(before + int(layout.documents[index]))
            for index in layout.row(row)
        )

    def document_ids(self, step: int, first: int, count: int) -> TokenBatch:
        """Which document of its row each token belongs to, `Int[count s]`; fill is one, too."""
        pairs = self.samples(step, first, count)
        return self._ids([(self.train[source], row) for source, row in pairs])

    def held_out_documents(self, count: int, rows: int) -> Iterator[TokenBatch]:
        """The same of held-out rows, so many at a time."""
        for chunk in self.held_out_chunks(count, rows):
            yield self._ids([(self.held_out, row) for row in chunk])

    def held_out_chunks(self, count: int, rows: int) -> Iterator[list[int]]:
        """The rows of `held_out_rows(count)`, so many at a time; the last may be fewer."""
        chosen = self.held_out_rows(count)
        for first in range(0, len(chosen), rows):
            yield chosen[first:][:rows]

    def held_out_rows(self, count: int) -> list[int]:
        """At most `count` held-out rows, spread evenly over them."""
        available = len(self.held_out)
        count = min(count, available)
        return [index * available // count for index in range(count)]

    def _ids(self, rows: list[tuple[RowLayout, int]]) -> TokenBatch:
        ids = np.empty((len(rows), self.sequence), dtype=np.int64)
        for place, (layout, row) in enumerate(rows):
            lengths = [int(layout.lengths[index]) for index in layout.row(row)]
            lengths.append(self.sequence - sum(lengths))
            ids[place] = np.repeat(np.arange(len(lengths)), lengths)
        return ids

    def _sources_and_rows(self, step: int, first: int, count: int) -> tuple[Indices, Indices]:
        """Source and row of consecutive samples of a step, `Int[sample]` each."""
        samples = sample_indices(step, first, count, self.batch)
        sources, indices = self.mixture.locate(samples)
        return sources, by_group(sources, indices, self._rows_of)

    def _rows_of(self, source: int, indices: Indices) -> Indices:
        """Rows of a source's samples, counted over all its epochs, `Int[sample]`."""
        return epoch_places(indices, len(self.train[source]), self.seed, source)
