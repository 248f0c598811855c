"""Which device does what: stage, slice and replica of each device, and back."""

from typing import NamedTuple

from windlass.spec.plan import Cut


class Place(NamedTuple):
    """A device's coordinates in the cut."""

    stage: int
    slice: int
    replica: int


def place_of(device: int, cut: Cut) -> Place:
    """The coordinates of a device: slices lie next to each other, then replicas, then stages.

    Slices exchange most and stages least, so the fastest links join the slices.
    """
    rest, slice_ = divmod(device, cut.tensor)
    stage, replica = divmod(rest, cut.replicas)
    return Place(stage, slice_, replica)


def device_of(place: Place, cut: Cut) -> int:
    """The device at these coordinates."""
    return (place.stage * cut.replicas + place.replica) * cut.tensor + place.slice
