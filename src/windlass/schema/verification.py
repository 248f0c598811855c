"""Proof: what became of holding a run under one plan against the same steps on one device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat

ComparedQuantity = Literal[
    "samples",  # which ones the step took
    "output",  # of a layer, sample by sample
    "loss",
    "input gradient",  # of a layer's input, sample by sample
    "weight gradient",  # of the first step, whole tensors
    "gradient norm",
    "weight",  # after each step, whole tensors
]
"""What is compared, in the order in which a step makes it."""

TOLERANCE: Mapping[Precision, float] = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 6e-2}
"""Relative. Sums in another order differ in the last bit, some hundreds of which add up: of 2^-53
or 2^-24. In bfloat16 numbers have 8 bits: 2^-9 for each of a dozen sums that slices split in two,
in each of some layers."""

MOMENT_TOLERANCE: Mapping[MomentFormat, float] = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.032}
"""What the format of the moments adds to a gradient that is had back from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One place where two runs differ by more than rounding."""

    step: int
    quantity: ComparedQuantity
    error: float
    """Over the largest value of the tensor, or the norm of the sample, of the run on one device."""
    layer: int | None = None
    layer_name: str | None = None
    weight: str | None = None
    """Its full name."""
    sample: int | None = None
    """In the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityComparison:
    """All of one kind that were compared."""

    quantity: ComparedQuantity
    count: int
    error: float
    """The largest."""
    tolerance: float

    @property
    def within_tolerance(self) -> bool:
        """Whether all of them differ by rounding at most; what is no number does not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """A few steps under a plan against the same steps on one device."""

    steps: int
    comparisons: tuple[QuantityComparison, ...]
    first_mismatch: Mismatch | None
    """Where they part, in the order in which a step makes things; None if they never do."""

    @property
    def passed(self) -> bool:
        """Whether the runs differ nowhere by more than rounding."""
        return self.first_mismatch is None
