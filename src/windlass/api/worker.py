"""Worker: one of a run's devices, started on some host of a cluster by torch's launcher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.device import journalled
from windlass.api.folder import planned_of
from windlass.api.loop import device_steps
from windlass.api.plan import Planned
from windlass.api.record import load
from windlass.api.resume import reopened, run_again
from windlass.api.run import Run
from windlass.errors import PlanError, RunBroken, RunInterrupted, WindlassError
from windlass.spec.record import Step

if TYPE_CHECKING:
    from windlass.runtime.beat import Pulse


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


@contextmanager
def as_worker(
    folder: Path, worker: Worker, *, stop: Callable[[], bool]
) -> Iterator[Iterator[Step] | Run]:
    """One device of a prepared run, from its start to its end; leaves behind what went wrong.

    Every start of all devices together is one attempt, which goes on from the newest good
    checkpoint. Device 0 holds the folder, journals the run and gives its steps; every other one
    gives none, and journals its own.

    Args:
        folder: of the run, which all hosts see.
        worker: its place, as torch's launcher tells it.
        stop: True, on any device, asks all to end with the step under way.

    Raises:
        PlanError: the plan is of another number of devices.
        RecordError: the run is finished, or another process holds its folder.
        WindlassError: what went wrong else; the message names the device and its instruction.
    """
    from windlass.runtime.beat import Pulse
    from windlass.runtime.ranks import RANKS_FOLDER, beat_file, die_with_parent, make_room, report
    from windlass.runtime.world import is_lost, leave, meet

    die_with_parent()
    ranks = folder / RANKS_FOLDER
    planned = planned_of(load(folder))
    if worker.devices != planned.plan.cut.devices:
        raise PlanError(
            f"the plan of `{folder}` is of {planned.plan.cut.devices} devices, and "
            f"{worker.devices} processes were started; start as many as it has devices"
        )
    make_room(ranks, worker.device)
    pulse = Pulse(beat_file(ranks, worker.device))
    try:
        meet(
            worker.device, worker.devices, planned.machine.device.kind,
            local=worker.local, host=worker.host,
        )  # fmt: skip
        yield _steps(folder, planned, worker.device, pulse, stop)
        leave()
    except Exception as error:
        report(ranks, worker.device, error)
        name = _name(planned, worker.device, pulse)
        if is_lost(error):
            why = str(error).partition("\n")[0]
            raise RunBroken(f"{name}: another device is gone ({why})") from None
        if isinstance(error, WindlassError) and not isinstance(error, RunInterrupted):
            error.args = (f"{name}: {error}",)
        raise


def _steps(
    folder: Path, planned: Planned, device: int, pulse: "Pulse", stop: Callable[[], bool]
) -> Iterator[Step] | Run:
    """The training loop of one device, once device 0 has told all where to begin."""
    import torch

    from windlass.runtime.world import Told, told

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


def _name(planned: Planned, device: int, pulse: "Pulse") -> str:
    from windlass.program.layout import place_of
    from windlass.program.lower import lower
    from windlass.runtime.blame import device_name

    plan = planned.plan
    step, index, _ = pulse.numbers
    program = lower(plan, planned.graph)[device]
    return device_name(device, place_of(device, plan.cut), program, (step, index))
