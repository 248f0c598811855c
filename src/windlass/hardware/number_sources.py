"""Every number that a machine's file states, with its path, unit and source."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from windlass.schema import Curve, Device, Machine, MatmulRate, Source, Tier
from windlass.units import format_bytes, format_flop, format_flop_rate, format_rate, format_seconds

_SECONDS = (
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
    for name in _SECONDS:
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
