"""Sizes of the fused loss: tokens at a time, scratch memory, and bytes moved (without torch)."""

from typing import NamedTuple

_LOGITS_BYTES = 64 * 2**20
"""Most bytes of the float32 logits of the tokens that are taken at a time. With fewer tokens the
sum of the weight's gradient is read and written more often: 2,048 tokens of width 768 over 50,257
entries take 1.01, 1.01, 1.04 and 1.19 times as long as the plain loss in float32 with 128, 64, 32
and 16 MiB, and 1.03, 1.05, 1.18 and 1.46 times in bfloat16 (EPYC, Zen 5, one thread)."""
_MAX_ROWS = 1024
SUMMED_ROWS = 2048
"""Rows of a narrow gradient that are added to its float32 sum at a time: they are converted in
memory of their own."""


class FusedLossSizes(NamedTuple):
    """Sizes of the fused loss of one projection `[v d]`."""

    vocabulary: int
    width: int
    itemsize: int
    """Bytes of an element of the weight and of the projection's input."""

    @property
    def rows(self) -> int:
        """Tokens that are taken at a time: a power of two."""
        most = max(1, _LOGITS_BYTES // (4 * self.vocabulary))
        return min(_MAX_ROWS, 1 << most.bit_length() - 1)

    @property
    def is_narrow(self) -> bool:
        """Whether probabilities and sums are wider than the weight."""
        return self.itemsize < 4

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are held only while it runs, with gradients, for `rows` tokens or more."""
        logits, inputs = self.rows * self.vocabulary, self.rows * self.width * self.itemsize
        if not self.is_narrow:
            return logits * self.itemsize + inputs
        sums, summed = (4 * self.width * rows for rows in (self.vocabulary, SUMMED_ROWS))
        return logits * (self.itemsize + 4) + sums + max(inputs, min(summed, sums))

    @property
    def moved_bytes(self) -> int:
        """Bytes that are moved for each token apart from the matrix products' own factors.

        The softmax reads and writes the logits twice, its conversions to and from a narrow type
        once each; each chunk of tokens reads and writes the sum of the weight's gradient.
        """
        wide = max(4, self.itemsize)
        logits, weight = 4 * wide, 2 * wide
        if self.is_narrow:
            logits += 2 * (wide + self.itemsize)
            weight += 2 * self.itemsize
        return self.vocabulary * logits + self.vocabulary * self.width * weight // self.rows
