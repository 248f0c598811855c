"""Verification results: a run under a plan compared with the same steps on one device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from windlass.schema.fact_table import fact_table_html
from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat

ComparedQuantity = Literal[
    "learning rate",
    "mask update",  # which share of a sparse weight's blocks a schedule replaces
    "samples",  # the samples that the step takes
    "tokens",  # of each sample, or pixels, inputs and targets
    "documents",  # of each sample, where rows are packed
    "output",  # of a layer, sample by sample
    "loss",
    "input gradient",  # of a layer, sample by sample
    "weight gradient",  # of the first step, full tensors
    "gradient norm",
    "loss scale",  # of float16
    "expert load",  # tokens of each expert in the step, and the share that found no room
    "weight",  # after each step, full tensors
    "buffer",  # what is saved beside weights: masks, statistics, biases of experts
    "evaluations",  # the steps that have one
    "held-out loss",
    "averaged held-out loss",
    "held-out bits per byte",
    "held-out accuracy",
]
"""What is compared, in the order in which a step computes it."""

TOLERANCE: Mapping[Precision, float] = {
    "float64": 1e-9, "float32": 1e-5, "tf32": 7.5e-3, "float16": 7.5e-3, "bfloat16": 6e-2,
    "float8": 0.125,
}  # fmt: skip
"""Relative tolerances. Sums in another order differ in the last bit, 2^-53 or 2^-24, and some
hundreds of these add up. bfloat16 has 8 bits: 2^-9 for each of a dozen sums that tensor-parallel
ranks split in two, in each of some layers. float16 and TF32 have 11, which is an eighth of that;
no GPU has run TF32. Factors in float8 have 4: one that falls on the other side of a tie changes by
2^-3."""

MOMENT_TOLERANCE: Mapping[MomentFormat, float] = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.032}
"""What a gradient recovered from moments of this format adds to the relative tolerance. bfloat16:
half a unit in the last of its 8 bits. int8: the square root of each element, relative to that of
the largest (s) in its block of n = 256, has an error of half of 1/127; so an element m has an error
of `sqrt(m s) / 127`, and a block of at most `n^(1/4) / 127 = 0.0315` of its norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One place where two runs differ by more than rounding."""

    step: int
    quantity: ComparedQuantity
    error: float
    """Relative to the largest value of the tensor, or to the norm of the sample, on one device."""
    layer: int | None = None
    layer_name: str | None = None
    weight: str | None = None
    """Full name of the weight."""
    sample: int | None = None
    """Index of the sample in the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityComparison:
    """All comparisons of one quantity."""

    quantity: ComparedQuantity
    count: int
    """Number of values or tensors that were compared."""
    error: float
    """The largest relative error."""
    tolerance: float

    @property
    def within_tolerance(self) -> bool:
        """Whether all of them differ at most by rounding; NaN does not pass."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerificationResult:
    """A few steps under a plan compared with the same steps on one device."""

    steps: int
    comparisons: tuple[QuantityComparison, ...]
    first_mismatch: Mismatch | None
    """The first mismatch in the order in which a step computes things; None if there is none."""

    @property
    def passed(self) -> bool:
        """Whether the runs differ nowhere by more than rounding."""
        return self.first_mismatch is None

    def __repr__(self) -> str:
        count = sum(each.count for each in self.comparisons)
        verdict = "equal" if self.passed else f"first mismatch: {self.first_mismatch}"
        return f"<VerificationResult of {self.steps} steps, {count} values compared: {verdict}>"

    def _repr_html_(self) -> str:
        facts: dict[str, str] = {
            each.quantity: f"{each.count} compared, error {each.error:.1e}, tolerance "
            f"{each.tolerance:.1e}"
            for each in self.comparisons
        }
        heading = "equal" if self.passed else f"not equal, first mismatch: {self.first_mismatch}"
        return fact_table_html(f"{self.steps} steps: {heading}", facts)
