"""The schedules: which stream may run when, if events leave it open."""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from simulated_device.streams import SimulatedStream

if TYPE_CHECKING:
    from simulated_device.simulation import Simulation

Turn = Callable[["Simulation"], None]
"""Runs what it likes, each time that something was submitted; the rest runs when it must."""


class Schedule(NamedTuple):
    """One way to run all streams."""

    name: str
    turn: Callable[[random.Random], Turn]
    """Makes the turn from a generator."""


def _at_once(_: random.Random) -> Turn:
    """All streams run in the order in which they were asked to: what a correct program means."""

    def turn(simulation: "Simulation") -> None:
        for stream in simulation.streams:
            simulation.drain(stream)

    return turn


def _late(_: random.Random) -> Turn:
    """Nothing runs before the host waits for it, and then only what it needs."""
    return lambda _: None


def _sides_late(_: random.Random) -> Turn:
    """The default stream runs at once, all others when they must."""
    return lambda simulation: simulation.drain(simulation.streams[0])


def _sides_early(_: random.Random) -> Turn:
    """All but the default stream run as soon as their events allow; that one when it must."""

    def turn(simulation: "Simulation") -> None:
        sides = simulation.streams[1:]
        while sum(_advance(simulation, stream, 100) for stream in sides):
            pass

    return turn


def _in_turn(_: random.Random) -> Turn:
    """One operation of each stream, the newest stream first."""

    def turn(simulation: "Simulation") -> None:
        for stream in reversed(simulation.streams):
            _advance(simulation, stream, 1)

    return turn


def _random(chance: random.Random) -> Turn:
    """Now and then a few operations of any stream."""

    def turn(simulation: "Simulation") -> None:
        if chance.random() < _SHARE_OF_TURNS:
            _advance(simulation, chance.choice(_busy(simulation)), chance.randrange(1, 12))

    return turn


_SHARE_OF_TURNS = 0.3

AT_ONCE = Schedule("at once", _at_once)
SCHEDULES = (
    Schedule("late", _late),
    Schedule("sides late", _sides_late),
    Schedule("sides early", _sides_early),
    Schedule("in turn", _in_turn),
    Schedule("random", _random),
)


def _busy(simulation: "Simulation") -> Sequence[SimulatedStream]:
    return [stream for stream in simulation.streams if stream.queue] or simulation.streams[:1]


def _advance(simulation: "Simulation", stream: SimulatedStream, most: int) -> bool:
    """Runs some operations of a stream, until it waits for another; whether there were any."""
    done = 0
    while done < most and not stream.is_blocked:
        simulation.run_next(stream)
        done += 1
    return done > 0
