"""Streams, events and the clocks that say what was ordered before what."""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulated_device.simulation import Simulation

Clock = dict[int, int]
"""For each stream, by its index, how many of its operations are known to come before."""


def merge(clock: Clock, other: Clock) -> None:
    """Adds to a clock all that another one knows."""
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Token:
    """A point in a stream's work, which one recording of an event marks."""

    def __init__(self, stream: "SimulatedStream") -> None:
        self.stream = stream
        self.clock = dict(stream.clock)
        self.is_done = False
        self.seconds = time.perf_counter()


Entry = Token | Callable[[], None]
"""A token that a stream marks as done if it is its own, else waits for; or work to run."""


class SimulatedStream:
    """Work that runs in order, but late.

    Args:
        simulation: what runs it.
        index: number of streams before it; 0 is the default stream.
    """

    def __init__(self, simulation: "Simulation", index: int) -> None:
        self._simulation = simulation
        self.index = index
        self.queue: deque[Entry] = deque()
        self.clock: Clock = {index: 0}

    def tick(self) -> int:
        """Counts one more operation, and returns its number."""
        self.clock[self.index] += 1
        return self.clock[self.index]

    @property
    def is_blocked(self) -> bool:
        """Whether its next entry waits for another stream's work, or there is none."""
        if not self.queue:
            return True
        entry = self.queue[0]
        return isinstance(entry, Token) and entry.stream is not self and not entry.is_done

    def wait_stream(self, stream: "SimulatedStream", /) -> None:
        """Makes later work wait for all that was submitted to another stream so far."""
        event = SimulatedEvent(self._simulation)
        event.record(stream)
        event.wait(self)

    def synchronize(self) -> None:
        """Blocks the host until all submitted work is done."""
        event = SimulatedEvent(self._simulation)
        event.record(self)
        event.synchronize()


class SimulatedEvent:
    """A point in a stream's work.

    Args:
        simulation: what runs the streams.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._token: Token | None = None

    def record(self, stream: SimulatedStream | None = None, /) -> None:
        """Marks the work submitted to a stream so far."""
        self._token = self._simulation.record(stream)

    def wait(self, stream: SimulatedStream | None = None, /) -> None:
        """Makes later work of a stream wait; does nothing if it was never recorded."""
        if self._token is not None:
            self._simulation.wait(self._token, stream)

    def synchronize(self) -> None:
        """Blocks the host until the marked work is done."""
        if self._token is not None:
            self._simulation.synchronize(self._token)

    def query(self) -> bool:
        """Whether the marked work is done."""
        return self._token is None or self._simulation.query(self._token)

    def elapsed_time(self, end: "SimulatedEvent", /) -> float:
        """Milliseconds of the host between two recordings: there is no other clock."""
        if self._token is None or end._token is None:
            raise RuntimeError("an event was never recorded")
        return (end._token.seconds - self._token.seconds) * 1e3
