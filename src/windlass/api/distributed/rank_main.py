"""Device: the whole life of a process that is one of a run's devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.runs import load
from windlass.api.training.run_files import planned_of
from windlass.api.training.setup import device_steps
from windlass.api.verify.instrumentation import Scrutiny
from windlass.schema.run_record import Step
from windlass.tracking.run_folder import rank_journal
from windlass.tracking.step_records import append_step

if TYPE_CHECKING:
    from windlass.runtime.distributed.rank_ipc import Parent


@contextmanager
def as_device(
    folder: Path,
    *,
    port: int,
    device: int,
    attempt: int,
    checkpoint: Path | None,
    scrutiny: Scrutiny | None = None,
) -> Iterator[Iterator[Step]]:
    """One device of a run, from its start to its end; leaves behind what went wrong.

    Device 0 gives the run's steps, for whoever started it to journal: after the last one all is
    saved. Every other one gives none, and journals its own.

    Args:
        folder: of the run.
        port: of the loopback, where devices meet.
        device: which of them this is.
        attempt: of the run.
        checkpoint: that all go on from; None begins anew.
        scrutiny: of a proof.

    Raises:
        WindlassError: what went wrong.
    """
    from windlass.runtime.distributed.heartbeat import Pulse
    from windlass.runtime.distributed.process_groups import LOOPBACK, Rendezvous, join, leave
    from windlass.runtime.distributed.rank_ipc import RANKS_FOLDER, Parent, beat_file, report

    parent = Parent()
    try:
        planned = planned_of(load(folder))
        pulse = Pulse(beat_file(folder / RANKS_FOLDER, device))
        steps = device_steps(
            planned,
            device,
            folder,
            checkpoint,
            beat=pulse.numbers,
            stop=parent.wants_stop,
            scrutiny=scrutiny,
        )
        devices = planned.plan.parallel.devices
        join(Rendezvous(LOOPBACK, port, device, devices), planned.machine.device.kind)
        yield _taken(steps, parent) if device == 0 else journalled(steps, folder, device, attempt)
        leave()
    except Exception as error:
        report(folder / RANKS_FOLDER, device, error)
        raise


def _taken(steps: Iterator[Step], parent: "Parent") -> Iterator[Step]:
    """Steps, each of which the parent has on record before what follows it."""
    for step in steps:
        yield step
        parent.await_taken()


def journalled(steps: Iterator[Step], folder: Path, device: int, attempt: int) -> Iterator[Step]:
    """Journals all steps, and gives none."""
    with rank_journal(folder, device, attempt) as journal:
        for step in steps:
            append_step(journal, step)
    yield from ()
