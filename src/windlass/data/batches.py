"""Training and held-out batches, each a function of the seed and the step alone."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, repeat

import numpy as np
import numpy.typing as npt

from windlass.data.keyed_choices import (
    Indices,
    MlmMasking,
    SourceMixture,
    by_group,
    keyed_number,
    keyed_permutation,
    sample_indices,
    source_mixture,
)
from windlass.data.token_files import TokenDataset
from windlass.errors import raise_data_errors

TokenBatch = npt.NDArray[np.int64]
"""Token ids `Int[sample s]`."""


def batch_of_step(step: int, skipped: Sequence[str] | None) -> int:
    """The number of the batch that a step takes, which is its own if no batch is left out.

    Args:
        skipped: ranges of batches that are left out, such as `120-125`, in any order.
    """
    ends = [text.partition("-")[::2] for text in skipped or ()]
    batch, next_free = step, 1
    for first, last in sorted((int(first), int(last or first)) for first, last in ends):
        # What an earlier range leaves out does not count twice.
        if max(first, next_free) > batch:
            break
        batch += max(last + 1 - max(first, next_free), 0)
        next_free = max(next_free, last + 1)
    return batch


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Random access to the sequences of every step; there is no state to save or restore.

    The training tokens of a source form a ring. Each epoch rotates it by a keyed number of tokens,
    splits it into windows of `sequence` tokens, and takes them in a keyed order. So an epoch has
    each token as an input exactly once, except for fewer than `sequence` tokens that do not fill a
    window, which differ from epoch to epoch. Sample i of step t is window `(t - 1) * batch + i` of
    that order, however micro-batches and data-parallel ranks share the batch. With several sources
    a `SourceMixture` says which source that sample is taken from; each has epochs of its own.
    """

    tokens: TokenDataset
    _: KW_ONLY
    sequence: int
    batch: int
    """Global batch, in sequences."""
    seed: int
    masking: MlmMasking | None = None
    """Masked language modelling; None predicts each next token."""
    weights: tuple[float, ...] | None = None
    """Share of the samples of each source; None takes them in proportion to their tokens."""

    def __post_init__(self) -> None:
        """Checks that both sides of the split have at least one sequence.

        Raises:
            DataError: one side is too short.
            InputErrors: both sides are too short.
        """
        train, held_out = self.tokens.meta.train, self.tokens.meta.held_out
        sides = [(part.source, "training", part.tokens) for part in train.sources]
        sides.append((held_out.source, "held-out", held_out.tokens))
        raise_data_errors(
            [
                f"`{source}` has {count} {side} tokens and a sequence needs {self.sequence + 1}; "
                "take more text, lower `train.sequence`"
                + (" or raise `data.held_out`" if side == "held-out" else "")
                for source, side, count in sides
                if count < self.sequence + 1
            ]
        )

    @property
    def mixture(self) -> SourceMixture:
        """How the samples are shared among the sources."""
        weights = self.weights or [part.tokens for part in self.tokens.meta.train.sources]
        return source_mixture(weights, self.seed)

    @property
    def epoch_sequences(self) -> tuple[int, ...]:
        """Sequences of one epoch of each source."""
        return tuple(part.tokens // self.sequence for part in self.tokens.meta.train.sources)

    @property
    def held_out_sequences(self) -> int:
        """Number of held-out sequences."""
        return (len(self.tokens.held_out) - 1) // self.sequence

    def samples(
        self, step: int, first: int = 0, count: int | None = None
    ) -> tuple[TokenBatch, TokenBatch]:
        """Inputs and targets `Int[count s]` of consecutive samples of a step.

        Args:
            first: index of the first sample in the global batch, from 0.
            count: number of samples; None takes the rest of the batch.
        """
        count = self.batch - first if count is None else count
        starts = self._starts(step, first, count)
        block = np.empty((count, self.sequence + 1), dtype=np.int64)
        for row, start in zip(block, starts.tolist(), strict=True):
            ring_first, ring_end = self._ring_around(start)
            tokens = self.tokens.train[start : min(start + self.sequence + 1, ring_end)]
            row[: len(tokens)] = tokens
            row[len(tokens) :] = self.tokens.train[ring_first:][: len(row) - len(tokens)]
        return self._examples(block, [(self.seed, step, first + index) for index in range(count)])

    def document_ids(self, step: int, first: int, count: int) -> None:
        """None: tokens see whatever comes before them in their window."""
        del step, first, count

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[None]:
        """None for each of `held_out_batches(count, rows)`."""
        del count, rows
        return repeat(None)

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step."""
        del step  # masking gives each sequence as many targets as any other
        return np.full(self.batch, len(self._target_offsets(0)))

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the documents that a sample of a step is taken from, in order."""
        start = int(self._starts(step, sample, 1)[0])
        ring_first, ring_end = self._ring_around(start)
        end, documents = start + self.sequence + 1, self.tokens.documents
        names = documents.between(start, min(end, ring_end))
        wrapped = documents.between(ring_first, ring_first + end - ring_end)
        return names if end <= ring_end else names + wrapped

    def held_out_batches(
        self, count: int, rows: int = 1
    ) -> Iterator[tuple[TokenBatch, TokenBatch]]:
        """Inputs and targets of held-out windows, the same in every call and every run.

        The windows do not overlap and are spread evenly over the held-out text.

        Args:
            count: total number of sequences, limited to those that exist.
            rows: sequences per batch; the last batch may have fewer.
        """
        starts = self._held_out_starts(count)
        for first in range(0, len(starts), rows):
            chunk = starts[first:][:rows]
            block = np.stack([self.tokens.held_out[s : s + self.sequence + 1] for s in chunk])
            yield self._examples(block.astype(np.int64), [(start,) for start in chunk])

    def bits_per_byte(self, loss: float, count: int) -> float:
        """Bits per byte of `held_out_batches(count)`: `loss * targets / ln 2 / bytes of targets`.

        An end of text adds to the loss and stands for no byte. With masking, only masked tokens
        are targets.

        Args:
            loss: mean loss over all targets of `held_out_batches(count)`, in nats per token.
            count: number of sequences, as in `held_out_batches`.
        """
        targets = [self._target_offsets(start) for start in self._held_out_starts(count)]
        nbytes = sum(int(self.tokens.held_out_bytes[offsets].sum()) for offsets in targets)
        return loss * sum(map(len, targets)) / math.log(2) / nbytes

    def _target_offsets(self, start: int) -> TokenBatch:
        """Token offsets `Int[target]` of the targets of a held-out window."""
        if self.masking is None:
            return np.arange(start + 1, start + self.sequence + 1)
        return start + self.masking.masked_positions(self.sequence, start)

    def _examples(
        self, block: TokenBatch, keys: list[tuple[int, ...]]
    ) -> tuple[TokenBatch, TokenBatch]:
        """Inputs and targets of windows of `s + 1` tokens, each with the key of its mask."""
        if self.masking is None or not len(block):
            return _shifted(block)
        pairs = [
            self.masking.mask(row[:-1], *key) for row, key in zip(block, keys, strict=True)
        ]  # fmt: skip
        inputs, targets = zip(*pairs, strict=True)
        return np.stack(inputs), np.stack(targets)

    def _held_out_starts(self, count: int) -> list[int]:
        available = self.held_out_sequences
        count = min(count, available)
        return [index * available // count * self.sequence for index in range(count)]

    def _starts(self, step: int, first: int, count: int) -> TokenBatch:
        """Offset in the training tokens of consecutive samples of a step, `Int[sample]`."""
        samples = sample_indices(step, first, count, self.batch)
        return by_group(*self.mixture.locate(samples), self._starts_in)

    def _starts_in(self, source: int, indices: Indices) -> Indices:
        """Offset in the training tokens of samples of one source, `Int[sample]`.

        Args:
            indices: which of the source's samples, counted over all its epochs, `Int[sample]`.
        """
        first, end = self._rings[source : source + 2]
        windows = self.epoch_sequences[source]
        # The key of the first source has no index, as the key of a text of one source has none.
        key = (self.seed, source) if source else (self.seed,)

        def rotated(epoch: int, within: Indices) -> Indices:
            order = keyed_permutation(windows, *key, epoch)
            return order(within) * self.sequence + keyed_number(end - first, *key, epoch)

        starts = by_group(*np.divmod(indices, windows), rotated)
        return first + starts % (end - first)

    def _ring_around(self, offset: int) -> tuple[int, int]:
        """First offset and end of the ring that an offset in the training tokens lies in."""
        index = bisect_right(self._rings, offset)
        return self._rings[index - 1], self._rings[index]

    @property
    def _rings(self) -> tuple[int, ...]:
        """First offset of each source's ring, then the number of training tokens."""
        return tuple(accumulate((p.tokens for p in self.tokens.meta.train.sources), initial=0))


def _shifted(block: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """Inputs, and the token after each as targets; both are contiguous."""
    return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])
