"""A machine of the user's own, built from the answers to a few questions.

An answer that ends in `?` is a guess, and so is a question left unanswered: its number is marked as
one in the machine's sources, with where the default comes from.
"""

import re
from collections.abc import Iterator, Mapping
from math import ceil

from windlass.errors import InputErrors
from windlass.hardware.catalog import load_machine
from windlass.hardware.machine_check import machine_faults
from windlass.hardware.machine_questions import (
    OTHER,
    all_faults,
    answered,
    family_of,
    next_question,
    offload_tiers,
    questions,
)
from windlass.schema import Curve, Device, Link, Machine, MatmulRate, Point, Source, Tier

_PRODUCTS, _TRAFFIC, _ATTENTION = 0.7, 0.85, 0.45
"""Shares of the peak, or of the memory's rate, that devices of the catalogue mostly reach."""
_HALF_FLOP, _HALF_SECONDS = 3e9, 5e-7
"""FLOP of a product, and seconds of memory traffic, that reach half of these rates."""
_POINT = re.compile(r"\[\s+([0-9.e+-]+),\s+([0-9.e+-]+),\s+\]")
_CURVE = re.compile(r"points = \[\s+([^=]+?,)\s+\](?=\n)")
_SOURCE = re.compile(r"\[sources\.(\S+)\]\nhow = (.+)\nsource = (.+)\n")


def new_machine(name: str, answers: Mapping[str, str], date: str) -> Machine:
    """The machine that some answers describe; what they leave open has its default.

    Args:
        answers: answers by key; one that ends in `?` is marked as a guess.

    Raises:
        InputErrors: everything that is wrong with the name and the answers.
    """
    faults = list(all_faults(name, answers))
    if faults:
        raise InputErrors(faults)
    filled, sources = dict(answers), {}
    while (question := next_question(filled)) is not None:
        filled[question.key] = question.default or ""
        sources[question.key] = Source(how="guess", source=f"not stated: {question.origin}")
    asked = {"device", "memory", *(question.key for question in questions(filled))}
    if idle := [key for key in answers if key not in asked]:
        raise InputErrors(
            [f"`{key}` says nothing of {_size_text(filled)}; leave it out" for key in idle]
        )
    if "pod" in answers and answered(filled, "pod", 1) >= answered(filled, "hosts", 1):
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
    hosts, devices = (int(answered(answers, key, 1)) for key in ("hosts", "devices"))
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


class _Draft:
    """A machine from complete answers."""

    def __init__(self, answers: Mapping[str, str], sources: Mapping[str, Source]) -> None:
        self._answers, self._sources = answers, sources
        self._device = answers["device"].rstrip("?")
        self._family = family_of(self._device)

    def machine(self, name: str, date: str) -> Machine:
        """The machine of this name."""
        is_other = self._device == OTHER
        base = self._other_device(date) if is_other else load_machine(self._device)
        links = tuple(self._links())
        sources = {
            **base.sources,
            **self._link_sources(links),
            "hosts": self._sources["hosts"],
            "devices_per_host": self._sources["devices"],
        }
        for key, place in (("memory", "device.capacity_bytes"), ("host_memory", "host.*")):
            if key in self._sources:
                sources[f"device.tiers.{place}"] = self._sources[key]
        stragglers = None if self._family is None else self._family.stragglers
        if stragglers is not None and self._family is not None:
            sources["stragglers"] = Source(how="guess", source=f"as `{self._family.name}`")
        tiers = tuple(self._tiers(base.device))
        return base.model_copy(
            update={
                "name": name,
                "hosts": self._count("hosts"),
                "devices_per_host": self._count("devices"),
                "device": base.device.model_copy(update={"tiers": tiers}),
                "links": links,
                "stragglers": stragglers,
                "source": f"`windlass machines new`, {self._device}",
                "date": date,
                "sources": sources,
            }
        )

    def _value(self, key: str) -> float:
        return answered(self._answers, key, 0.0)

    def _count(self, key: str) -> int:
        return int(self._value(key))

    def _tiers(self, device: Device) -> Iterator[Tier]:
        memory = device.tiers[0]
        if "memory" in self._answers:
            memory = memory.model_copy(update={"capacity_bytes": self._count("memory")})
        yield memory
        for tier in offload_tiers(self._device):
            share = self._count("host_memory") // self._count("devices")
            is_host = tier.name == "host"
            yield tier.model_copy(update={"capacity_bytes": share}) if is_host else tier

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

    def _other_device(self, date: str) -> Machine:
        peak, memory_rate = self._value("peak"), self._value("memory_rate")
        half = _HALF_SECONDS * memory_rate

        def saturating(rate: float, middle: float, sizes: tuple[float, ...]) -> Curve:
            return Curve(
                points=tuple(Point(at, float(f"{rate * at / (at + middle):.4g}")) for at in sizes)
            )

        device = Device(
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
        reach = "of the data sheet's, as devices of the catalogue mostly reach"
        guesses = {
            "device.*": "as CUDA devices of the catalogue",
            "device.matmul.*.curve": f"{100 * _PRODUCTS:.0f} % {reach}",
            "device.matmul.*.attention": f"{100 * _ATTENTION:.0f} % {reach}",
            "device.traffic": f"{100 * _TRAFFIC:.0f} % {reach}",
        }
        sources = {place: Source(how="guess", source=text) for place, text in guesses.items()}
        sources["device.matmul.bfloat16.peak"] = self._sources["peak"]
        return Machine(name=OTHER, device=device, source=OTHER, date=date, sources=sources)
