"""Launch: the devices of a run as processes of this host, watched until they end.

Each is started with the run's folder and the port to meet at. Its standard input is a pipe from
here: it ends when that does, whatever it waits for by then. It tells in a small mapped file at
which instruction it is, and in a file of its own what went wrong. Device 0 tells its steps.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from windlass import errors
from windlass.errors import MemoryShort, RunBroken, WindlassError
from windlass.program.instruction import MEETINGS, Kind, Program
from windlass.program.layout import Place
from windlass.runtime.beat import NO_BEAT, Beat
from windlass.runtime.ranks import RANKS_FOLDER, STOP, TAKEN, beat_file, report_file
from windlass.runtime.world import LOOPBACK

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 3.0
"""That other devices have to end by themselves once one has."""
_FIRST_TIMES = 5
"""So much longer may it take until a first device begins: models are built and code is loaded."""
_LONGEST_WORDS = 2000
_WAITING: tuple[Kind, ...] = ("receive", "borrow", "take over", *MEETINGS)


class Devices:
    """All devices of a run, each a process of this host.

    Args:
        folder: of the run.
        command: starts one of them; the port to meet at and its device are added.
        programs: of all devices, to name instructions by.
        places: of all devices.
        silence: seconds without a sign of life from any device after which one is named.
        threads: that each computes with.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        programs: Sequence[Program],
        places: Sequence[Place],
        *,
        silence: float,
        threads: int,
    ) -> None:
        self._folder = folder / RANKS_FOLDER
        self._programs, self._places, self._silence = programs, places, silence
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink()
        self._store, port = _listening(len(programs))
        self._beats = [Beat(beat_file(self._folder, device)) for device in range(len(programs))]
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._processes = [
            self._start(command, port, device, threads) for device in range(len(programs))
        ]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _start(
        self, command: Sequence[str], port: int, device: int, threads: int
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{device}.err").open("wb") as err:
            return subprocess.Popen(  # noqa: S603  our own words, no shell
                (*command, "--port", str(port), "--device", str(device)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if device else subprocess.PIPE,
                stderr=err,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,  # Ctrl-C is for this process, which tells the devices
            )

    def _read(self) -> None:
        """Takes what device 0 tells, until it ends."""
        out = self._processes[0].stdout
        for line in out or ():
            self._lines.put(line)
        self._lines.put(None)

    def steps(self, stop: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
        """What device 0 tells of each step, until all devices have ended.

        Args:
            stop: asked all the time; True lets the devices end with the step they are in.

        Raises:
            WindlassError: a device failed; the message names it, with its place and instruction.
        """
        watch, told = _Watch(), False
        while True:
            if not told and stop():
                self._tell(STOP)
                told = True
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_LOOK_SECONDS)
                if line is None:
                    break
                found: Mapping[str, Any] = json.loads(line)
                yield found
                self._tell(TAKEN)
                continue
            self._require_alive()
            quiet = watch.quiet([beat.at() for beat in self._beats])
            begun = any(beat.at() > NO_BEAT for beat in self._beats)
            if quiet > self._silence * (1 if begun else _FIRST_TIMES):
                raise RunBroken(self._silent(quiet))
        self._wait()
        self._require_alive()

    def close(self) -> None:
        """Ends every device that has not ended."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._reader.join()
        for beat in self._beats:
            beat.close()

    def _tell(self, word: bytes) -> None:
        pipe = self._processes[0].stdin
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(word)
                pipe.flush()

    def _wait(self) -> None:
        """Lets the other devices end too, once the first has."""
        until = time.monotonic() + _GRACE_SECONDS
        while any(p.poll() is None for p in self._processes) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    # What went wrong.

    def _require_alive(self) -> None:
        """Raises what the first device to fail has told, or what became of it.

        Raises:
            WindlassError: of the kind that the device met.
        """
        ended = {at: code for at, p in enumerate(self._processes) if (code := p.poll())}
        if not ended:
            return
        # Whoever failed first tells so at once; others fail only because it is gone.
        time.sleep(2 * _LOOK_SECONDS)
        reports = {at: found for at in range(len(self._processes)) if (found := self._report(at))}
        for at, found in reports.items():
            if not found["follows"]:
                raise self._error(at, found)
        for at, code in ended.items():
            if at not in reports:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                raise RunBroken(f"{self._name(at)} {how}{self._last_words(at)}")
        at, found = next(iter(reports.items()))
        raise self._error(at, found)

    def _error(self, device: int, found: Mapping[str, Any]) -> WindlassError:
        kind, message = found["kind"], str(found["message"])
        if kind == "RunInterrupted":
            return errors.RunInterrupted(message)
        told = f"{self._name(device)}: {message}"
        if kind == "MemoryShort":
            return MemoryShort(told, room_bytes=found["room_bytes"])
        of = getattr(errors, kind, RunBroken)
        return RunBroken(told) if of is errors.Faults else of(told)

    def _silent(self, seconds: float) -> str:
        """Names the device that the others wait for, with the stack of its threads."""
        every = range(len(self._processes))
        stopped = [at for at in every if _state(self._processes[at].pid) == "T"]
        busy = [at for at in every if self._kind(at) not in _WAITING]
        at = min(stopped or busy or every, key=lambda device: self._beats[device].at())
        how = "is stopped" if at in stopped else "does not go on"
        told = f"{self._name(at)} {how}: no device has got any further for {seconds:.0f} s"
        if at in stopped:
            return told
        self._processes[at].send_signal(signal.SIGUSR1)
        time.sleep(2 * _LOOK_SECONDS)
        return told + self._last_words(at)

    def _kind(self, device: int) -> Kind | None:
        _, index = self._beats[device].at()
        instructions = self._programs[device].instructions
        return instructions[index].kind if 0 <= index < len(instructions) else None

    def _name(self, device: int) -> str:
        place = self._places[device]
        step, index = self._beats[device].at()
        instructions = self._programs[device].instructions
        at = f", at {instructions[index]}" if 0 <= index < len(instructions) else ""
        return (
            f"device {device} (stage {place.stage}, slice {place.slice}, replica {place.replica}) "
            f"in step {step}{at}"
        )

    def _last_words(self, device: int) -> str:
        with contextlib.suppress(OSError):
            words = (self._folder / f"{device}.err").read_text(errors="replace").strip()
            return f"; it said:\n{words[-_LONGEST_WORDS:]}" if words else ""
        return ""

    def _report(self, device: int) -> Mapping[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found: Mapping[str, Any] = json.loads(report_file(self._folder, device).read_text())
            return found
        return None


class _Watch:
    """For how long nothing has changed."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []
        self._since = time.monotonic()

    def quiet(self, now: list[tuple[int, int]]) -> float:
        """Seconds since what is seen now was seen first."""
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since


def _listening(devices: int) -> tuple[TCPStore, int]:
    """A store that the devices meet at, on a port of the loopback that was free."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, devices, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def _state(pid: int) -> str:
    """One letter of what the system says of a process; `T` is stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
