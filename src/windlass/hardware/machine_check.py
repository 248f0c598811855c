"""Faults of a machine that types allow: zeros, wrong units, links that end too early."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from windlass.schema import Curve, Device, Machine, MatmulRate, Source, Tier
from windlass.units import format_bytes, format_flop, format_flop_rate, format_rate, format_seconds

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


_DURATIONS = (
    "launch_seconds", "pass_seconds", "compiled_pass_seconds", "compile_seconds",
    "update_call_seconds",
)  # fmt: skip
_BYTES = ("runtime_bytes", "compiler_bytes", "on_chip_bytes")
_RATES = ("update_rate", "mixed_update_rate", "norm_rate", "mixed_norm_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedNumber:
    """One stated number or curve of a machine."""

    path: str
    """Dotted path of the field, such as `device.tiers.device.capacity_bytes`."""
    value: float | tuple[tuple[float, float], ...]
    """In the base unit (bytes, seconds, bytes/s, FLOP/s); a curve is its (size, rate) points."""
    text: str
    """The value with a unit, for people."""
    source: Source


def stated_numbers(machine: Machine) -> tuple[StatedNumber, ...]:
    """All numbers of a machine in the order of its file; zero and missing ones are left out."""
    return tuple(
        StatedNumber(path=path, value=value, text=text, source=machine.source_of(path))
        for path, value, text in (*_machine(machine), *_device(machine.device), *_links(machine))
        if value
    )


_PathValueText = tuple[str, float | tuple[tuple[float, float], ...], str]


def _machine(machine: Machine) -> Iterator[_PathValueText]:
    if machine.devices > 1:
        yield "hosts", machine.hosts, str(machine.hosts)
        yield "devices_per_host", machine.devices_per_host, str(machine.devices_per_host)
    if machine.deviation is not None:
        yield "deviation", machine.deviation, f"{machine.deviation:.3f} of log(step time)"
    if machine.stragglers is not None:
        text = f"{100 * machine.stragglers:.2f} % of a step for each e-fold of hosts"
        yield "stragglers", machine.stragglers, text


def _device(device: Device) -> Iterator[_PathValueText]:
    for name in _DURATIONS:
        value = getattr(device, name)
        yield f"device.{name}", value, format_seconds(value)
    for name in _BYTES:
        value = getattr(device, name) or 0
        yield f"device.{name}", value, format_bytes(value)
    for name in _RATES:
        value = getattr(device, name) or 0.0
        yield f"device.{name}", value, format_rate(value)
    share = device.moving_share
    yield "device.moving_share", share, f"{100 * share:.1f} %"
    yield from _rates("device.traffic", device.traffic)
    yield from _rates("device.fused_traffic", device.fused_traffic)
    for op in device.op_rates:
        mode = "compiled" if op.compiled else "eager"
        yield from _rates(f"device.op_rates.{op.name}.{op.precision}.{mode}", op.curve)
    for moments in device.moment_rates:
        path = f"device.moment_rates.{moments.moments}"
        yield f"{path}.elements", moments.elements, f"{moments.elements:.3g} parameters/s"
        yield f"{path}.part_seconds", moments.part_seconds, format_seconds(moments.part_seconds)
    for rate in device.matmul:
        yield from _matmul(rate)
    for tier in device.tiers:
        yield from _tier(tier)


def _matmul(rate: MatmulRate) -> Iterator[_PathValueText]:
    path = f"device.matmul.{rate.precision}"
    yield f"{path}.peak", rate.peak, format_flop_rate(rate.peak)
    for name, curve in (
        ("curve", rate.curve),
        ("biased", rate.biased),
        ("attention", rate.attention),
    ):
        if curve is not None:
            yield f"{path}.{name}", tuple(curve.points), _flop_range(curve)
    if rate.sparse_efficiency is not None:
        text = _curve_range(rate.sparse_efficiency, _percent, lambda side: f"blocks of {side:g}")
        yield f"{path}.sparse_efficiency", tuple(rate.sparse_efficiency.points), text
    if rate.tiles is not None:
        yield from ((f"{path}.tiles.{name}", value, f"{value:g}") for name, value in rate.tiles)
    for each in rate.attention_rates:
        kernel = f"{each.kernel}." if each.kernel else ""
        for name, curve in (("forward", each.forward), ("backward", each.backward)):
            text = _curve_range(curve, format_flop_rate, lambda size: f"{size:g} tokens")
            place = f"{path}.attention_rates.{kernel}{each.head_width}.{name}"
            yield place, tuple(curve.points), text


def _tier(tier: Tier) -> Iterator[_PathValueText]:
    path = f"device.tiers.{tier.name}"
    yield f"{path}.capacity_bytes", tier.capacity_bytes, format_bytes(tier.capacity_bytes)
    for name in ("read", "write", "both"):
        rate = getattr(tier, name) or 0.0
        yield f"{path}.{name}", rate, format_rate(rate)


def _links(machine: Machine) -> Iterator[_PathValueText]:
    for link in machine.links:
        path = f"links.{link.name}"
        yield f"{path}.joins", link.joins, f"{link.joins} devices"
        yield f"{path}.rate", link.rate, format_rate(link.rate)
        yield f"{path}.latency", link.latency, format_seconds(link.latency)
        sharers = link.shared_by
        if sharers is not None:
            text = "each has its own" if sharers == 1 else f"{sharers} devices"
            yield f"{path}.shared_by", sharers, text


def _rates(path: str, curve: Curve | None) -> Iterator[_PathValueText]:
    if curve is not None:
        yield path, tuple(curve.points), _curve_range(curve, format_rate, format_bytes)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _flop_range(curve: Curve) -> str:
    return _curve_range(curve, format_flop_rate, format_flop)


def _curve_range(curve: Curve, rate: Callable[[float], str], size: Callable[[float], str]) -> str:
    """`12.5 GFLOP/s at 1.00 MFLOP to 249 TFLOP/s at 10.0 TFLOP`."""
    first, last = curve.points[0], curve.points[-1]
    end = f"{rate(last.rate)} at {size(last.size)}"
    if len(curve.points) == 1:
        return rate(first.rate)
    return f"{rate(first.rate)} at {size(first.size)} to {end}"
