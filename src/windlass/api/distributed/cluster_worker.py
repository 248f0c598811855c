"""Worker: one of a run's devices on some host of a cluster, and the guard that starts it there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.distributed.local_launch import patience_with
from windlass.api.distributed.rank_main import journalled
from windlass.api.plan import Planned
from windlass.api.runs import load
from windlass.api.training.resume import reopened, run_again
from windlass.api.training.run_files import planned_of
from windlass.api.training.setup import device_steps
from windlass.api.training.train import Run
from windlass.errors import PlanError, RunBroken
from windlass.program.device_mesh import place_of
from windlass.program.lowering.lower import lower
from windlass.schema.run_record import Step

if TYPE_CHECKING:
    from windlass.runtime.distributed.heartbeat import Pulse

_INTERVAL = 1.0
"""Seconds from one exchange of guards to the next, or a fifth of their patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The place of a process that torch's launcher has started."""

    device: int
    """Which of the run's devices it is."""
    devices: int
    local: int
    """Which of those on its host."""
    host: str
    """Where devices find each other."""
    port: int
    """At which port there; another one each time that all begin."""


def guard(folder: Path, worker: Worker, board: str, *, stop: Callable[[], bool]) -> None:
    """Starts one device of a prepared run, and watches it and all others until it has ended.

    Args:
        folder: of the run, which all hosts see.
        worker: its place, as torch's launcher tells it.
        board: `host:port` of the store that torch's launcher met at.
        stop: True asks all devices to end with the step under way.

    Raises:
        PlanError: the plan is of another number of devices.
        WindlassError: a device failed; the message names it, with its place and instruction.
    """
    from windlass.runtime.distributed.rank_ipc import RANKS_FOLDER, die_with_parent
    from windlass.runtime.distributed.status_store import Board
    from windlass.runtime.distributed.watchdog import Guard

    die_with_parent()
    planned = planned_of(load(folder))
    plan = planned.plan
    if worker.devices != plan.parallel.devices:
        raise PlanError(
            f"the plan of `{folder}` is of {plan.parallel.devices} devices, and "
            f"{worker.devices} processes were started; start as many as it has devices"
        )
    patience = patience_with(planned)
    host, _, port = board.rpartition(":")
    guarded = Guard(
        folder / RANKS_FOLDER,
        [sys.executable, "-m", "windlass", "device", str(folder), "--guarded"],
        worker.device,
        [place_of(device, plan.parallel) for device in range(plan.parallel.devices)],
        cache(lambda: lower(plan, planned.graph)),
        Board(
            host, int(port), f"{worker.host}:{worker.port}", worker.device, worker.devices,
            interval=min(_INTERVAL, patience.silence / 5),
        ),
        patience,
    )  # fmt: skip
    with closing(guarded):
        guarded.watch(stop)


@contextmanager
def as_worker(folder: Path, worker: Worker) -> Iterator[Iterator[Step] | Run]:
    """One guarded device of a prepared run, from its start to its end; leaves what went wrong.

    Every start of all devices together is one attempt, which goes on from the newest good
    checkpoint. Device 0 holds the folder, journals the run and gives its steps; every other one
    gives none, and journals its own.

    Args:
        folder: of the run, which all hosts see.
        worker: its place, as torch's launcher tells it.

    Raises:
        RecordError: the run is finished, or another process holds its folder.
        WindlassError: what went wrong else; the message names the device and its instruction.
    """
    from windlass.runtime.distributed.heartbeat import Pulse
    from windlass.runtime.distributed.process_groups import is_lost, leave, meet
    from windlass.runtime.distributed.rank_ipc import RANKS_FOLDER, Parent, beat_file, report

    parent = Parent()
    ranks = folder / RANKS_FOLDER
    planned = planned_of(load(folder))
    pulse = Pulse(beat_file(ranks, worker.device))
    try:
        meet(
            worker.device, worker.devices, planned.machine.device.kind,
            local=worker.local, host=worker.host,
        )  # fmt: skip
        yield _steps(folder, planned, worker.device, pulse, parent.wants_stop)
        leave()
    except Exception as error:
        report(ranks, worker.device, error)
        if is_lost(error):
            why = str(error).partition("\n")[0]
            raise RunBroken(f"another device is gone ({why})") from None
        raise


def _steps(
    folder: Path, planned: Planned, device: int, pulse: "Pulse", stop: Callable[[], bool]
) -> Iterator[Step] | Run:
    """The training loop of one device, once device 0 has told all where to begin."""
    import torch

    from windlass.runtime.distributed.process_groups import Told, told

    on = torch.device(planned.machine.device.kind)
    if device:
        begin = told(None, on)
        at = Path(begin.checkpoint) if begin.checkpoint else None
        steps = device_steps(planned, device, folder, at, beat=pulse.numbers, stop=stop)
        return journalled(steps, folder, device, begin.attempt)
    again = reopened(load(folder), planned)
    path = again.checkpoint.path if again.checkpoint else None
    told(Told(attempt=again.held.attempt, checkpoint=str(path) if path else None), on)
    return run_again(
        planned,
        again,
        lambda: device_steps(planned, 0, folder, path, beat=pulse.numbers, stop=stop),
    )
