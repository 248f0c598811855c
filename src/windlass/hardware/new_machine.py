"""A machine of the user's own, from the answers to a few questions.

An answer that ends in `?` is a guess, and so is a question left unanswered: its number is marked as
one in the machine's sources, with where the default comes from.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from windlass.errors import InputErrors, RequestError, did_you_mean, shorten
from windlass.hardware.catalog import device_names, host_families, load_machine
from windlass.hardware.host_family import HostFamily
from windlass.hardware.machine_check import machine_faults
from windlass.schema import Curve, Device, Link, Machine, MatmulRate, Point, Source, Tier
from windlass.units import format_bytes, format_rate, parse_bytes, parse_flop_rate, parse_rate

OTHER = "other"
"""Answer to `device` for a device that is not in the catalogue."""

_PRODUCTS, _TRAFFIC, _ATTENTION = 0.7, 0.85, 0.45
"""Shares of the peak, or of the memory's rate, that devices of the catalogue mostly reach."""
_HALF_FLOP, _HALF_SECONDS = 3e9, 5e-7
_BITS = re.compile(r"\s*([0-9.]+)\s*([KMGT])b(?:it)?/s\s*$")
_NETWORK_SHARE = 0.92
"""Share of a network card's nominal rate that NCCL reaches."""
_POINT = re.compile(r"\[\s+([0-9.e+-]+),\s+([0-9.e+-]+),\s+\]")
_CURVE = re.compile(r"points = \[\s+([^=]+?,)\s+\](?=\n)")
_SOURCE = re.compile(r"\[sources\.(\S+)\]\nhow = (.+)\nsource = (.+)\n")
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
    return next((each for each in _questions(answers) if each.key not in answers), None)


def new_machine(name: str, answers: Mapping[str, str], date: str) -> Machine:
    """The machine that some answers describe; what they leave open has its default.

    Args:
        name: name of the machine.
        answers: answers by key; one that ends in `?` is marked as a guess.
        date: ISO date of today.

    Raises:
        InputErrors: everything that is wrong with the name and the answers.
    """
    faults = list(_all_faults(name, answers))
    if faults:
        raise InputErrors(faults)
    filled, sources = dict(answers), {}
    while (question := next_question(filled)) is not None:
        filled[question.key] = question.default or ""
        sources[question.key] = Source(how="guess", source=f"not stated: {question.origin}")
    asked = {"device", "memory", *(question.key for question in _questions(filled))}
    if idle := [key for key in answers if key not in asked]:
        raise InputErrors(
            [f"`{key}` says nothing of {_size_text(filled)}; leave it out" for key in idle]
        )
    if "pod" in answers and _answered(filled, "pod", 1) >= _answered(filled, "hosts", 1):
        held = f"`pod` = {answers['pod']} holds all {filled['hosts']} hosts"
        raise InputErrors([f"{held}; lower it, or leave out `oversubscription`"])
    for key, answer in answers.items():
        guessed = answer.endswith("?")
        who = f"who wrote this file on {date}"
        sources[key] = Source(how="guess" if guessed else "published", source=who)
    machine = _Draft(filled, sources).machine(name, date)
    if faults := list(machine_faults(machine)):
        raise InputErrors(faults)
    return machine


def _size_text(answers: Mapping[str, str]) -> str:
    """`1 host of 8 devices`, for a message."""
    hosts, devices = (int(_answered(answers, key, 1)) for key in ("hosts", "devices"))
    plural = ("" if hosts == 1 else "s", "" if devices == 1 else "s")
    return f"{hosts} host{plural[0]} of {devices} device{plural[1]} each"


def machine_text(machine: Machine) -> str:
    """The text of a machine's file, with each curve in one line and a head that says what it is."""
    text = machine.to_toml(defaults=False)
    text = _POINT.sub(r"[\1, \2]", text)
    text = _SOURCE.sub(r"\1 = { how = \2, source = \3 }\n", text.rstrip() + "\n")
    text = re.sub(r"\n\n+(?=\S+ = \{ how)", "\n", text)
    text = re.sub(r"\n(?=\S+ = \{ how)", "\n\n[sources]\n", text, count=1)
    text = _CURVE.sub(lambda found: f"points = [{' '.join(found.group(1).split())[:-1]}]", text)
    return (
        f"# {machine.name}: {machine.source}. Correct any number here; `how` in [sources] says\n"
        f"# which are guesses. `windlass plan MODEL --on {machine.name}.toml` plans for it.\n{text}"
    )


