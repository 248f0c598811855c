"""Largest-model runs: one measured and verified step of a model, beside its prediction."""

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat


class PredictedMeasured(Document):
    """One number, predicted and measured."""

    predicted: float
    measured: float


class ReferenceCheck(Document):
    """One number or gradient of a run compared with the reference's."""

    name: str
    error: float
    """Relative error: 2-norm of the difference over that of the reference."""
    tolerance: float

    @property
    def within_tolerance(self) -> bool:
        """Whether the difference is rounding; NaN does not pass."""
        return self.error <= self.tolerance


class ReferenceComparison(Document):
    """A step compared with a plain layer-by-layer run of the same model and batch."""

    loss: float
    reference_loss: float
    gradient_norm: float
    reference_norm: float
    comparisons: tuple[ReferenceCheck, ...]
    """Loss and norm, then the gradients of the first and of the last layer."""

    @property
    def within_tolerance(self) -> bool:
        """Whether all comparisons pass."""
        return all(comparison.within_tolerance for comparison in self.comparisons)


class LargestModelRun(Document):
    """What one step of one model took, predicted and measured."""

    model: str
    folder: str
    """Folder of the run."""
    parameters: int
    precision: Precision
    moments: MomentFormat
    """Storage format of the optimizer's moments."""
    phases: int
    tokens: int
    """Tokens in the step."""
    device_bytes: PredictedMeasured
    """Peak device memory."""
    offloaded_bytes: PredictedMeasured
    """Bytes in offload files; measured: the space that they take on disk."""
    read_bytes: PredictedMeasured
    written_bytes: PredictedMeasured
    seconds: PredictedMeasured
    """Time until all weights are updated."""
    tokens_per_second: PredictedMeasured
    mfu: PredictedMeasured
    offload_summary: str
    """A sentence that says whether computing hides the offload transfers."""
    verification: ReferenceComparison
