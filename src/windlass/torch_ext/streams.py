"""Streams, events, recorded work: what `Device` asks of them, and a CPU's, where nothing waits."""

import time
from typing import Protocol, cast


class Stream(Protocol):
    """A queue of work on a device, which runs in order."""

    def wait_stream(self, stream: "Stream", /) -> None:
        """Makes later work wait for all that was submitted to another stream so far."""

    def synchronize(self) -> None:
        """Blocks the host until all submitted work is done."""


class Event(Protocol):
    """A point in a stream's work. `record` may be called again; `wait` takes the last one."""

    def record(self, stream: Stream | None = None, /) -> None:
        """Marks the work submitted to a stream so far; None: the current stream."""

    def wait(self, stream: Stream | None = None, /) -> None:
        """Makes later work of a stream wait for the event; the host does not wait."""

    def synchronize(self) -> None:
        """Blocks the host until the marked work is done."""

    def query(self) -> bool:
        """Whether the marked work is done."""

    def elapsed_time(self, end: "Event", /) -> float:
        """Milliseconds from this event to a later one; both must be made with `timing`."""


class RecordedWork(Protocol):
    """Work of a device that was recorded once, with the memory that it reads and writes."""

    def replay(self) -> None:
        """Submits all of it to the current stream, in one call; the host does not wait."""


class HostStream:
    """The stream of a CPU, where all work is done when a call returns."""

    def wait_stream(self, stream: Stream, /) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


class HostEvent:
    """An event on a CPU, where all work before it is done."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        """When it was last recorded."""

    def record(self, _: Stream | None = None, /) -> None:
        """Keeps the time."""
        self.nanoseconds = time.perf_counter_ns()

    def wait(self, _: Stream | None = None, /) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """True."""
        return True

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds from this event to a later one."""
        return (cast("HostEvent", end).nanoseconds - self.nanoseconds) * 1e-6
