"""Numbers: all that a machine's file states, each with its place, unit and source."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from windlass.schema.machine import Curve, Device, Machine, MatmulRate, Tier
from windlass.schema.provenance import Source
from windlass.units import format_bytes, format_flop, format_flop_rate, format_rate, format_seconds

_SECONDS = (
    "launch_seconds", "pass_seconds", "compiled_pass_seconds", "compile_seconds",
    "update_call_seconds",
)  # fmt: skip
_BYTES = ("runtime_bytes", "compiler_bytes")
_RATES = ("update_rate", "mixed_update_rate", "norm_rate", "mixed_norm_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedNumber:
    """One stated number or curve."""

    path: str
    """Dotted, such as `device.tiers.near.capacity_bytes`."""
    value: float | tuple[tuple[float, float], ...]
    """In the base unit; of a curve its points."""
    text: str
    source: Source


def stated_numbers(machine: Machine) -> tuple[StatedNumber, ...]:
    """What a machine states, in the order of its file; what is zero or left out is not there."""
    return tuple(
        StatedNumber(path=place, value=value, text=shown, source=machine.source_of(place))
        for place, value, shown in (*_machine(machine), *_device(machine.device), *_links(machine))
        if value
    )


_Stated = tuple[str, float | tuple[tuple[float, float], ...], str]


def _machine(machine: Machine) -> Iterator[_Stated]:
    if machine.devices > 1:
        yield "hosts", machine.hosts, str(machine.hosts)
        yield "devices_per_host", machine.devices_per_host, str(machine.devices_per_host)
    if machine.deviation is not None:
        yield "deviation", machine.deviation, f"{machine.deviation:.3f} of log(step time)"
    if machine.stragglers is not None:
        words = f"{100 * machine.stragglers:.2f} % of a step for each e-fold of hosts"
        yield "stragglers", machine.stragglers, words


def _device(device: Device) -> Iterator[_Stated]:
    for name in _SECONDS:
        value = getattr(device, name)
        yield f"device.{name}", value, format_seconds(value)
    for name in _BYTES:
        value = getattr(device, name)
        yield f"device.{name}", value, format_bytes(value)
    for name in _RATES:
        value = getattr(device, name) or 0.0
        yield f"device.{name}", value, format_rate(value)
    share = device.moving_share
    yield "device.moving_share", share, f"{100 * share:.1f} %"
    yield from _traffic("device.traffic", device.traffic)
    yield from _traffic("device.fused_traffic", device.fused_traffic)
    for op in device.op_rates:
        mode = "compiled" if op.compiled else "eager"
        yield from _traffic(f"device.op_rates.{op.name}.{op.precision}.{mode}", op.curve)
    for moments in device.moment_rates:
        place = f"device.moment_rates.{moments.moments}"
        yield f"{place}.elements", moments.elements, f"{moments.elements:.3g} parameters/s"
        yield f"{place}.part_seconds", moments.part_seconds, format_seconds(moments.part_seconds)
    for rate in device.matmul:
        yield from _matmul(rate)
    for tier in device.tiers:
        yield from _tier(tier)


def _matmul(rate: MatmulRate) -> Iterator[_Stated]:
    place = f"device.matmul.{rate.precision}"
    yield f"{place}.peak", rate.peak, format_flop_rate(rate.peak)
    for name, curve in (
        ("curve", rate.curve),
        ("biased", rate.biased),
        ("attention", rate.attention),
    ):
        if curve is not None:
            yield f"{place}.{name}", tuple(curve.points), _of_flop(curve)
    for each in rate.attention_rates:
        for name, curve in (("forward", each.forward), ("backward", each.backward)):
            words = _spread(curve, format_flop_rate, lambda size: f"{size:g} tokens")
            yield f"{place}.attention_rates.{each.head_width}.{name}", tuple(curve.points), words


def _tier(tier: Tier) -> Iterator[_Stated]:
    place = f"device.tiers.{tier.name}"
    yield f"{place}.capacity_bytes", tier.capacity_bytes, format_bytes(tier.capacity_bytes)
    for name in ("read", "write", "both"):
        rate = getattr(tier, name) or 0.0
        yield f"{place}.{name}", rate, format_rate(rate)


def _links(machine: Machine) -> Iterator[_Stated]:
    for link in machine.links:
        place = f"links.{link.name}"
        yield f"{place}.joins", link.joins, f"{link.joins} devices"
        yield f"{place}.rate", link.rate, format_rate(link.rate)
        yield f"{place}.latency", link.latency, format_seconds(link.latency)
        sharers = link.shared_by
        if sharers is not None:
            words = "each has its own" if sharers == 1 else f"{sharers} devices"
            yield f"{place}.shared_by", sharers, words


def _traffic(place: str, curve: Curve | None) -> Iterator[_Stated]:
    if curve is not None:
        yield place, tuple(curve.points), _spread(curve, format_rate, format_bytes)


def _of_flop(curve: Curve) -> str:
    return _spread(curve, format_flop_rate, format_flop)


def _spread(curve: Curve, rate: Callable[[float], str], size: Callable[[float], str]) -> str:
    """`12.5 GFLOP/s at 1.00 MFLOP to 249 TFLOP/s at 10.0 TFLOP`."""
    first, last = curve.points[0], curve.points[-1]
    end = f"{rate(last.rate)} at {size(last.size)}"
    if len(curve.points) == 1:
        return rate(first.rate)
    return f"{rate(first.rate)} at {size(first.size)} to {end}"
