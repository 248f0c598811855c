"""Rings: what a byte and a round of a ring or a message take on links within links.

Devices are numbered along the links: those that an inner link joins are neighbours, and so are the
slices of a layer; replicas lie further apart, and stages furthest. A ring that leaves a unit, the
devices that the next inner link joins, does so over the unit's ports, which its rings share.

Source of the ring's formulas: Patarasuk & Yuan 2009, JPDC 69(2).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.schema.machine import Link


class LinkCost(NamedTuple):
    """What an exchange costs."""

    byte_seconds: float
    """For each byte that a device sends."""
    round_seconds: float
    """For each hop."""


class RingCosts:
    """What rings cost on some links, each sort of them found once.

    Args:
        links: innermost first.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links
        self._known: dict[tuple[int, int, int], LinkCost] = {}

    def way(self, ranks: int, apart: int, exchanging: int) -> LinkCost:
        """As `ring` has it."""
        known = self._known.get((ranks, apart, exchanging))
        if known is None:
            known = ring_cost(self.links, ranks, apart=apart, exchanging=exchanging)
            self._known[ranks, apart, exchanging] = known
        return known

    def ways(self, ranks: Ints, apart: Ints, exchanging: Ints) -> tuple[Floats, Floats]:
        """Of many rings seconds of a byte and of a hop; a ring of one costs nothing."""
        columns = np.broadcast_arrays(ranks, apart, exchanging)
        base = 1 + max(int(each.max(initial=0)) for each in columns)
        keys = (columns[0] * base + columns[1]) * base + columns[2]
        _, first, place = np.unique(keys, return_index=True, return_inverse=True)
        each = [[int(column.flat[at]) for column in columns] for at in first]
        found = [self.way(*numbers) if numbers[0] > 1 else LinkCost(0.0, 0.0) for numbers in each]
        byte_seconds, hop_seconds = np.array(found).T[:, place.reshape(keys.shape)]
        return byte_seconds, hop_seconds


def ring_cost(links: Sequence[Link], ranks: int, *, apart: int, exchanging: int) -> LinkCost:
    """Of one ring among equal ones side by side: its slowest link counts.

    On a link whose ports are shared within a unit, the unit's `u / s` ports carry `u / m` rings of
    which each has `m` members there: a byte takes `s / (m w)`. Where a port is shared by more than
    one unit, as many rings share it as lie side by side.

    Args:
        links: innermost first.
        ranks: devices of the ring, at least 2.
        apart: devices from one of them to the next.
        exchanging: devices of the stage, all of which exchange at once.

    Raises:
        KeyError: there is no link.
    """
    crossed = _crossed(links, ranks, apart)
    slowest, unit = 0.0, 1
    for link in crossed:
        within = max(1, min(ranks, link.joins // apart))
        if within > 1 or link is crossed[-1]:
            share = _share(link, unit, max(1, min(ranks, unit // apart)), within, exchanging)
            slowest = max(slowest, share / link.rate)
        unit = link.joins
    return LinkCost(slowest, crossed[-1].latency)


def message_cost(links: Sequence[Link], devices: int, *, exchanging: int) -> LinkCost:
    """Of a message to the next stage: over the link that joins all stages.

    Devices of a stage send at once, and share the ports of their host.

    Args:
        links: innermost first.
        devices: of the whole cut.
        exchanging: devices of the stage.

    Raises:
        KeyError: there is no link.
    """
    crossed = _crossed(links, devices, 1)
    link, unit = crossed[-1], crossed[-2].joins if len(crossed) > 1 else 1
    sharers = _sharers(link, exchanging)
    return LinkCost((sharers if sharers <= unit else 1) / link.rate, link.latency)


def _crossed(links: Sequence[Link], ranks: int, apart: int) -> Sequence[Link]:
    """The links from the innermost to the one that joins them all, else to the outermost."""
    if not links:
        raise KeyError("the machine states no link between devices")
    ends = (at for at, link in enumerate(links, 1) if link.joins >= ranks * apart)
    return links[: next(ends, len(links))]


def _share(link: Link, unit: int, members: int, within: int, exchanging: int) -> float:
    """Rings that a port of a link carries at once.

    Args:
        link: that they cross.
        unit: devices that the next inner link joins; 1 of the innermost.
        members: of a ring in a unit.
        within: of a ring among all that the link joins.
        exchanging: devices that exchange at once.
    """
    sharers = _sharers(link, exchanging)
    return sharers / members if sharers <= unit else max(1, sharers // within)


def _sharers(link: Link, exchanging: int) -> int:
    """Devices that use one port of a link at once."""
    return min(link.shared_by or link.joins, exchanging)
