"""Cost of one byte and one hop of a ring, an all-to-all or a message on nested links.

Devices are numbered along the links: an inner link joins neighbours, and tensor-parallel ranks are
neighbours; replicas lie further apart, and stages furthest. A ring that leaves a unit (the devices
that the next inner link joins) does so over the unit's ports, which the unit's rings share.

Source of the ring's formulas: Patarasuk & Yuan 2009, JPDC 69(2).
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from windlass.schema import Link


class LinkCost(NamedTuple):
    """Cost of an exchange on a machine's links."""

    byte_seconds: float
    """Seconds of each byte that a device sends."""
    hop_seconds: float
    """Seconds of each hop."""


def ring_cost(links: Sequence[Link], ranks: int, *, stride: int, active_devices: int) -> LinkCost:
    """Cost of one ring among equal rings side by side: its slowest link counts.

    On a link whose ports are shared within a unit, the unit's `u / s` ports carry `u / m` rings,
    each with `m` members there: a byte takes `s / (m w)`. If several units share a port, the rings
    that lie side by side share it.

    Over nested links the parts of a buffer are exchanged within units and between them at once:
    between g units `(g - 1) / g` of the buffer goes each way, where a plain ring of n members sends
    `(n - 1) / n`. A hop within a unit is made for each member, one between units for each doubling
    of them. Source: NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4".

    Args:
        links: innermost first.
        ranks: devices of the ring, at least 2.
        stride: devices from one of them to the next.
        active_devices: devices of the stage, which all exchange at once.

    Returns:
        Seconds of each byte that a plain ring's member would send, and of each of its `n - 1` hops.

    Raises:
        KeyError: there is no link.
    """
    crossed = _crossed_links(links, ranks, stride)
    slowest, hops, unit = 0.0, 0.0, 1
    for link in crossed:
        members = max(1, min(ranks, unit // stride))
        within = ranks if link is crossed[-1] else max(1, min(ranks, link.joins // stride))
        units = ceil(within / members)
        if units > 1:
            share = _rings_per_port(link, unit, members, within, active_devices)
            if members > 1 and stride > 1 and (link.shared_by or 1) > 1:
                share *= 1.0 + link.crowding
            slowest = max(slowest, share / link.rate * (1 - 1 / units) / (1 - 1 / ranks))
            hops += link.latency * (units - 1 if members == 1 else log2(units))
        unit = link.joins
    return LinkCost(slowest, hops / (ranks - 1))


def all_to_all_cost(
    links: Sequence[Link], ranks: int, *, stride: int, active_devices: int
) -> LinkCost:
    """Cost of one all-to-all among equal ones side by side: its slowest link counts.

    Each of n members sends `1 / n` of its buffer to every other one, in n - 1 rounds. Where a
    unit has m members and a link joins w, `w - m` of its messages cross that link; members of a
    unit that share a port wait for each other. Source of the rounds: Thakur, Rabenseifner & Gropp
    2005, IJHPCA 19(1), section 4.3, pairwise exchange.

    Args:
        links: innermost first.
        ranks: devices that exchange, at least 2.
        stride: devices from one of them to the next.
        active_devices: devices of the stage, which all exchange at once.

    Returns:
        Seconds of each byte that a member sends to others, and of each of its `n - 1` messages.

    Raises:
        KeyError: there is no link.
    """
    crossed = _crossed_links(links, ranks, stride)
    slowest, hops, unit = 0.0, 0.0, 1
    for link in crossed:
        members = max(1, min(ranks, unit // stride))
        within = ranks if link is crossed[-1] else max(1, min(ranks, link.joins // stride))
        messages = within - members
        if messages > 0:
            sharers = _port_users(link, active_devices)
            share = sharers if sharers <= unit else max(1, sharers // within)
            slowest = max(slowest, share / link.rate * messages / (ranks - 1))
            hops += link.latency * messages
        unit = link.joins
    return LinkCost(slowest, hops / (ranks - 1))


def message_cost(links: Sequence[Link], devices: int, *, active_devices: int) -> LinkCost:
    """Cost of a message to the next stage, over the link that joins all stages.

    Devices of a stage send at once, and share the ports of their host.

    Args:
        links: innermost first.
        devices: devices of the whole plan.
        active_devices: devices of the stage.

    Raises:
        KeyError: there is no link.
    """
    crossed = _crossed_links(links, devices, 1)
    link, unit = crossed[-1], crossed[-2].joins if len(crossed) > 1 else 1
    sharers = _port_users(link, active_devices)
    return LinkCost((sharers if sharers <= unit else 1) / link.rate, link.latency)


def _crossed_links(links: Sequence[Link], ranks: int, stride: int) -> Sequence[Link]:
    """The links from the innermost to the one that joins all members, else to the outermost."""
    if not links:
        raise KeyError("the machine states no link between devices")
    ends = (index for index, link in enumerate(links, 1) if link.joins >= ranks * stride)
    return links[: next(ends, len(links))]


def _rings_per_port(link: Link, unit: int, members: int, within: int, active_devices: int) -> float:
    """Number of rings that a port of a link carries at once.

    Args:
        link: the link that they cross.
        unit: devices that the next inner link joins; 1 for the innermost.
        members: members of a ring within a unit.
        within: members of a ring among all devices that the link joins.
        active_devices: devices that exchange at once.
    """
    sharers = _port_users(link, active_devices)
    return sharers / members if sharers <= unit else max(1, sharers // within)


def _port_users(link: Link, active_devices: int) -> int:
    """Devices that use one port of a link at once."""
    return min(link.shared_by or link.joins, active_devices)
