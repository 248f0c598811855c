"""The far lane: moves between tiers, done one after the other beside the computing.

What the program begins here ends in the order it began. A reader, a writer and the lane itself are
threads that compute next to nothing, and that on one core each, for the computing needs them all.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Memory = TypeVar("Memory")


@dataclass(slots=True)
class Moved:
    """What a lane has done."""

    seconds: float = 0.0
    """Busy."""
    read_bytes: int = 0
    written_bytes: int = 0


class Lane:
    """Runs moves in order; `close` it at the end."""

    def __init__(self) -> None:
        # Threads begun later take this setting over, so it has to be known before it changes.
        torch.get_num_threads()
        self._mover = ThreadPoolExecutor(1, "windlass-far", initializer=_one_core)
        self._reader = ThreadPoolExecutor(1, "windlass-read", initializer=_one_core)
        self._writer = ThreadPoolExecutor(1, "windlass-write", initializer=_one_core)
        self._moved = Moved()
        self._told = Moved()

    def begin(self, move: Callable[[Moved], None]) -> Future[None]:
        """Begins a move when all before it have ended.

        Args:
            move: adds the bytes it reads and writes.
        """
        return self._mover.submit(self._timed, move)

    def pass_through(
        self,
        pieces: Sequence[Piece],
        sets: Sequence[Memory],
        read: Callable[[Memory, Piece], None],
        work: Callable[[Memory, Piece], None],
        write: Callable[[Memory, Piece], None],
    ) -> None:
        """Reads, works on and writes pieces, three at once, inside a move.

        Args:
            pieces: in order.
            sets: memory for one piece each, used in turn; at least three.
            read: fills a set.
            work: changes it.
            write: takes it away.
        """
        written: list[Future[None] | None] = [None] * len(sets)

        def begin(index: int) -> Future[None]:
            before = written[index % len(sets)]

            def fill() -> None:
                if before is not None:
                    before.result()
                read(sets[index % len(sets)], pieces[index])

            return self._reader.submit(fill)

        ahead = deque(begin(index) for index in range(min(len(sets) - 1, len(pieces))))
        try:
            for index, piece in enumerate(pieces):
                ahead.popleft().result()
                memory = sets[index % len(sets)]
                work(memory, piece)
                written[index % len(sets)] = self._writer.submit(write, memory, piece)
                following = index + len(sets) - 1
                if following < len(pieces):
                    ahead.append(begin(following))
        finally:
            wait([future for future in (*ahead, *written) if future is not None])
        for future in written:
            if future is not None:
                future.result()

    def moved(self) -> Moved:
        """What was done since this was asked last; of a move under way, what it has done so far."""
        now, told = replace(self._moved), self._told
        self._told = now
        return Moved(
            seconds=now.seconds - told.seconds,
            read_bytes=now.read_bytes - told.read_bytes,
            written_bytes=now.written_bytes - told.written_bytes,
        )

    def wait(self) -> None:
        """Returns when nothing is under way."""
        self.begin(lambda _: None).result()

    def close(self) -> None:
        """Ends the threads; what has not begun is dropped."""
        for pool in (self._mover, self._reader, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, move: Callable[[Moved], None]) -> None:
        start = time.perf_counter()
        move(self._moved)
        self._moved.seconds += time.perf_counter() - start


def _one_core() -> None:
    torch.set_num_threads(1)
