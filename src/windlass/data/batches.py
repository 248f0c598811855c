"""Batches: the sequences of each step, a function of the seed and the step alone."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Random access to the sequences of every step; there is no state to save or restore.

    The training tokens are a ring. Each epoch turns it by a keyed number of tokens, cuts it into
    windows of `sequence` tokens, and takes them in a keyed order. So an epoch sees each token as
    an input exactly once, but for fewer than `sequence` tokens that no whole window is left for;
    these are others in each epoch. Sample i of step t is window `(t - 1) * batch + i` of that
    order, whatever micro-batches and replicas it is spread over.
    """

    tokens: TokenDataset
    _: KW_ONLY
    sequence: int
    batch: int
    """Sequences of one step: the global batch."""
    seed: int
    masking: MlmMasking | None = None
    """What is hidden from a model that predicts it; None predicts each next token."""

    def __post_init__(self) -> None:
        """Refuses a corpus that has no whole sequence on either side of the split.

        Raises:
            DataError: one side is too short.
            Faults: both are.
        """
        sides = {"training": len(self.tokens.train), "held-out": len(self.tokens.held_out)}
        faults = [
            f"`{self.tokens.meta.source}` has {count} {side} tokens and a sequence needs "
            f"{self.sequence + 1}; take more text, lower `train.sequence`"
            + (" or raise `data.held_out`" if side == "held-out" else "")
            for side, count in sides.items()
            if count < self.sequence + 1
        ]
        if len(faults) == 1:
            raise DataError(faults[0])
        if faults:
            raise InputErrors(faults)

    @property
    def epoch_sequences(self) -> int:
        """Sequences of one epoch."""
        return len(self.tokens.train) // self.sequence

    @property
    def held_out_sequences(self) -> int:
        """Held-out sequences there are."""
        return (len(self.tokens.held_out) - 1) // self.sequence

    def samples(self, step: int, first: int = 0, count: int | None = None) -> tuple[TokenBatch, TokenBatch]:
        """Inputs and targets `Int[count s]` of some samples of a step.

        Args:
            step: counted from 1.
            first: first sample, counted from 0 in the global batch.
            count: number of samples; None takes the rest of the batch.
        """
        count = self.batch - first if count is None else count
        starts = self._starts(step, first, count)
        ring = self.tokens.train
        block = np.empty((count, self.sequence + 1), dtype=np.int64)
        for row, start in zip(block, starts, strict=True):
            ahead = ring[start : start + self.sequence + 1]
            row[: len(ahead)] = ahead
            row[len(ahead) :] = ring[: len(row) - len(ahead)]
        return self._examples(block, [(self.seed, step, first + at) for at in range(count)])

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """Names of the documents that a sample of a step is drawn from, in their order."""
        start = int(self._starts(step, sample, 1)[0])
        end, size = start + self.sequence + 1, len(self.tokens.train)
        names = self.tokens.documents.between(start, min(end, size))
        return names if end <= size else names + self.tokens.documents.between(0, end - size)

    def held_out_batches(self, count: int, rows: int = 1) -> Iterator[tuple[TokenBatch, TokenBatch]]:
        """Inputs and targets of held-out windows, the same in every call and every run.

        The windows do not overlap and lie evenly over the held-out text.

        Args:
            count: sequences in all; no more than there are.
            rows: sequences of one block; the last block may have fewer.
        """
        starts = self._held_out_starts(count)
        for first in range(0, len(starts), rows):
            some = starts[first:][:rows]
            block = np.stack([self.tokens.held_out[s : s + self.sequence + 1] for s in some])
            yield self._examples(block.astype(np.int64), [(start,) for start in some])

    def bits_per_byte(self, loss: float, count: int) -> float:
        """Bits a byte of `held_out(count)`: `loss * targets / ln 2 / bytes of the targets`.

        An end of text costs its loss and stands for no byte. Where tokens are hidden, targets are
        only those.

        Args:
            loss: mean loss over all targets of `held_out(count)`, in nats a token.
            count: as given to `held_out`.
        """
        places = [self._targets(start) for start in self._held_out_starts(count)]
        nbytes = sum(int(self.tokens.held_out_bytes[each].sum()) for each in places)
        return loss * sum(map(len, places)) / math.log(2) / nbytes

    def _targets(self, start: int) -> TokenBatch:
        """Places of the targets of a held-out window."""
        if self.masking is None:
            return np.arange(start + 1, start + self.sequence + 1)
        return start + self.masking.masked_positions(self.sequence, start)

    def _examples(self, block: TokenBatch, keys: list[tuple[int, ...]]) -> tuple[TokenBatch, TokenBatch]:
        """Inputs and targets of windows with a token more, each with the key of what it hides."""
        if self.masking is None or not len(block):
            return _shifted(block)
        pairs = [
            self.masking.mask(row[:-1], *key) for row, key in zip(block, keys, strict=True)
        ]  # fmt: skip
        inputs, targets = zip(*pairs, strict=True)
        return np.stack(inputs), np.stack(targets)

    def _held_out_starts(self, count: int) -> list[int]:
        there = self.held_out_sequences
        count = min(count, there)
        return [index * there // count * self.sequence for index in range(count)]

    def _starts(self, step: int, first: int, count: int) -> TokenBatch:
        """Offset in the ring of each of some samples of a step."""
        if step < 1 or first < 0 or count < 0 or first + count > self.batch:
            raise ValueError(
                f"no samples {first} to {first + count} in step {step} of {self.batch} samples"
            )
        index = (step - 1) * self.batch + first + np.arange(count, dtype=np.int64)
        epochs, within = np.divmod(index, self.epoch_sequences)
        starts = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            order = keyed_permutation(self.epoch_sequences, self.seed, epoch)
            turn = keyed_number(len(self.tokens.train), self.seed, epoch)
            starts[chosen] = order(within[chosen]) * self.sequence + turn
        return starts % len(self.tokens.train)


def _shifted(block: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """Inputs, and as targets the token after each; both contiguous."""
    return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])
