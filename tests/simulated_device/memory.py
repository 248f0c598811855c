"""The memory of the simulated device, and pinned memory of the host, with who used it when."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from simulated_device.streams import Clock, SimulatedStream

if TYPE_CHECKING:
    from simulated_device.graphs import Pool
    from simulated_device.simulation import Simulation

_NOTHING = 0xFF
"""Bytes of memory that holds nothing yet: NaN as float32 and as bfloat16."""
_NO_INDEX = 0
"""The same for integers, because kernels of a CPU may write anywhere for an index of -1."""


class Access(NamedTuple):
    """Bytes that an operation reads or writes."""

    allocation: "Allocation"
    begin: int
    end: int
    writes: bool


class _Use(NamedTuple):
    """An access that a stream has made."""

    begin: int
    end: int
    writes: bool
    stream: SimulatedStream
    tick: int
    name: str


@dataclass(eq=False)
class Allocation:
    """One piece of memory. When its last tensor goes, it is given back."""

    home: SimulatedStream
    """The stream that allocated it, in which it is used again once it is freed."""
    content: Tensor
    """Its bytes, `UInt8[n]`, on the CPU."""
    simulation: "Simulation | None"
    """What hears that it is freed; None for pinned memory of the host."""
    pool: "Pool | None" = None
    """The pool of the recording that allocated it; None for memory of the device at large."""
    nothing: int = _NOTHING
    """The byte that it is full of where nothing was written."""
    _uses: list[_Use] = field(default_factory=list)

    def __del__(self) -> None:
        if self.simulation is not None:
            # A copy without owner: this one must not be kept alive by what it leaves behind.
            left = Allocation(self.home, self.content, None, self.pool, self.nothing, self._uses)
            self.simulation.freed(left)

    def poison(self) -> None:
        """Overwrites it with what is no number."""
        self.content.fill_(self.nothing)

    def note(self, access: Access, stream: SimulatedStream, tick: int, name: str) -> list[str]:
        """Faults of an access, which is kept: uses that no event has ordered before it."""
        faults = self.conflicts(access, stream.clock, stream, name)
        use = _Use(access.begin, access.end, access.writes, stream, tick, name)
        self._uses = [old for old in self._uses if not _replaces(use, old, stream.clock)]
        self._uses.append(use)
        return faults

    def conflicts(
        self, access: Access, clock: Clock, stream: SimulatedStream | None, name: str
    ) -> list[str]:
        """Uses of the same bytes, one of both writing, that a clock does not know."""
        return [
            f"`{name}` in {_named(stream)} {_verb(access.writes)} what `{use.name}` in "
            f"{_named(use.stream)} {_verb(use.writes)}, and no event orders them"
            for use in self._uses
            if use.stream is not stream
            and (access.writes or use.writes)
            and use.begin < access.end
            and access.begin < use.end
            and clock.get(use.stream.index, 0) < use.tick
        ]

    def uses_unknown_to(self, clock: Clock, host: Clock) -> list[str]:
        """Uses of other streams that neither its home nor the host has waited for."""
        return [
            f"memory that `{use.name}` {_verb(use.writes)} in {_named(use.stream)} was freed "
            f"before {_named(self.home)} waited for it"
            for use in self._uses
            if use.stream is not self.home
            and max(clock.get(use.stream.index, 0), host.get(use.stream.index, 0)) < use.tick
        ]


def _replaces(new: _Use, old: _Use, clock: Clock) -> bool:
    """Whether whatever is ordered after a new use is also ordered after an old one."""
    covers = new.begin <= old.begin and old.end <= new.end
    is_ordered = clock.get(old.stream.index, 0) >= old.tick
    return covers and is_ordered and (new.writes or not old.writes)


def _named(stream: SimulatedStream | None) -> str:
    return "the host" if stream is None else f"stream {stream.index}"


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"


def allocate(
    home: SimulatedStream, nbytes: int, dtype: torch.dtype, simulation: "Simulation"
) -> Allocation:
    """New memory that holds nothing, for tensors of a type."""
    nothing = _NOTHING if dtype.is_floating_point or dtype == torch.uint8 else _NO_INDEX
    content = torch.full((max(1, nbytes),), nothing, dtype=torch.uint8)
    recording = simulation.recording()
    pool = None if recording is None else recording.pool
    return Allocation(home, content, simulation, pool, nothing)
