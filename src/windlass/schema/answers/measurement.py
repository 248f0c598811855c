"""Predicted and measured step time and memory of one run on this machine."""

from windlass.document import Document
from windlass.schema.machine import MAX_CONTENTION


class Measurement(Document):
    """Predicted and measured step time and peak memory of one run."""

    plan: str
    """The plan in a few words: how it differs from the simplest one."""
    predicted_seconds: float
    low_seconds: float
    """Lower end of the predicted 80 % interval; the next two likewise."""
    high_seconds: float
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    measured_seconds: float
    """Median over the measured steps."""
    measured_bytes: int
    """Peak resident memory of the fullest process; on an accelerator, of its tensors."""
    drift: float
    """Time of the machine's speed check before the run, over its time during the probe."""
    contention: float | None = None
    """Share of its time that the run waited for a busy core; None if not known."""

    @property
    def seconds_error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        """Predicted over measured peak memory, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_contended(self) -> bool:
        """Whether other processes used the cores while it ran."""
        return self.contention is not None and self.contention > MAX_CONTENTION

    @property
    def is_time_inside(self) -> bool:
        """Whether the measured time is inside the predicted 80 % interval."""
        return self.low_seconds <= self.measured_seconds <= self.high_seconds

    @property
    def is_memory_inside(self) -> bool:
        """Whether the measured memory is inside the predicted 80 % interval."""
        return self.low_bytes <= self.measured_bytes <= self.high_bytes
