"""Launch: the devices of a run as processes of this host, watched until they end.

Each is started with the run's folder and the port to meet at. Its standard input is a pipe from
here: it ends when that does, whatever it waits for by then. It tells in a small mapped file at
which instruction it is, and in a file of its own what went wrong. Device 0 tells its steps, and
hears which of them are on record: no checkpoint of a step is there before. It ends with `null` once
the last checkpoint is whole.
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
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

from windlass.atomic_files import storage_faults
from windlass.program.device_mesh import Place
from windlass.program.instruction import Program
from windlass.runtime.distributed.failure_report import Witness
from windlass.runtime.distributed.heartbeat import NO_BEAT, Beat
from windlass.runtime.distributed.process_groups import LOOPBACK
from windlass.runtime.distributed.rank_ipc import (
    RANKS_FOLDER,
    STOP,
    TAKEN,
    beat_file,
    error_file,
    make_room,
)

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 3.0
"""That other devices have to end by themselves once one has."""
_FIRST_TIMES = 5
"""So much longer may it take until all devices begin: models are built and code is loaded."""
_FIRST_SECONDS = 60.0
"""So long at least: on a busy machine the code alone takes half of that."""


class Patience(NamedTuple):
    """How long devices may be silent, in seconds."""

    silence: float
    """Once all have begun, or where one is stopped."""
    compiling: float
    """Beyond that, before."""

    @property
    def first(self) -> float:
        """Until all have begun."""
        return max(_FIRST_SECONDS, _FIRST_TIMES * (self.silence + self.compiling))


class Devices:
    """All devices of a run, each a process of this host.

    Args:
        folder: of the run.
        command: starts one of them; the port to meet at and its device are added.
        programs: of all devices, to name instructions by.
        places: of all devices.
        patience: with silent devices, after which one is named.
        threads: that each computes with.

    Raises:
        StorageError: the folder takes no files.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        programs: Sequence[Program],
        places: Sequence[Place],
        *,
        patience: Patience,
        threads: int,
    ) -> None:
        self._folder = folder / RANKS_FOLDER
        self._patience = patience
        every = range(len(programs))
        with storage_faults(self._folder):
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.iterdir():
                path.unlink()
        for device in every:
            make_room(self._folder, device)
        self._store, port = _listening(len(programs))
        self._beats = [Beat(beat_file(self._folder, device)) for device in every]
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for device in every:
                self._processes.append(self._start(command, port, device, threads))
        except BaseException:
            self._end()
            raise
        self._witness = Witness(
            self._folder, programs, places, dict(enumerate(self._beats)),
            dict(enumerate(self._processes)),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _start(
        self, command: Sequence[str], port: int, device: int, threads: int
    ) -> subprocess.Popen[bytes]:
        with error_file(self._folder, device).open("wb") as err:
            return subprocess.Popen(  # noqa: S603  our own words, no shell
                (*command, "--port", str(port), "--device", str(device)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if device else subprocess.PIPE,
                stderr=err,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                # Ctrl-C is for this process, which tells the devices. A group of our session, and
                # no session of its own: the system wakes those of its stopped groups that lose us.
                process_group=0,
            )

    def _read(self) -> None:
        """Takes what device 0 tells, until it ends."""
        out = self._processes[0].stdout
        for line in out or ():
            self._lines.put(line)
        self._lines.put(None)

    def steps(self, stop: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
        """What device 0 tells of each step, until all devices have ended.

        Whoever asks for the next step has the one before on record.

        Args:
            stop: asked all the time; True lets the devices end with the step they are in.

        Raises:
            WindlassError: a device failed; the message names it, with its place and instruction.
        """
        watch, told = Quiet(), False
        while True:
            if not told and stop():
                self._tell(STOP)
                told = True
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_LOOK_SECONDS)
                if line is None:
                    break
                found: Mapping[str, Any] | None = json.loads(line)
                if found is None:
                    self._wait()
                    return
                yield found
                self._tell(TAKEN)
                watch = Quiet()  # whoever took the step may have taken its time
                continue
            self._require_alive()
            self._require_signs(watch)
        self._wait()
        self._require_alive()

    def await_saved(self, path: Path) -> None:
        """Lets the step that was told last be saved; returns once it is, or never will be."""
        self._tell(TAKEN)
        watch = Quiet()
        while not path.exists():
            quiet = watch.seconds([beat.signs() for beat in self._beats])
            codes = [ended(process) for process in self._processes]
            if quiet > self._patience.silence or any(code is not None for code in codes):
                return
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Ends every device that has not ended, with all that it has started."""
        self._end()
        self._reader.join()
        for beat in self._beats:
            beat.close()

    def _end(self) -> None:
        end_groups(self._processes)

    def _tell(self, word: bytes) -> None:
        pipe = self._processes[0].stdin
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(word)
                pipe.flush()

    def _wait(self) -> None:
        """Lets devices end by themselves; what goes wrong then costs nothing any more."""
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            codes = [ended(process) for process in self._processes]
            if any(codes) or None not in codes:
                return
            time.sleep(_LOOK_SECONDS)

    def _require_alive(self) -> None:
        """Raises what the first device to fail has told, or what became of it.

        Raises:
            WindlassError: of the kind that the device met.
        """
        codes = {at: ended(process) for at, process in enumerate(self._processes)}
        failed = {at: code for at, code in codes.items() if code}
        if failed:
            raise self._witness.failure(failed)

    def _require_signs(self, watch: "Quiet") -> None:
        """Names the device that does not go on, if none has for too long.

        Raises:
            RunBroken: the devices are silent.
        """
        quiet = watch.seconds([beat.signs() for beat in self._beats])
        if quiet < self._patience.silence:
            return
        begun = all(beat.at() > NO_BEAT for beat in self._beats)
        if begun or self._witness.stopped() or quiet > self._patience.first:
            raise self._witness.silence(quiet)


def end_groups(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes that lead a group each, with all that they have started."""
    for process in processes:
        # Nobody has waited for it yet, so that its number is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


class Quiet:
    """For how long no device has given a sign of life."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int]] = []
        self._since = time.monotonic()

    def seconds(self, now: Sequence[tuple[int, int, int]]) -> float:
        """Seconds since what is seen now was seen first."""
        if list(now) != self._seen:
            self._seen, self._since = list(now), time.monotonic()
        return time.monotonic() - self._since


def ended(process: subprocess.Popen[bytes]) -> int | None:
    """The code that a process has ended with, as Popen counts it; None while it runs.

    It is left to be waited for: until then no other process can get its number.
    """
    if process.returncode is not None:
        return process.returncode
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


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