def answer_faults(key: str, answer: str, device: str) -> Iterator[str]:
    """What is wrong with one answer.

    Args:
        key: the key of the question.
        answer: its answer.
        device: the answer to `device`.
    """
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


def _all_faults(name: str, answers: Mapping[str, str]) -> Iterator[str]:
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


def _questions(answers: Mapping[str, str]) -> Iterator[Question]:
    """All questions that the answers call for, in order, with defaults."""
    device = answers["device"].rstrip("?")
    family = _family(device)
    usual = None if family is None else f"as `{family.name}`"
    if device == OTHER:
        for key in ("peak", "memory", "memory_rate"):
            yield _question(key, None, "")
    per_host = 1 if family is None else family.devices_per_host
    yield _question("devices", str(per_host), usual or "one device")
    yield _question("hosts", "1", "one host")
    if _answered(answers, "devices", per_host) > 1:
        link = None if family is None else family.links[0]
        rate = "20 GB/s" if link is None else format_rate(link.rate)
        yield _question("link", rate, usual or "what rings reach over PCIe Gen4")
    if _answered(answers, "hosts", 1) > 1:
        network = None if family is None or len(family.links) < 2 else family.links[-1]
        rate = "11.5 GB/s" if network is None else format_rate(network.rate)
        yield _question("network", rate, usual if network else "one card of 100 Gb/s")
        shared = per_host if network is None else network.shared_by or per_host
        yield _question("cards", str(max(1, per_host // shared)), usual or "one card a host")
        yield _question("oversubscription", "1", "a network without a bottleneck")
        if _answered(answers, "oversubscription", 1) > 1:
            half = int(_answered(answers, "hosts", 1)) // 2
            yield _question("pod", str(min(32, half)), "32 hosts, or half of all")
    host = next((tier for tier in _tiers(device, family) if tier.name == "host"), None)
    memory = 64 * 2**30 if host is None else host.capacity_bytes
    total = memory * int(_answered(answers, "devices", per_host))
    yield _question("host_memory", format_bytes(total), usual or "64 GiB for each device")


def _question(key: str, default: str | None, origin: str | None) -> Question:
    return Question(key, _KEYS[key].text, default, origin or "")


def _answered(answers: Mapping[str, str], key: str, default: float) -> float:
    return _KEYS[key].parse(answers[key].rstrip("?").strip()) if key in answers else default


def _family(device: str) -> HostFamily | None:
    """The host family of the catalogue that has the device, if any."""
    return next((family for family in host_families() if family.device == device), None)


def _tiers(device: str, family: HostFamily | None) -> tuple[Tier, ...]:
    own = () if device == OTHER else load_machine(device).device.tiers
    return (*(family.tiers if family else ()), *own)


class _Draft:
    """A machine from complete answers."""

    def __init__(self, answers: Mapping[str, str], sources: Mapping[str, Source]) -> None:
        self._answers, self._sources = answers, sources
        self._device = answers["device"].rstrip("?")
        self._family = _family(self._device)

    def machine(self, name: str, date: str) -> Machine:
        """The machine of this name."""
        if self._device == OTHER:
            base, known = self._other_device(), {}
        else:
            catalogued = load_machine(self._device)
            base, known = catalogued.device, dict(catalogued.sources)
        links = tuple(self._links())
        sources = {
            **known,
            **self._link_sources(links),
            "hosts": self._sources["hosts"],
            "devices_per_host": self._sources["devices"],
            "device.tiers.host.*": self._sources["host_memory"],
        }
        if self._device == OTHER:
            sources |= self._device_sources()
        if "memory" in self._sources:
            sources["device.tiers.device.capacity_bytes"] = self._sources["memory"]
        stragglers = None if self._family is None else self._family.stragglers
        if stragglers is not None and self._family is not None:
            sources["stragglers"] = Source(how="guess", source=f"as `{self._family.name}`")
        return Machine(
            name=name,
            hosts=self._count("hosts"),
            devices_per_host=self._count("devices"),
            device=base.model_copy(update={"tiers": self._memory_tiers(base)}),
            links=links,
            stragglers=stragglers,
            source=f"`windlass machines new`, {self._device}",
            date=date,
            sources=sources,
        )

    def _value(self, key: str) -> float:
        return _answered(self._answers, key, 0.0)

    def _count(self, key: str) -> int:
        return int(self._value(key))

    def _memory_tiers(self, device: Device) -> tuple[Tier, ...]:
        first = device.tiers[0]
        if "memory" in self._answers:
            first = first.model_copy(update={"capacity_bytes": self._count("memory")})
        known = next(
            (tier for tier in _tiers(self._device, self._family) if tier.name == "host"),
            Tier(name="host", capacity_bytes=0, read=2e10, write=2e10),
        )
        share = self._count("host_memory") // self._count("devices")
        return (first, known.model_copy(update={"capacity_bytes": share}))

    def _links(self) -> Iterator[Link]:
        per_host, hosts = self._count("devices"), self._count("hosts")
        usual = self._family.links if self._family else ()
        if per_host > 1:
            inner = usual[0] if usual else Link(name="host", joins=0, latency=1e-5, rate=0)
            joins = min(per_host * hosts, max(per_host, self._rack_devices()))
            update = {"joins": joins, "rate": self._value("link"), "shared_by": 1}
            yield inner.model_copy(update=update)
        if hosts == 1 or self._rack_devices() >= per_host * hosts:
            return
        cards = min(self._count("cards"), per_host)
        rate = self._value("network") * max(1.0, self._count("cards") / per_host)
        latency = usual[-1].latency if len(usual) > 1 else 2e-5
        shared = ceil(per_host / cards)
        pod = per_host * self._count("pod") if "pod" in self._answers else per_host * hosts
        joins = min(pod, per_host * hosts)
        if joins > per_host:
            yield Link(name="network", joins=joins, latency=latency, rate=rate, shared_by=shared)
        if joins < per_host * hosts:
            slower = rate / self._value("oversubscription")
            yield Link(
                name="spine", joins=per_host * hosts, latency=latency, rate=slower, shared_by=shared
            )

    def _rack_devices(self) -> int:
        """Devices that the family's inner link joins if it reaches beyond a host, else 0."""
        family = self._family
        if family is None or not 1 < family.devices_per_host < family.links[0].joins:
            return 0
        return family.links[0].joins

    def _link_sources(self, links: tuple[Link, ...]) -> dict[str, Source]:
        keys = {"network": "network", "spine": "oversubscription"}
        sources: dict[str, Source] = {}
        for link in links:
            stated = self._sources[keys.get(link.name, "link")]
            sources[f"links.{link.name}.*"] = stated
            sources[f"links.{link.name}.latency"] = Source(
                how="guess", source="as in the catalogue"
            )
            if link.name in keys:
                sources[f"links.{link.name}.shared_by"] = self._sources["cards"]
        return sources

    def _device_sources(self) -> dict[str, Source]:
        reach = "of the data sheet's, as devices of the catalogue mostly reach"
        return {
            "device.*": Source(how="guess", source="as CUDA devices of the catalogue"),
            "device.matmul.*.peak": self._sources["peak"],
            "device.matmul.*.curve": Source(how="guess", source=f"{_PRODUCTS:.0%} {reach}"),
            "device.matmul.*.attention": Source(how="guess", source=f"{_ATTENTION:.0%} {reach}"),
            "device.traffic": Source(how="guess", source=f"{_TRAFFIC:.0%} {reach}"),
        }

    def _other_device(self) -> Device:
        peak, memory_rate = self._value("peak"), self._value("memory_rate")
        half = _HALF_SECONDS * memory_rate

        def saturating(rate: float, middle: float, sizes: tuple[float, ...]) -> Curve:
            return Curve(
                points=tuple(Point(at, float(f"{rate * at / (at + middle):.4g}")) for at in sizes)
            )

        return Device(
            kind="other",
            matmul=tuple(
                MatmulRate(
                    precision=precision,
                    peak=rate,
                    curve=saturating(_PRODUCTS * rate, _HALF_FLOP, (1e6, 1e8, 1e10, 1e12)),
                    attention=saturating(_ATTENTION * rate, _HALF_FLOP, (1e8, 1e10, 1e12)),
                )
                for precision, rate in (("bfloat16", peak), ("float32", peak / 2))
            ),
            traffic=saturating(_TRAFFIC * memory_rate, half, (1e4, 1e6, 1e8, 1e9)),
            launch_seconds=5e-6,
            update_rate=0.8 * memory_rate,
            tiers=(Tier(name="device", capacity_bytes=self._count("memory")),),
        )
