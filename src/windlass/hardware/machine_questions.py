"""Questions about a machine of the user's own: their defaults, and what is wrong with answers."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from windlass.errors import RequestError, did_you_mean, shorten
from windlass.hardware.catalog import HostFamily, device_names, host_families, load_machine
from windlass.schema import Tier
from windlass.units import format_bytes, format_rate, parse_bytes, parse_flop_rate, parse_rate

OTHER = "other"
"""Answer to `device` for a device that is not in the catalogue."""

_BITS = re.compile(r"\s*([0-9.]+)\s*([KMGT])b(?:it)?/s\s*$")
_NETWORK_SHARE = 0.92
"""Share of a network card's nominal rate that NCCL reaches."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class Question(NamedTuple):
    """One question about a new machine."""

    key: str
    text: str
    default: str | None
    """The answer if none is given; None means that there must be one."""
    origin: str
    """Where the default comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    text: str
    parse: Callable[[str], float]


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise RequestError(f"{shorten(repr(text))} is not a number from 1 to 999,999")
    return int(text)


def _factor(text: str) -> float:
    """`4`, `1.5` or `4:1`."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]+)?)(?::1)?", text)
    if match is None or float(match.group(1)) < 1:
        raise RequestError(f"{shorten(repr(text))} is not a factor of at least 1, such as `4`")
    return float(match.group(1))


def _network_rate(text: str) -> float:
    """Bytes/s of `50 GB/s`, or what a card of `400 Gb/s` gives."""
    match = _BITS.match(text)
    if match is None:
        return parse_rate(text)
    bits = parse_rate(match.group(1)) * 1000.0 ** (1 + "KMGT".index(match.group(2)))
    return _NETWORK_SHARE * bits / 8


_KEYS = {
    "peak": _Key(text="dense peak in 16 bits, such as `312 TFLOP/s`", parse=parse_flop_rate),
    "memory": _Key(text="memory of a device, such as `80 GB`", parse=parse_bytes),
    "memory_rate": _Key(text="rate of a device's memory, such as `2 TB/s`", parse=parse_rate),
    "devices": _Key(text="devices in a host", parse=_count),
    "hosts": _Key(text="hosts", parse=_count),
    "link": _Key(text="rate between devices of a host, one way", parse=_network_rate),
    "network": _Key(text="rate of a network card, such as `400 Gb/s`", parse=_network_rate),
    "cards": _Key(text="network cards in a host", parse=_count),
    "oversubscription": _Key(text="oversubscription of the network, 1 for none", parse=_factor),
    "pod": _Key(text="hosts of a pod, within which it is not oversubscribed", parse=_count),
    "host_memory": _Key(text="memory of a host for offload", parse=parse_bytes),
}
_ONLY_OTHER = ("peak", "memory_rate")


def next_question(answers: Mapping[str, str]) -> Question | None:
    """The first question that `answers` leaves open; None if there is no further one.

    Args:
        answers: answers so far, by key; later defaults depend on them.
    """
    if "device" not in answers:
        return Question("device", f"device of the catalogue, or `{OTHER}`", None, "")
    return next((each for each in questions(answers) if each.key not in answers), None)


def questions(answers: Mapping[str, str]) -> Iterator[Question]:
    """All questions that the answers call for, in order, with defaults."""
    device = answers["device"].rstrip("?")
    family = family_of(device)
    usual = None if family is None else f"as `{family.name}`"
    if device == OTHER:
        for key in ("peak", "memory", "memory_rate"):
            yield _question(key, None, "")
    per_host = 1 if family is None else family.devices_per_host
    yield _question("devices", str(per_host), usual or "one device")
    yield _question("hosts", "1", "one host")
    if answered(answers, "devices", per_host) > 1:
        link = None if family is None else family.links[0]
        rate = "20 GB/s" if link is None else format_rate(link.rate)
        yield _question("link", rate, usual or "what rings reach over PCIe Gen4")
    if answered(answers, "hosts", 1) > 1:
        network = None if family is None or len(family.links) < 2 else family.links[-1]
        rate = "11.5 GB/s" if network is None else format_rate(network.rate)
        yield _question("network", rate, usual if network else "one card of 100 Gb/s")
        shared = per_host if network is None else network.shared_by or per_host
        yield _question("cards", str(max(1, per_host // shared)), usual or "one card a host")
        yield _question("oversubscription", "1", "a network without a bottleneck")
        if answered(answers, "oversubscription", 1) > 1:
            half = int(answered(answers, "hosts", 1)) // 2
            yield _question("pod", str(min(32, half)), "32 hosts, or half of all")
    host = next((tier for tier in offload_tiers(device) if tier.name == "host"), None)
    if host is not None:
        total = host.capacity_bytes * int(answered(answers, "devices", per_host))
        yield _question("host_memory", format_bytes(total), usual or "64 GiB for each device")


def answer_faults(key: str, answer: str, device: str) -> Iterator[str]:
    """What is wrong with one answer."""
    value = answer.rstrip("?").strip()
    if key == "device":
        if value not in (*device_names(), OTHER):
            hint = did_you_mean(value, [*device_names(), OTHER])
            yield f"`device` = {shorten(repr(value))} is not in the catalogue{hint}"
    elif key not in _KEYS:
        hint = did_you_mean(key, ["device", *_KEYS])
        yield f"unknown key `{shorten(key)}`{hint}; the keys are device, {', '.join(_KEYS)}"
    elif key in _ONLY_OTHER and device != OTHER:
        yield f"`{key}` is stated by `{device}`; leave it out, or say `device={OTHER}`"
    else:
        try:
            number = _KEYS[key].parse(value)
        except RequestError as error:
            yield f"`{key}`: {error}"
            return
        if number <= 0:
            yield f"`{key}` = {shorten(repr(answer))} must be more than 0"


def name_fault(name: str) -> str | None:
    """Why a machine cannot have this name; None if it can."""
    if _NAME.match(name):
        return None
    return f"`{shorten(name)}` is no name of a machine; use letters, digits, `.`, `-` and `_`"


def all_faults(name: str, answers: Mapping[str, str]) -> Iterator[str]:
    """Everything that is wrong with a name and the answers, each taken alone."""
    if fault := name_fault(name):
        yield fault
    device = answers.get("device", "").rstrip("?")
    if "device" not in answers:
        yield f"`device` is missing; name one of `windlass machines`, or `device={OTHER}`"
    for key, answer in answers.items():
        yield from answer_faults(key, answer, device)
    missing = [key for key in (*_ONLY_OTHER, "memory") if key not in answers]
    if device == OTHER and missing:
        yield f"`device={OTHER}` needs {', '.join(f'`{key}`' for key in missing)} too"


def answered(answers: Mapping[str, str], key: str, default: float) -> float:
    """The number that a key's answer means, in the base unit."""
    return _KEYS[key].parse(answers[key].rstrip("?").strip()) if key in answers else default


def family_of(device: str) -> HostFamily | None:
    """The host family of the catalogue that has the device, if any."""
    return next((family for family in host_families() if family.device == device), None)


def offload_tiers(device: str) -> tuple[Tier, ...]:
    """Offload tiers that the catalogue gives the device in its usual hosts."""
    if device == OTHER:
        return (Tier(name="host", capacity_bytes=64 * 2**30, read=2e10, write=2e10),)
    family = family_of(device)
    of_host = family.tiers if family else ()
    own = load_machine(device).device.tiers[1:]
    names = {tier.name for tier in of_host}
    return (*of_host, *(tier for tier in own if tier.name not in names))


def _question(key: str, default: str | None, origin: str | None) -> Question:
    return Question(key, _KEYS[key].text, default, origin or "")
