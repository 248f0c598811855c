"""Simulation: the streams of one device, what they have to do, and what was done wrong."""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import windlass
from simulated_device.graphs import NOT_PERMITTED, Pool, SimulatedGraph
from simulated_device.memory import Access, Allocation
from simulated_device.schedules import Schedule
from simulated_device.streams import Clock, SimulatedStream, Token, merge

_SOURCES = str(Path(windlass.__file__).parent)
_FRAMES = 3
"""Callers that tell one wait from another."""
_LIMIT = 20
"""Faults that are kept."""

Site = tuple[str, ...]
"""What waits, and the lines of the library from which it was called."""


class Simulation:
    """Puts work off, and runs it under one schedule.

    Args:
        schedule: which stream may run when events leave it open.
        seed: seed of a random schedule.
        drop: sites that do nothing: the mutation under test.
    """

    def __init__(self, schedule: Schedule, seed: int, drop: frozenset[Site]) -> None:
        self._turn = schedule.turn(random.Random(seed))
        self._drop = drop
        self.lock = threading.RLock()
        self.streams = [SimulatedStream(self, 0)]
        self._current = threading.local()
        self._host: Clock = {}
        """What the host has waited for."""
        self._running_thread: int | None = None
        """The thread that does put-off work now, under the lock."""
        self._recording: SimulatedGraph | None = None
        self._recorded_stream: SimulatedStream | None = None
        self.replays = 0
        """How often recorded work was submitted."""
        self.sites: Counter[Site] = Counter()
        """How often each site has waited."""
        self.faults: list[str] = []
        """What was done wrong, in words."""
        self.operations = 0
        """How many operations were put off."""

    # Streams and events.

    def new_stream(self) -> SimulatedStream:
        """A new stream."""
        with self.lock:
            self.streams.append(SimulatedStream(self, len(self.streams)))
            return self.streams[-1]

    def current_stream(self) -> SimulatedStream:
        """The stream to which this thread submits work."""
        return getattr(self._current, "stream", self.streams[0])

    @contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Submits the work of this thread to a stream."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    # Recorded work.

    def record_work(
        self, work: Callable[[], None], beside: SimulatedGraph | None
    ) -> SimulatedGraph:
        """Records what a call submits to a stream of its own, and runs none of it."""
        self.synchronize_all()
        graph = SimulatedGraph(self, Pool() if beside is None else beside.pool)
        stream = self.new_stream()
        with self.use_stream(stream):
            self._recording, self._recorded_stream = graph, stream
            try:
                work()
            finally:
                self._recording = self._recorded_stream = None
        return graph

    def recording(self) -> SimulatedGraph | None:
        """What records the work of this thread; None if it runs."""
        is_recorded = self.current_stream() is self._recorded_stream
        return self._recording if is_recorded and not self.is_running() else None

    def require_no_recording(self) -> None:
        """Refuses what a recording cannot hold."""
        if self.recording() is not None:
            raise RuntimeError(NOT_PERMITTED)

    def record(self, stream: SimulatedStream | None) -> Token:
        """A token after all that was submitted to a stream so far."""
        with self.lock:
            stream = stream or self.current_stream()
            self.require_no_recording()
            merge(stream.clock, self._host)
            token = Token(stream)
            stream.queue.append(token)
            self._take_turn()
            return token

    def wait(self, token: Token, stream: SimulatedStream | None) -> None:
        """Makes later work of a stream wait for a token."""
        with self.lock:
            stream = stream or self.current_stream()
            self.require_no_recording()
            if token.stream is not stream and not self._is_dropped("wait"):
                self.order(token, stream)
                self._take_turn()

    def order(self, token: Token, stream: SimulatedStream) -> None:
        """Makes later work of a stream wait for a token of another one."""
        merge(stream.clock, token.clock)
        stream.queue.append(token)

    def synchronize(self, token: Token) -> None:
        """Blocks the host until a token is done."""
        with self.lock:
            self.require_no_recording()
            if self._is_dropped("synchronize"):
                return
            self.until(token)
            merge(self._host, token.clock)

    def query(self, token: Token) -> bool:
        """Whether a token is done; if so the host knows it from now on."""
        with self.lock:
            if token.is_done:
                merge(self._host, token.clock)
            return token.is_done

    def synchronize_all(self) -> None:
        """Blocks the host until all work is done."""
        with self.lock:
            self.require_no_recording()
            for stream in self.streams:
                self.drain(stream)
                merge(self._host, stream.clock)

    # Work.

    def submit(self, run: Callable[[], None], accesses: list[Access], name: str) -> None:
        """Puts an operation off into the current stream.

        Args:
            run: does it.
            accesses: the memory that it reads and writes.
            name: the operation, for a message.
        """
        recording = self.recording()
        if recording is not None:
            recording.add(run, accesses)
            return
        stream = self.current_stream()
        merge(stream.clock, self._host)
        tick = stream.tick()
        for access in accesses:
            for fault in access.allocation.note(access, stream, tick, name):
                self.report(fault)
        stream.queue.append(run)
        self.operations += 1
        self._take_turn()

    def host_access(self, accesses: list[Access], name: str) -> None:
        """Checks what the host itself reads or writes of pinned memory."""
        for access in accesses:
            for fault in access.allocation.conflicts(access, self._host, None, name):
                self.report(fault)

    def finish_current(self) -> None:
        """Blocks the host until the current stream is done, as torch does for a number."""
        self.require_no_recording()
        stream = self.current_stream()
        self.drain(stream)
        merge(self._host, stream.clock)

    def freed(self, allocation: Allocation) -> None:
        """Gives memory back; its next owner, in the stream that allocated it, overwrites it."""
        with self.lock:
            if allocation.pool is not None:
                self._freed_in_pool(allocation, allocation.pool)
                return
            home = allocation.home
            for fault in allocation.uses_unknown_to(home.clock, self._host):
                self.report(fault)
            home.queue.append(allocation.poison)

    def _freed_in_pool(self, allocation: Allocation, pool: Pool) -> None:
        """Memory of a recording, which only that one uses again, or a later one with its pool."""
        if self._recording is not None and self._recording.pool is pool:
            self._recording.add_reuse(allocation)
        else:
            pool.freed.append(allocation)

    def report(self, fault: str) -> None:
        """Keeps a fault, and the line of the library that caused it."""
        if len(self.faults) < _LIMIT:
            self.faults.append(f"{fault}; asked for at {' < '.join(callers())}")

    # Running.

    def drain(self, stream: SimulatedStream) -> None:
        """Runs all work of a stream, and what it waits for."""
        while stream.queue:
            self.run_next(stream)

    def run_next(self, stream: SimulatedStream) -> None:
        """Runs the next entry of a stream, and what it waits for."""
        entry = stream.queue[0]
        if isinstance(entry, Token):
            if entry.stream is not stream:
                self.until(entry)
            stream.queue.popleft()
            if entry.stream is stream:
                entry.is_done = True
            return
        stream.queue.popleft()
        before, self._running_thread = self._running_thread, threading.get_ident()
        try:
            with torch.no_grad():
                entry()
        finally:
            self._running_thread = before

    def is_running(self) -> bool:
        """Whether this thread does put-off work now."""
        return self._running_thread == threading.get_ident()

    def until(self, token: Token) -> None:
        """Runs all that a token waits for."""
        while not token.is_done:
            self.run_next(token.stream)

    def _take_turn(self) -> None:
        if not self.is_running():
            self._turn(self)

    def _token_of(self, stream: SimulatedStream) -> Token:
        token = Token(stream)
        stream.queue.append(token)
        return token

    def _is_dropped(self, what: str) -> bool:
        site: Site = (what, *callers())
        self.sites[site] += 1
        return site in self._drop


def callers() -> list[str]:
    """The innermost calls of the library that led here, the last one first: function and line."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        file = frame.f_code.co_filename
        if file.startswith(_SOURCES):
            code = frame.f_code
            found.append(f"{code.co_qualname}+{frame.f_lineno - code.co_firstlineno}")
        frame = frame.f_back
    return found
