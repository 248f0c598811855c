"""The report of `windlass doctor`: what was tried on a machine, and what was measured of it."""

from typing import Literal

from pydantic import Field

from windlass.document import Document
from windlass.schema.answers.measurement import Measurement
from windlass.schema.machine import Machine
from windlass.units import Bytes, BytesPerSecond, Seconds

CheckStatus = Literal["ok", "slow", "failed", "skipped"]
"""`ok`: as it should be. `slow`: right, but slower than expected. `failed`: wrong, or it ended in
an error. `skipped`: this machine has no such thing."""

CheckGroup = Literal["kernels", "memory", "ranks", "machine", "plans", "steps"]
"""What a check concerns: one kernel; allocators and host memory; messages between processes; the
measurement of rates; whole plans beside one device; steps beside their prediction."""


class RingRate(Document):
    """Measured time of one exchange between all ranks, for one size."""

    operation: Literal["all-reduce", "message"]
    nbytes: Bytes
    """Bytes of the buffer on each rank."""
    seconds: Seconds
    rate: BytesPerSecond
    """Bytes that each rank sends a second: of n ranks `2 (n - 1) / n` times the buffer in a ring
    all-reduce, the buffer itself in a message."""


class DoctorCheck(Document):
    """The outcome of one check."""

    group: CheckGroup
    name: str
    device: str
    """The device that it ran on, such as `cuda:0`, or how many: `2 x cpu`."""
    status: CheckStatus
    seconds: Seconds = 0.0
    """Time that the check took."""
    detail: str
    """What was found, with its numbers; why it failed, is slow or was skipped."""
    way_out: str | None = None
    """What to do about it; None where nothing needs to be done."""
    rings: tuple[RingRate, ...] = ()
    measurement: Measurement | None = None
    """Predicted and measured figures of a run; None for other checks."""


class DoctorSystem(Document):
    """Hardware and software of a machine, without anything that names its owner."""

    windlass: str
    """Version of Windlass."""
    python: str
    torch: str
    libraries: dict[str, str] = Field(default_factory=dict)
    """Versions of `cuda`, `hip`, `cudnn` and `nccl`, of those that torch has."""
    processor: str
    """The processor's model."""
    cores: int
    """Cores that this process may use."""
    kind: str
    """Torch's name for the devices that compute: `cpu`, `cuda`."""
    accelerators: tuple[str, ...] = ()
    """Model of each accelerator."""


class DoctorReport(Document):
    """All checks of one machine, and its measured rates if they could be taken.

    It holds no user or host name, no path and no environment variable.
    """

    version: Literal[1] = 1
    """Version of the file."""
    name: str
    """Name of the machine in plans, made from its processor's model; the owner may change it."""
    date: str
    """ISO date."""
    seconds: Seconds
    """Time that all checks took together."""
    system: DoctorSystem | None = None
    """None if torch could not be loaded."""
    checks: tuple[DoctorCheck, ...]
    machine: Machine | None = None
    """Measured rates; None if they could not be taken."""

    @property
    def failed(self) -> tuple[DoctorCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")
