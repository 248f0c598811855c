"""How rotary angles slow down for longer sequences (this module does not import torch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

RopeScalingType = Literal["linear", "llama3", "yarn"]
"""How rotary angles slow down for longer sequences.

`linear`: all by the factor. Source: Chen et al. 2023, arXiv:2306.15595. `llama3`: those of long
waves by the factor, those of short ones not at all. Source: Llama Team 2024, arXiv:2407.21783, and
its code. `yarn`: likewise by the number of rotations, and larger logits. Source: Peng et al. 2023,
arXiv:2309.00071."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary angles slow down, so that a model takes longer sequences than it first learned."""

    type: RopeScalingType
    factor: float
    """How many times slower the angles of the longest waves grow with the position."""
    original_sequence: int = 0
    """Longest sequence before, in tokens; `linear` does not use it."""
    low_frequency: float = 1.0
    """`llama3`: waves that fit less often into the longest sequence are slowed down in full."""
    high_frequency: float = 4.0
    """`llama3`: waves that fit more often are not slowed down."""
    beta_fast: float = 32.0
    """`yarn`: features that rotate more often in the longest sequence are not slowed down."""
    beta_slow: float = 1.0
    """`yarn`: features that rotate less often are slowed down in full."""
    attention_factor: float | None = None
    """`yarn`: factor of queries and of keys; None means `0.1 ln(factor) + 1`."""
    truncate: bool = True
    """`yarn`: whether the features between which speeds change are rounded outwards."""

    @property
    def magnitude(self) -> float:
        """Factor of the cosines and sines."""
        if self.type != "yarn":
            return 1.0
        return (
            0.1 * log(self.factor) + 1 if self.attention_factor is None else self.attention_factor
        )

    def kept_share(self, width: int, base: float) -> tuple[float, float]:
        """Slope and offset of the share of its speed that an angle keeps, clamped to 0..1.

        With `llama3` it grows with the angle's speed, with `yarn` with the index of the feature.

        Args:
            base: base of the speeds `base ** (-index / width)`, where indices are even.
        """
        if self.type == "llama3":
            span = self.high_frequency - self.low_frequency
            return self.original_sequence / (2 * pi * span), -self.low_frequency / span

        def index_of(rotations: float) -> float:
            longest = self.original_sequence / (2 * pi * rotations)
            return width * log(longest) / (2 * log(base))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(0, low), min(width - 1, high)
        span = max(high - low, 1e-3)
        return -1 / (2 * span), 1 + low / span

    def errors(self) -> Iterator[str]:
        """Every reason why angles cannot be scaled so."""
        if self.factor < 1:
            yield f"`rope_scaling.factor` is {self.factor:g}, must be at least 1"
        if self.type != "linear" and self.original_sequence < 1:
            yield (
                f"`rope_scaling.original_sequence` is {self.original_sequence}, must be at least 1"
            )
        if self.type == "llama3" and self.high_frequency <= self.low_frequency:
            yield (
                f"`rope_scaling.high_frequency` is {self.high_frequency:g}, must be above "
                f"`low_frequency` {self.low_frequency:g}"
            )
        if self.type == "yarn" and not self.beta_fast > self.beta_slow > 0:
            yield (
                f"`rope_scaling.beta_fast` is {self.beta_fast:g} and `beta_slow` "
                f"{self.beta_slow:g}, must be above 0, and the former above the latter"
            )
