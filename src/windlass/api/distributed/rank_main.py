"""Device: the whole life of a process that is one of a run's devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.runs import load
from windlass.api.training.instrumentation import Instrumentation
from windlass.api.training.run_files import planned_from_record
from windlass.api.training.setup import train_rank
from windlass.schema.run_record import Step
from windlass.tracking.run_folder import rank_journal
from windlass.tracking.step_records import append_step

if TYPE_CHECKING:
    from windlass.runtime.distributed.rank_ipc import ParentProcess


@contextmanager
def run_rank(
    folder: Path,
    *,
    port: int,
    rank: int,
    attempt: int,
    checkpoint: Path | None,
    instrumentation: Instrumentation | None = None,
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
    from windlass.runtime.distributed.heartbeat import HeartbeatWriter
    from windlass.runtime.distributed.rendezvous import (
        LOOPBACK,
        Rendezvous,
        destroy_process_group,
        init_local_process_group,
    )
    from windlass.runtime.distributed.rank_ipc import (
        RANKS_FOLDER,
        ParentProcess,
        heartbeat_file,
        write_report,
    )

    parent = ParentProcess()
    try:
        planned = planned_from_record(load(folder))
        pulse = HeartbeatWriter(heartbeat_file(folder / RANKS_FOLDER, rank))
        steps = train_rank(
            planned,
            rank,
            folder,
            checkpoint,
            beat=pulse.slots,
            stop=parent.stop_requested,
            instrumentation=instrumentation,
        )
        devices = planned.plan.parallel.devices
        init_local_process_group(
            Rendezvous(LOOPBACK, port, rank, devices), planned.machine.device.kind
        )
        yield _taken(steps, parent) if rank == 0 else journal_steps(steps, folder, rank, attempt)
        destroy_process_group()
    except Exception as error:
        write_report(folder / RANKS_FOLDER, rank, error)
        raise


def _taken(steps: Iterator[Step], parent: "ParentProcess") -> Iterator[Step]:
    """Steps, each of which the parent has on record before what follows it."""
    for step in steps:
        yield step
        parent.wait_until_recorded()


def journal_steps(steps: Iterator[Step], folder: Path, rank: int, attempt: int) -> Iterator[Step]:
    """Journals all steps, and gives none."""
    with rank_journal(folder, rank, attempt) as journal:
        for step in steps:
            append_step(journal, step)
    yield from ()
