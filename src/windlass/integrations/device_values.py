"""Numbers of tensors without waiting for a device: copied now, read when they have arrived."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.errors import RequestError

if TYPE_CHECKING:
    import torch

    Arriving = float | torch.Tensor
    """A number, or the tensor in host memory into which a device is copying it."""


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row of which a device has not delivered all numbers yet."""

    step: int
    time: float
    values: "Mapping[str, Arriving]"
    copies: "tuple[torch.Event, ...]"
    """Events behind the copies, one for each device."""

    def has_arrived(self) -> bool:
        """Whether all numbers are here; asks the devices and does not wait for them."""
        return all(copy.query() for copy in self.copies)

    def wait(self) -> None:
        """Waits until all numbers are here."""
        for copy in self.copies:
            copy.synchronize()

    def numbers(self) -> dict[str, float]:
        """The numbers, of which all have arrived."""
        return {
            name: value if isinstance(value, float) else float(value.item())
            for name, value in self.values.items()
        }


def start_copy(name: str, value: object) -> "Arriving | None":
    """The number of a tensor, or the copy of it that is on its way; None if it is no tensor.

    A device copies into pinned memory behind the work that it has, while the host goes on.

    Raises:
        RequestError: the tensor has more or less than one number.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.numel() != 1 or value.is_complex() or value.device.type == "meta":
        raise RequestError(
            f"`{name}` is a tensor of shape {list(value.shape)} and type {value.dtype} on "
            f"{value.device}; log one real number, such as its mean"
        )
    local = value.detach()
    if local.device.type == "cpu":
        return float(local.item())
    copy: Arriving = local.to("cpu", non_blocking=True)
    return copy


def record_copies(devices: "Iterable[torch.device]") -> "tuple[torch.Event, ...]":
    """An event on each device, behind the copies that were started there."""
    torch = sys.modules["torch"]
    events = tuple(torch.Event(device) for device in devices)
    for event in events:
        event.record()
    return events
