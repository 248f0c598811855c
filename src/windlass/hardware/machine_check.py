"""Faults of a machine that types allow: zeros, wrong units, links that end too early."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from windlass.hardware.number_sources import stated_numbers
from windlass.schema import Machine

_LARGEST = {"capacity_bytes": 2.0**60, "joins": 1e7, "hosts": 1e7, "devices_per_host": 1e4}
_LARGEST_RATE = 1e18
"""Bytes or FLOP a second; the SRAM of a wafer, which is the fastest of all, has 2e16."""
_LONGEST_SECONDS = 3600.0
_SECONDS = ("latency", "seconds")
_MASKED_GAIN = 2.0
"""A kernel that skips what a causal mask hides appears up to twice as fast."""


def machine_faults(machine: Machine) -> Iterator[str]:
    """Everything that is wrong with a machine, each in one sentence with the way out."""
    yield from _number_faults(machine)
    yield from _device_faults(machine)
    yield from _link_faults(machine)


def _number_faults(machine: Machine) -> Iterator[str]:
    for path, value in _required(machine):
        if value <= 0:
            yield f"`{path}` = {value:g}, which must be more than 0"
    for number in stated_numbers(machine):
        if isinstance(number.value, tuple):
            continue  # a curve's points are checked where it is read
        name = number.path.rpartition(".")[2]
        is_seconds = name.endswith(_SECONDS)
        largest = _LONGEST_SECONDS if is_seconds else _LARGEST.get(name, _LARGEST_RATE)
        if number.value > largest:
            yield (
                f"`{number.path}` = {number.value:g} is more than any machine has, at most "
                f"{largest:g}; correct the number or its unit"
            )


def _required(machine: Machine) -> Iterator[tuple[str, float]]:
    """Numbers that must not be 0, with their places."""
    yield "hosts", machine.hosts
    yield "devices_per_host", machine.devices_per_host
    yield "device.update_rate", machine.device.update_rate
    for rate in machine.device.matmul:
        yield f"device.matmul.{rate.precision}.peak", rate.peak
    for index, tier in enumerate(machine.device.tiers):
        yield f"device.tiers.{tier.name}.capacity_bytes", tier.capacity_bytes
        if index:
            yield f"device.tiers.{tier.name}.read", tier.read or 0.0
            yield f"device.tiers.{tier.name}.write", tier.write or 0.0
    for link in machine.links:
        yield f"links.{link.name}.joins", link.joins
        yield f"links.{link.name}.rate", link.rate


def _device_faults(machine: Machine) -> Iterator[str]:
    rates = machine.device.matmul
    if not {"float32", "bfloat16", "float16"} & {rate.precision for rate in rates}:
        yield (
            "`device.matmul` states no rate in float32, bfloat16 or float16; add a "
            "`[[device.matmul]]` with `precision`, `peak`, `curve` and `attention`"
        )
    for rate in rates:
        masked = max((other.peak for other in rates), default=0.0)
        attention = [
            point.rate / _MASKED_GAIN
            for each in rate.attention_rates
            for point in (*each.forward.points, *each.backward.points)
        ]
        for name, reached, peak in (
            ("curve", [point.rate for point in rate.curve.points], rate.peak),
            ("attention", [point.rate for point in rate.attention.points], masked),
            ("attention_rates", attention, rate.peak),
        ):
            if max(reached, default=0.0) > peak > 0:
                yield (
                    f"`device.matmul.{rate.precision}.{name}` reaches {max(reached):.3g} FLOP/s, "
                    f"above the peak of {peak:.3g}; state the dense peak of the data sheet, or "
                    "correct the rates"
                )
    yield from _twice("device.matmul", (rate.precision for rate in rates))
    yield from _twice("device.tiers", (tier.name for tier in machine.device.tiers))


def _link_faults(machine: Machine) -> Iterator[str]:
    devices, links = machine.devices, machine.links
    if devices > 1 and not links:
        yield (
            f"`links` is empty, but there are {devices} devices; add a `[[links]]` with `name`, "
            f"`joins` = {devices}, `latency` and `rate`"
        )
    for near, far in pairwise(links):
        if far.joins <= near.joins:
            yield (
                f"`links.{far.name}.joins` = {far.joins} is not more than the {near.joins} that "
                f"`{near.name}` inside it joins; order links from the innermost to the outermost"
            )
    if links and links[-1].joins < devices:
        yield (
            f"`links.{links[-1].name}` is the outermost and joins {links[-1].joins} of {devices} "
            f"devices; raise its `joins`, or add a `[[links]]` that joins all {devices}"
        )
    yield from _twice("links", (link.name for link in links))


def _twice(place: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"`{place}` states `{name}` {count} times; keep one of them"
