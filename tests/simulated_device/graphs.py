"""Recorded work: operations with the memory of their tensors, which a replay runs again."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_device.memory import Access, Allocation

if TYPE_CHECKING:
    from simulated_device.simulation import Simulation

NOT_PERMITTED = "operation not permitted when stream is capturing"
"""The error of CUDA for what cannot be recorded."""


class Pool:
    """Memory that recordings share: what is free when one begins may be used again in it."""

    def __init__(self) -> None:
        self.freed: list[Allocation] = []
        """Freed since the last recording ended."""


class SimulatedGraph:
    """What one recording holds.

    Args:
        simulation: runs the replays.
        pool: where memory lies that is allocated meanwhile.
    """

    def __init__(self, simulation: "Simulation", pool: Pool) -> None:
        self._simulation, self.pool = simulation, pool
        self._work: list[Callable[[], None]] = [freed.poison for freed in pool.freed]
        pool.freed = []
        self._accesses: dict[tuple[int, bool], tuple[weakref.ref[Allocation], int, int]] = {}
        """Memory that is read or written, without keeping it: what is freed meanwhile is not."""

    def add(self, run: Callable[[], None], accesses: list[Access]) -> None:
        """Records an operation."""
        self._work.append(run)
        for access in accesses:
            key = (id(access.allocation), access.writes)
            _, begin, end = self._accesses.get(key, (None, access.begin, access.end))
            where = weakref.ref(access.allocation)
            self._accesses[key] = (where, min(begin, access.begin), max(end, access.end))

    def add_reuse(self, freed: Allocation) -> None:
        """Records that the next owner of freed memory overwrites it."""
        self._work.append(freed.poison)

    def replay(self) -> None:
        """Submits all of it to the current stream, as one operation."""
        accesses = [
            Access(allocation, begin, end, writes)
            for (_, writes), (where, begin, end) in self._accesses.items()
            if (allocation := where()) is not None
        ]
        with self._simulation.lock:
            self._simulation.replays += 1
            self._simulation.submit(self._run, accesses, "replay")

    def _run(self) -> None:
        for run in self._work:
            run()
