"""Training and held-out batches, each a function of the seed and the step alone."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from windlass.data.mlm_masking import MlmMasking
from windlass.data.permutation import keyed_number, keyed_permutation
from windlass.data.token_files import TokenDataset
from windlass.errors import DataError, InputErrors

TokenBatch = npt.NDArray[np.int64]
"""Token ids `Int[sample s]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Random access to the sequences of every step; there is no state to save or restore.

    The training tokens form a ring. Each epoch rotates it by a keyed number of tokens, splits it
    into windows of `sequence` tokens, and takes them in a keyed order. So an epoch has each token
    as an input exactly once, except for fewer than `sequence` tokens that do not fill a window,
    which differ from epoch to epoch. Sample i of step t is window `(t - 1) * batch + i` of that
    order, however micro-batches and data-parallel ranks share the batch.
    """

    tokens: TokenDataset
    _: KW_ONLY
    sequence: int
    batch: int
    """Global batch, in sequences."""
    seed: int
    masking: MlmMasking | None = None
    """Masked language modelling; None predicts each next token."""

    def __post_init__(self) -> None:
        """Checks that both sides of the split have at least one sequence.

        Raises:
            DataError: one side is too short.
            InputErrors: both sides are too short.
        """
        sides = {"training": len(self.tokens.train), "held-out": len(self.tokens.held_out)}
        errors = [
            f"`{self.tokens.meta.source}` has {count} {side} tokens and a sequence needs "
            f"{self.sequence + 1}; take more text, lower `train.sequence`"
            + (" or raise `data.held_out`" if side == "held-out" else "")
            for side, count in sides.items()
            if count < self.sequence + 1
        ]
        if len(errors) == 1:
            raise DataError(errors[0])
        if errors:
            raise InputErrors(errors)

    @property
    def epoch_sequences(self) -> int:
        """Sequences of one epoch."""
        return len(self.tokens.train) // self.sequence

    @property
    def held_out_sequences(self) -> int:
        """Number of held-out sequences."""
        return (len(self.tokens.held_out) - 1) // self.sequence

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
        starts = self._starts(step, first, count)
        ring = self.tokens.train
        block = np.empty((count, self.sequence + 1), dtype=np.int64)
        for row, start in zip(block, starts, strict=True):
            tokens = ring[start : start + self.sequence + 1]
            row[: len(tokens)] = tokens
            row[len(tokens) :] = ring[: len(row) - len(tokens)]
        return self._examples(block, [(self.seed, step, first + index) for index in range(count)])

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the documents that a sample of a step is taken from, in order."""
        start = int(self._starts(step, sample, 1)[0])
        end, size = start + self.sequence + 1, len(self.tokens.train)
        names = self.tokens.documents.between(start, min(end, size))
        return names if end <= size else names + self.tokens.documents.between(0, end - size)

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
        """Offset in the ring of consecutive samples of a step, `Int[sample]`."""
        if step < 1 or first < 0 or count < 0 or first + count > self.batch:
            raise ValueError(
                f"no samples {first} to {first + count} in step {step} of {self.batch} samples"
            )
        index = (step - 1) * self.batch + first + np.arange(count, dtype=np.int64)
        epochs, within = np.divmod(index, self.epoch_sequences)
        starts = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            order = keyed_permutation(self.epoch_sequences, self.seed, epoch)
            rotation = keyed_number(len(self.tokens.train), self.seed, epoch)
            starts[in_epoch] = order(within[in_epoch]) * self.sequence + rotation
        return starts % len(self.tokens.train)


def _shifted(block: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """Inputs, and the token after each as targets; both are contiguous."""
    return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])
