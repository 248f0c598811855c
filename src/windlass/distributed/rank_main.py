"""The whole life of a process that runs one rank of a run on this host."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.fork_server import serve_forks
from windlass.jobs import Planned, load
from windlass.schema import Step
from windlass.torch_ext import Device, device_for, set_deterministic_libraries
from windlass.tracking import SystemMonitor, append_step, rank_journal
from windlass.training import Instrumentation, LoopHooks, planned_from_record, train_rank

if TYPE_CHECKING:
    from windlass.runtime import HeartbeatWriter, ParentProcess, Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process that runs one rank of a run on this host."""

    planned: Planned
    """What the run's folder holds."""
    parent: "ParentProcess"
    device: Device
    heartbeat: "HeartbeatWriter"


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
    with rank_process(folder, rank, rank) as process:
        hooks = LoopHooks(
            stop=process.parent.stop_requested,
            heartbeat=process.heartbeat.slots,
            instrumentation=instrumentation,
        )
        steps = train_rank(process.planned, rank, folder, checkpoint, process.device, hooks)
        with joined_ranks(process, meeting_in_file(process, store, rank, attempt)):
            if rank == 0:
                yield _recorded(steps, process.parent)
            else:
                yield journal_steps(steps, folder, rank, attempt)


@contextmanager
def rank_process(folder: Path, rank: int, local_rank: int) -> Iterator[RankProcess]:
    """This process as a rank; an error is also reported in the run folder.

    Args:
        local_rank: its index among the ranks of its host.
    """
    from windlass.runtime import (
        RANKS_FOLDER,
        HeartbeatWriter,
        ParentProcess,
        flight_record_file,
        heartbeat_file,
        write_report,
    )

    parent = ParentProcess(flight_record_file(folder / RANKS_FOLDER, rank))
    try:
        planned = planned_from_record(load(folder))
        heartbeat = HeartbeatWriter(heartbeat_file(folder / RANKS_FOLDER, rank))
        device = device_for(f"{planned.machine.device.kind}:{local_rank}")
        yield RankProcess(planned=planned, parent=parent, device=device, heartbeat=heartbeat)
    except Exception as error:
        write_report(folder / RANKS_FOLDER, rank, error)
        raise


def meeting_in_file(process: RankProcess, store: Path, rank: int, attempt: int) -> "Rendezvous":
    """Where the ranks of one host meet."""
    from windlass.runtime import Rendezvous

    devices = process.planned.plan.parallel.devices
    return Rendezvous(store, f"attempt {attempt}", rank, rank, devices)


@contextmanager
def joined_ranks(process: RankProcess, rendezvous: "Rendezvous") -> Iterator[None]:
    """All ranks as one group, until the context ends without an error."""
    from windlass.runtime import destroy_process_group, init_process_group

    if process.planned.plan.deterministic:
        set_deterministic_libraries()
    init_process_group(rendezvous, process.device)
    yield
    destroy_process_group()


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


_NEEDED = (
    "torch.fx.experimental.symbolic_shapes",  # by the first backward pass
    "windlass.cli.commands.rank",
    "windlass.runtime",
)


def become_ranks(channel: int) -> list[str]:
    """Imports what ranks need, and returns in each process that is forked, with its command line.

    The server itself ends with the process that has started it.

    Args:
        channel: the number of the socket on which that process asks.
    """
    import torch

    for module in _NEEDED:
        import_module(module)
    # A collector that looks at all objects would copy the memory that they are in.
    gc.collect()
    gc.freeze()
    request = serve_forks(channel)
    # OpenMP has read the variable already, when torch was imported.
    threads = request.environment["OMP_NUM_THREADS"].partition(",")[0]
    torch.set_num_threads(int(threads))
    return request.words
