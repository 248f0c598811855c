"""Recorded: one measured and verified step of a model, beside its prediction."""

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat


class PredictedMeasured(Document):
    """One number, predicted and measured."""

    predicted: float
    measured: float


class ReferenceCheck(Document):
    """One number or gradient of a run against the reference's."""

    name: str
    error: float
    """Relative: 2-norm of the difference over that of the reference."""
    tolerance: float

    @property
    def within_tolerance(self) -> bool:
        """Whether the difference is rounding; an error that is no number is none."""
        return self.error <= self.tolerance


class ReferenceComparison(Document):
    """A step against a plain walk over the same model and batch."""

    loss: float
    reference_loss: float
    gradient_norm: float
    reference_norm: float
    comparisons: tuple[ReferenceCheck, ...]
    """Loss and norm, then the gradients of the first and of the last layer."""

    @property
    def within_tolerance(self) -> bool:
        """Whether all agree."""
        return all(agreement.within_tolerance for agreement in self.comparisons)


class LargestModelRun(Document):
    """What one step of one model took."""

    model: str
    folder: str
    """Of the run."""
    parameters: int
    precision: Precision
    moments: MomentFormat
    """The format of the optimizer's moments."""
    phases: int
    tokens: int
    device_bytes: PredictedMeasured
    """At the peak."""
    offloaded_bytes: PredictedMeasured
    """Lying in files beyond; measured: what they take of the disk."""
    read_bytes: PredictedMeasured
    written_bytes: PredictedMeasured
    seconds: PredictedMeasured
    """Until all weights are updated."""
    tokens_per_second: PredictedMeasured
    mfu: PredictedMeasured
    offload_summary: str
    """Whether moving hides behind computing, in words."""
    verification: ReferenceComparison
