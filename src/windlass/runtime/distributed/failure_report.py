"""Blame: which device of a run failed or hangs, at what, and what it said last."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass import errors
from windlass.errors import DeviceError, DeviceLost, MemoryShort, RunBroken, WindlassError
from windlass.program.device_mesh import Place
from windlass.program.instruction import WAITING, Kind, Program
from windlass.runtime.distributed.heartbeat import NO_BEAT, Beat
from windlass.runtime.distributed.rank_ipc import error_file, reported

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
        beats: of the devices that it can see, by their numbers.
        processes: of those devices.
    """

    def __init__(
        self,
        folder: Path,
        programs: Sequence[Program],
        places: Sequence[Place],
        beats: Mapping[int, Beat],
        processes: Mapping[int, subprocess.Popen[bytes]],
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
        reports = {at: found for at in self._processes if (found := reported(self._folder, at))}
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
        stopped = self.stopped()
        at = slowest({at: beat.at() for at, beat in self._beats.items()}, stopped, self._programs)
        told = f"{self.name(at)} {silence_words(seconds, stopped=at in stopped)}"
        told += "" if at in stopped else self.stack(at)
        return DeviceLost(told, device=at, for_good=False)

    def stack(self, device: int) -> str:
        """What a device that runs says it is at, in all of its threads."""
        self._processes[device].send_signal(signal.SIGUSR1)
        time.sleep(_TELL_SECONDS)
        return self._last_words(device)

    def stopped(self) -> list[int]:
        """The devices that a signal or a debugger has stopped."""
        return [at for at, p in self._processes.items() if _state(p.pid) in _STOPPED]

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

    def _last_words(self, device: int) -> str:
        with contextlib.suppress(OSError):
            words = error_file(self._folder, device).read_text(errors="replace").strip()
            return f"; it said:\n{words[-_LONGEST_WORDS:]}" if words else ""
        return ""


def slowest(
    beats: Mapping[int, tuple[int, int]], stopped: Collection[int], programs: Sequence[Program]
) -> int:
    """The device that silent ones wait for: a stopped one, one that waits for nobody, the last.

    Args:
        beats: step and index of the instruction of each device.
        stopped: those that a signal or a debugger has stopped.
        programs: of all devices.
    """
    busy = [at for at, (_, index) in beats.items() if _kind(programs[at], index) not in WAITING]
    return min(stopped or busy or beats, key=lambda device: beats[device])


def silence_words(seconds: float, *, stopped: bool) -> str:
    """What is said of the device that the others wait for."""
    how = "is stopped (by a signal; SIGCONT goes on)" if stopped else "does not go on"
    return f"{how}: no device has got any further for {seconds:.0f} s"


def _kind(program: Program, index: int) -> Kind | None:
    return program.instructions[index].kind if 0 <= index < len(program.instructions) else None


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
