"""What a check of `windlass doctor` is, and what it may find."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.document import Document
from windlass.jobs import Progress
from windlass.schema import CheckGroup, Measurement, RingRate
from windlass.torch_ext import Device, device_for

_TIMED = 8
_ENOUGH_SECONDS = 2.0
"""Seconds that timed calls take together, after which no more are timed."""


class WorkerTask(Document):
    """The checks that one process runs."""

    group: CheckGroup
    device: str
    """Torch's name of the device, or of the kind of device where there are several ranks."""
    label: str
    """The device in words, such as `8 x cuda`."""
    rank: int = 0
    ranks: int = 1
    devices: int = 1
    """Devices that a plan may take."""
    first: int = 0
    """Number of checks of the group that were run before."""
    folder: Path
    """An empty folder, in which ranks meet and runs are kept."""

    def computes_on(self) -> Device:
        """The device of this process."""
        several = self.ranks > 1 and self.device != "cpu"
        return device_for(f"{self.device}:{self.rank}" if several else self.device)


class Finding(NamedTuple):
    """What a check found that did not fail."""

    detail: str
    """One clause with the numbers."""
    slow: str | None = None
    """What to do if it is slower than expected; None if it is not."""
    rings: tuple[RingRate, ...] = ()
    measurement: Measurement | None = None


class Check(NamedTuple):
    """One check: what it is called, what it does, and what to do if it fails."""

    name: str
    run: Callable[[], Finding]
    way_out: str


ChecksOfGroup = Callable[[WorkerTask, Progress], tuple[Check, ...]]
"""Makes the checks of a group; the progress is called with how far a long check is."""


class WrongResultError(Exception):
    """A check computed something else than it should."""


class NotAvailableError(Exception):
    """This machine has no such thing."""


def compare(results: dict[str, tuple[Tensor, Tensor]], tolerance: float) -> str:
    """`error 3.1e-07, at most 1.0e-05`: the largest relative error of some results.

    Args:
        results: computed and reference tensor, by what they are.
        tolerance: largest difference, relative to the largest value of the reference.

    Raises:
        WrongResultError: one of them differs by more.
    """
    worst = 0.0
    for name, (result, reference) in results.items():
        expected = reference.detach().to("cpu", torch.float64)
        difference = (result.detach().to("cpu", torch.float64) - expected).abs().max()
        error = float(difference / expected.abs().max().clamp(min=1e-30))
        if not error <= tolerance:  # NaN is not
            raise WrongResultError(
                f"{name} differs by {error:.1e} from the CPU's in float64, at most {tolerance:.1e}"
            )
        worst = max(worst, error)
    return f"error {worst:.1e}, at most {tolerance:.1e}"


def shortest_seconds(device: Device, work: Callable[[], object]) -> float:
    """The shortest time of some calls, after one that does not count; of one if it takes long."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= _TIMED and sum(times) < _ENOUGH_SECONDS):
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
