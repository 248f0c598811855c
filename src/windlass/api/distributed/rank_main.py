"""The whole life of a process that runs one rank of a run on this host."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.runs import load
from windlass.api.training.instrumentation import Instrumentation, LoopHooks
from windlass.api.training.run_files import planned_from_record
from windlass.api.training.setup import train_rank
from windlass.schema import Step
from windlass.torch_ext import device_for, set_deterministic_libraries
from windlass.tracking import SystemMonitor, append_step, rank_journal

if TYPE_CHECKING:
    from windlass.runtime import ParentProcess


@contextmanager
def run_rank(
    folder: Path,
    *,
    store: Path,
    rank: int,
    attempt: int,
    checkpoint: Path | None,
    instrumentation: Instrumentation | None = None,
) -> Iterator[Iterator[Step]]:
    """One rank of a run, from its start to its end; an error is also reported in the run folder.

    Rank 0 yields the run's steps for the parent process, which journals them; all is saved once
    the iterator ends. Every other rank yields none, and journals its own.

    Args:
        folder: the run folder.
        store: file of the store where the ranks meet.
        rank: the rank that this process runs.
        attempt: number of this attempt at the run.
        checkpoint: the checkpoint that all ranks start from; None starts from the beginning.
        instrumentation: what a verification records and injects.

    Raises:
        WindlassError: what went wrong.
    """
    from windlass.runtime import (
        RANKS_FOLDER,
        HeartbeatWriter,
        ParentProcess,
        Rendezvous,
        destroy_process_group,
        flight_record_file,
        heartbeat_file,
        init_process_group,
        write_report,
    )

    parent = ParentProcess(flight_record_file(folder / RANKS_FOLDER, rank))
    try:
        planned = planned_from_record(load(folder))
        heartbeat = HeartbeatWriter(heartbeat_file(folder / RANKS_FOLDER, rank))
        hooks = LoopHooks(
            stop=parent.stop_requested, heartbeat=heartbeat.slots, instrumentation=instrumentation
        )
        device = device_for(f"{planned.machine.device.kind}:{rank}")
        steps = train_rank(planned, rank, folder, checkpoint, device, hooks)
        devices = planned.plan.parallel.devices
        if planned.plan.deterministic:
            set_deterministic_libraries()
        rendezvous = Rendezvous(store, f"attempt {attempt}", rank, rank, devices)
        init_process_group(rendezvous, device)
        yield _recorded(steps, parent) if rank == 0 else journal_steps(steps, folder, rank, attempt)
        destroy_process_group()
    except Exception as error:
        write_report(folder / RANKS_FOLDER, rank, error)
        raise


def _recorded(steps: Iterator[Step], parent: "ParentProcess") -> Iterator[Step]:
    """The same steps; continues after each one only when the parent has it on record."""
    for step in steps:
        yield step
        parent.wait_until_recorded()


def journal_steps(steps: Iterator[Step], folder: Path, rank: int, attempt: int) -> Iterator[Step]:
    """Journals all steps of a rank, and yields none."""
    with rank_journal(folder, rank, attempt) as journal, SystemMonitor(journal):
        for step in steps:
            append_step(journal, step)
    yield from ()
