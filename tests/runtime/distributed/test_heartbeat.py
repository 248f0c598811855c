"""Where a run hangs: the place of a device whose host is far ahead, and the flight record."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from windlass.program.device_mesh import MeshCoord
from windlass.program.instruction import Instruction, InstructionKind, Program
from windlass.runtime.distributed.failure_report import describe_rank, find_blocking_rank
from windlass.runtime.distributed.heartbeat import (
    DeviceHeartbeat,
    HeartbeatReader,
    HeartbeatWriter,
)
from windlass.runtime.interpreter import EventTimer, Interpreter
from windlass.torch_ext import CpuDevice
from windlass.torch_ext.streams import HostEvent, HostStream, Stream

KINDS: tuple[InstructionKind, ...] = ("load_batch", "forward", "backward", "update", "sync")
STUCK = 2
"""Index of the instruction that the device does not finish at first."""


class QueueStream(HostStream):
    """A stream that does its work in order when it is told to."""

    def __init__(self) -> None:
        self.submitted, self.finished = 0, 0
        self._changed = threading.Condition()

    def finish(self, count: int) -> None:
        """Finishes the first so many pieces of work."""
        with self._changed:
            self.finished = count
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Blocks until all submitted work is finished."""
        with self._changed:
            self._changed.wait_for(lambda: self.finished >= self.submitted, timeout=60)


class QueueEvent(HostEvent):
    """An event behind a piece of work of a `QueueStream`."""

    def __init__(self, stream: QueueStream) -> None:
        super().__init__()
        self._stream, self._work = stream, 0

    def record(self, _: Stream | None = None, /) -> None:
        self._work = self._stream.submitted

    def query(self) -> bool:
        return self._stream.finished >= self._work


class QueueDevice(CpuDevice):
    """A device whose host only submits work, one piece for each handler."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.stream = QueueStream()

    def current_stream(self) -> Stream:
        return self.stream

    def new_event(self, *, timing: bool = False) -> HostEvent:
        del timing
        return QueueEvent(self.stream)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_heartbeat_of_an_accelerator_names_what_its_device_has_not_finished(tmp_path: Path):
    """The host has submitted the whole step and waits; the device is stuck in its third call."""
    device = QueueDevice()
    program = Program(plan="p", device=0, instructions=tuple(Instruction(kind) for kind in KINDS))
    timer = EventTimer(device, len(KINDS))
    writer = HeartbeatWriter(tmp_path / "beat")
    heartbeat = DeviceHeartbeat(writer.slots, timer.finished_calls, device)

    def submit(_: int, __: int) -> None:
        device.stream.submitted += 1

    interpreter = Interpreter(program, dict.fromkeys(KINDS, submit), timer, heartbeat.host_slots)
    heartbeat.host_slots[0] = 1
    reader = HeartbeatReader(tmp_path / "beat")
    device.stream.finish(STUCK)
    step = threading.Thread(target=interpreter.run)
    step.start()
    wait_until(lambda: heartbeat.host_slots[1] == len(KINDS) - 1)
    wait_until(lambda: reader.position() == (1, STUCK))
    place = describe_rank(0, MeshCoord(0, 0, 0), program, reader.position())
    assert place.endswith("in step 1, at backward")
    # Beside a rank whose device waits for it in the step's last instruction, this one is blamed.
    positions = {0: reader.position(), 1: (1, len(KINDS) - 1)}
    assert find_blocking_rank(positions, [], [program, program]) == 0
    device.stream.finish(len(KINDS))
    step.join()
    wait_until(lambda: reader.position() == (1, len(KINDS) - 1))
    heartbeat.close()
    reader.close()
    writer.close()


def test_events_of_the_step_before_do_not_count_as_progress():
    device = QueueDevice()
    timer = EventTimer(device, 3)
    device.stream.finish(3)
    timer.run([(lambda *_: None, 0, 0)] * 3)
    assert [timer.finished_calls(submitted) for submitted in range(4)] == [0, 1, 2, 3]


RANK = """
import sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from windlass.runtime.distributed.rendezvous import write_flight_record
folder = Path(sys.argv[1])
write_flight_record(folder / "empty.json")
store = dist.FileStore(str(folder / "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(7))
write_flight_record(folder / "0.flight.json")
"""


def test_a_rank_writes_its_last_collectives_where_torch_records_them(tmp_path: Path):
    """A process of its own: torch asks once whether to record."""
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "16", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", RANK, tmp_path], env=environment, check=True)
    assert not (tmp_path / "empty.json").exists()
    (entry,) = json.loads((tmp_path / "0.flight.json").read_bytes())["entries"]
    assert entry["profiling_name"] == "gloo:all_reduce"
    assert entry["input_sizes"] == [[7]]
