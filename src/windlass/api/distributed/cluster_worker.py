"""Worker: one of a run's devices on some host of a cluster, and the guard that starts it there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.distributed.rank_main import journal_steps
from windlass.api.plan import Planned
from windlass.api.runs import load
from windlass.api.training.local_launch import watchdog_timeouts
from windlass.api.training.resume import continue_run, reopen_run
from windlass.api.training.run_files import planned_from_record
from windlass.api.training.setup import train_rank
from windlass.api.training.train import Run
from windlass.errors import PlanError, RunBroken
from windlass.program.device_mesh import mesh_coord
from windlass.program.lowering.lower import lower
from windlass.schema.run_record import Step

if TYPE_CHECKING:
    from windlass.runtime.distributed.heartbeat import HeartbeatWriter

_INTERVAL = 1.0
"""Seconds from one exchange of guards to the next, or a fifth of their patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRank:
    """The place of a process that torch's launcher has started."""

    rank: int
    """Which of the run's devices it is."""
    world_size: int
    local_rank: int
    """Which of those on its host."""
    master_address: str
    """Where devices find each other."""
    master_port: int
    """At which port there; another one each time that all begin."""


def supervise_rank(
    folder: Path, cluster_rank: ClusterRank, status_store: str, *, stop: Callable[[], bool]
) -> None:
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
    from windlass.runtime.distributed.status_store import StatusStore
    from windlass.runtime.distributed.watchdog import RankWatchdog

    die_with_parent()
    planned = planned_from_record(load(folder))
    plan = planned.plan
    if cluster_rank.world_size != plan.parallel.devices:
        raise PlanError(
            f"the plan of `{folder}` is of {plan.parallel.devices} devices, and "
            f"{cluster_rank.world_size} processes were started; start as many as it has devices"
        )
    patience = watchdog_timeouts(planned)
    host, _, port = status_store.rpartition(":")
    guarded = RankWatchdog(
        folder / RANKS_FOLDER,
        [sys.executable, "-m", "windlass", "device", str(folder), "--guarded"],
        cluster_rank.rank,
        [mesh_coord(device, plan.parallel) for device in range(plan.parallel.devices)],
        cache(lambda: lower(plan, planned.graph)),
        StatusStore(
            host, int(port), f"{cluster_rank.master_address}:{cluster_rank.master_port}", cluster_rank.rank, cluster_rank.world_size,
            interval=min(_INTERVAL, patience.silence / 5),
        ),
        patience,
    )  # fmt: skip
    with closing(guarded):
        guarded.watch(stop)


@contextmanager
def run_cluster_rank(folder: Path, cluster_rank: ClusterRank) -> Iterator[Iterator[Step] | Run]:
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
    from windlass.runtime.distributed.heartbeat import HeartbeatWriter
    from windlass.runtime.distributed.rendezvous import (
        destroy_process_group,
        init_elastic_process_group,
        is_peer_lost,
    )
    from windlass.runtime.distributed.rank_ipc import (
        RANKS_FOLDER,
        ParentProcess,
        heartbeat_file,
        write_report,
    )

    parent = ParentProcess()
    ranks = folder / RANKS_FOLDER
    planned = planned_from_record(load(folder))
    pulse = HeartbeatWriter(heartbeat_file(ranks, cluster_rank.rank))
    try:
        init_elastic_process_group(
            cluster_rank.rank, cluster_rank.world_size, planned.machine.device.kind,
            local_rank=cluster_rank.local_rank, host=cluster_rank.master_address,
        )  # fmt: skip
        yield _steps(folder, planned, cluster_rank.rank, pulse, parent.stop_requested)
        destroy_process_group()
    except Exception as error:
        write_report(ranks, cluster_rank.rank, error)
        if is_peer_lost(error):
            why = str(error).partition("\n")[0]
            raise RunBroken(f"another device is gone ({why})") from None
        raise


def _steps(
    folder: Path, planned: Planned, device: int, pulse: "HeartbeatWriter", stop: Callable[[], bool]
) -> Iterator[Step] | Run:
    """The training loop of one device, once device 0 has told all where to begin."""
    import torch

    from windlass.runtime.distributed.rendezvous import RunStart, broadcast_start

    on = torch.device(planned.machine.device.kind)
    if device:
        begin = broadcast_start(None, on)
        at = Path(begin.checkpoint) if begin.checkpoint else None
        steps = train_rank(planned, device, folder, at, beat=pulse.slots, stop=stop)
        return journal_steps(steps, folder, device, begin.attempt)
    again = reopen_run(load(folder), planned)
    path = again.checkpoint.path if again.checkpoint else None
    broadcast_start(RunStart(attempt=again.folder.attempt, checkpoint=str(path) if path else None), on)
    return continue_run(
        planned,
        again,
        lambda: train_rank(planned, 0, folder, path, beat=pulse.slots, stop=stop),
    )
