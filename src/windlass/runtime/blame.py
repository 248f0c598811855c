"""Blame: which device of a run failed or hangs, at what, and what it said last."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass import errors
from windlass.errors import DeviceError, DeviceLost, MemoryShort, RunBroken, WindlassError
from windlass.program.instruction import WAITING, Kind, Program
from windlass.program.layout import Place
from windlass.runtime.beat import NO_BEAT, Beat
from windlass.runtime.ranks import error_file, reported

_TELL_SECONDS = 0.2
"""That others have to tell too, once one has ended, and a device to write down its stack."""
_LONGEST_WORDS = 2000
_STOPPED = ("T", "t")
_BY_OTHERS = frozenset(signal.Signals) - {signal.SIGABRT}
"""A process that aborts does so itself, perhaps only because another one is gone."""


class Witness:
    """Knows what each device of a run is at.

    Args:
        folder: of the devices.
        programs: of all devices.
        places: of all devices.
        beats: of all devices.
        processes: of all devices.
    """

    def __init__(
        self,
        folder: Path,
        programs: Sequence[Program],
        places: Sequence[Place],
        beats: Sequence[Beat],
        processes: Sequence[subprocess.Popen[bytes]],
    ) -> None:
        self._folder, self._programs, self._places = folder, programs, places
        self._beats, self._processes = beats, processes

    def failure(self, ended: Mapping[int, int]) -> WindlassError:
        """What the first device to fail has told, or what became of it.

        Args:
            ended: codes of the devices that have ended badly.
        """
        # Whoever failed first tells so at once; others fail only because it is gone.
        time.sleep(_TELL_SECONDS)
        every = range(len(self._processes))
        reports = {at: found for at in every if (found := reported(self._folder, at))}
        silent = {at: code for at, code in ended.items() if at not in reports}
        for at, code in silent.items():
            if -code in _BY_OTHERS:
                return self._killed(at, signal.Signals(-code))
        for at, found in reports.items():
            if not found["follows"]:
                return self._told(at, found)
        for at, code in silent.items():
            told = f"{self.name(at)} ended with code {code}{self._last_words(at)}"
            return DeviceLost(told, device=at, for_good=False)
        return self._told(*next(iter(reports.items())))

    def silence(self, seconds: float) -> DeviceLost:
        """Names the device that the others wait for, with the stack of its threads."""
        every = range(len(self._processes))
        stopped = self.stopped()
        busy = [at for at in every if self._kind(at) not in WAITING]
        at = min(stopped or busy or every, key=lambda device: self._beats[device].at())
        how = "is stopped (by a signal; SIGCONT goes on)" if at in stopped else "does not go on"
        told = f"{self.name(at)} {how}: no device has got any further for {seconds:.0f} s"
        if at in stopped:
            return DeviceLost(told, device=at, for_good=False)
        self._processes[at].send_signal(signal.SIGUSR1)
        time.sleep(_TELL_SECONDS)
        return DeviceLost(told + self._last_words(at), device=at, for_good=False)

    def stopped(self) -> list[int]:
        """The devices that a signal or a debugger has stopped."""
        return [at for at, p in enumerate(self._processes) if _state(p.pid) in _STOPPED]

    def name(self, device: int) -> str:
        """`device 1 (stage 0, slice 0, replica 1) in step 4, at reduce of layer 2`."""
        return device_name(
            device, self._places[device], self._programs[device], self._beats[device].at()
        )

    def _killed(self, device: int, by: signal.Signals) -> DeviceLost:
        hint = ", as the system does where memory ends" if by == signal.SIGKILL else ""
        words = self._last_words(device)
        told = f"{self.name(device)} was killed by {by.name}{hint}{words}"
        return DeviceLost(told, device=device, for_good=True)

    def _told(self, device: int, found: Mapping[str, Any]) -> WindlassError:
        """The error that a device has met, of the kind that it was."""
        kind, message = found["kind"], str(found["message"])
        if kind == "RunInterrupted":
            return errors.RunInterrupted(message)
        told = f"{self.name(device)}: {message}"
        if kind == "MemoryShort":
            return MemoryShort(told, room_bytes=found["room_bytes"])
        if not found["ours"]:
            trace = error_file(self._folder, device)
            return DeviceError(f"{self.name(device)}: {kind}: {message}; its trace is in `{trace}`")
        of = getattr(errors, kind, RunBroken)
        return RunBroken(told) if of is errors.Faults else of(told)

    def _kind(self, device: int) -> Kind | None:
        _, index = self._beats[device].at()
        instructions = self._programs[device].instructions
        return instructions[index].kind if 0 <= index < len(instructions) else None

    def _last_words(self, device: int) -> str:
        with contextlib.suppress(OSError):
            words = error_file(self._folder, device).read_text(errors="replace").strip()
            return f"; it said:\n{words[-_LONGEST_WORDS:]}" if words else ""
        return ""


def device_name(device: int, place: Place, program: Program, at: tuple[int, int]) -> str:
    """A device in words, with its place and what it is at.

    Args:
        device: its number.
        place: in the cut.
        program: of it.
        at: its step and the index of its instruction.
    """
    step, index = at
    instructions = program.instructions
    when = "before its first step" if at == NO_BEAT else f"in step {step}"
    doing = f", at {instructions[index]}" if 0 <= index < len(instructions) else ""
    where = f"stage {place.stage}, slice {place.slice}, replica {place.replica}"
    return f"device {device} ({where}) {when}{doing}"


def _state(pid: int) -> str:
    """One letter of what the system says of a process; `T` is stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
