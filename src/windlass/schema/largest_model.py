"""Recorded: one measured and verified step of a model, beside its prediction."""

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.plan import Moments


class Sized(Document):
    """One number, predicted and measured."""

    predicted: float
    measured: float


class Agreement(Document):
    """One number or gradient of a run against the reference's."""

    name: str
    error: float
    """Relative: 2-norm of the difference over that of the reference."""
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the difference is rounding; an error that is no number is none."""
        return self.error <= self.tolerance


class Verified(Document):
    """A step against a plain walk over the same model and batch."""

    loss: float
    reference_loss: float
    gradient_norm: float
    reference_norm: float
    agreements: tuple[Agreement, ...]
    """Loss and norm, then the gradients of the first and of the last layer."""

    @property
    def holds(self) -> bool:
        """Whether all agree."""
        return all(agreement.holds for agreement in self.agreements)


class Recorded(Document):
    """What one step of one model took."""

    model: str
    folder: str
    """Of the run."""
    parameters: int
    precision: Precision
    moments: Moments
    """The format of the optimizer's moments."""
    phases: int
    tokens: int
    near_bytes: Sized
    """At the peak."""
    far_bytes: Sized
    """Lying in files beyond; measured: what they take of the disk."""
    read_bytes: Sized
    written_bytes: Sized
    seconds: Sized
    """Until all weights are updated."""
    tokens_per_second: Sized
    mfu: Sized
    law: str
    """Whether moving hides behind computing, in words."""
    verified: Verified
