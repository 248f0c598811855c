"""One rank of a run on a host of a cluster, and the supervisor process that starts it there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from windlass.api.distributed.rank_main import journal_steps
from windlass.api.plan import Planned
from windlass.api.runs import load
from windlass.api.training.instrumentation import LoopHooks
from windlass.api.training.local_launch import watchdog_timeouts
from windlass.api.training.resume import continue_run, reopen_run
from windlass.api.training.run_files import planned_from_record
from windlass.api.training.setup import train_rank
from windlass.api.training.train import Run
from windlass.errors import PlanError, RunBroken
from windlass.program import lower, mesh_coord
from windlass.schema import Step

_MAX_INTERVAL_SECONDS = 1.0
"""Time between two exchanges of the watchdogs; a fifth of their hang timeout if that is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRank:
    """A process that torchrun has started, as torchrun's environment variables describe it."""

    rank: int
    """Index among all ranks of the run."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Index among the ranks of its host."""
    master_address: str
    """Host where the ranks meet."""
    master_port: int
    """Port there; another one after each restart of all ranks."""


def supervise_rank(
    folder: Path, cluster_rank: ClusterRank, status_store: str, *, stop: Callable[[], bool]
) -> None:
    """Starts one rank of a prepared run, and watches it and all others until it has ended.

    Args:
        folder: the run folder, which every host sees.
        cluster_rank: the rank, as torchrun describes it.
        status_store: `host:port` of torchrun's rendezvous store.
        stop: polled; True asks all ranks to end after the current step.

    Raises:
        PlanError: the plan is for another number of devices.
        WindlassError: a rank failed; the message names it, its mesh coordinates and instruction.
    """
    from windlass.runtime import RANKS_FOLDER, RankWatchdog, StatusStore, die_with_parent

    die_with_parent()
    planned = planned_from_record(load(folder))
    plan, rank, world_size = planned.plan, cluster_rank.rank, cluster_rank.world_size
    if world_size != plan.parallel.devices:
        raise PlanError(
            f"the plan of `{folder}` is for {plan.parallel.devices} devices, but {world_size} "
            "processes were started; start one process for each device"
        )
    timeouts = watchdog_timeouts(planned)
    host, _, port = status_store.rpartition(":")
    store = StatusStore(
        host,
        int(port),
        f"{cluster_rank.master_address}:{cluster_rank.master_port}",
        rank,
        world_size,
        interval_seconds=min(_MAX_INTERVAL_SECONDS, timeouts.hang_seconds / 5),
    )
    watchdog = RankWatchdog(
        folder / RANKS_FOLDER,
        [sys.executable, "-m", "windlass", "rank", str(folder), "--supervised"],
        rank,
        [mesh_coord(each, plan.parallel) for each in range(world_size)],
        cache(lambda: lower(plan, planned.graph)),
        store,
        timeouts,
    )
    with closing(watchdog):
        watchdog.watch(stop)


@contextmanager
def run_cluster_rank(folder: Path, cluster_rank: ClusterRank) -> Iterator[Iterator[Step] | Run]:
    """One supervised rank of a prepared run, from its start to its end.

    Every start of all ranks together is one attempt, which resumes from the newest good
    checkpoint. Rank 0 locks the folder, journals the run and yields its steps. Every other rank
    yields none, and journals its own. An error is also reported in the run folder.

    Args:
        folder: the run folder, which every host sees.
        cluster_rank: the rank, as torchrun describes it.

    Raises:
        RecordError: the run has finished, or another process holds its folder.
        WindlassError: any other error; the message names the rank and its instruction.
    """
    from windlass.runtime import (
        RANKS_FOLDER,
        HeartbeatWriter,
        ParentProcess,
        destroy_process_group,
        heartbeat_file,
        init_elastic_process_group,
        is_peer_lost,
        write_report,
    )

    parent = ParentProcess()
    ranks_folder, rank = folder / RANKS_FOLDER, cluster_rank.rank
    planned = planned_from_record(load(folder))
    heartbeat = HeartbeatWriter(heartbeat_file(ranks_folder, rank))
    hooks = LoopHooks(stop=parent.stop_requested, heartbeat=heartbeat.slots)
    try:
        init_elastic_process_group(
            rank,
            cluster_rank.world_size,
            planned.machine.device.kind,
            local_rank=cluster_rank.local_rank,
            host=cluster_rank.master_address,
        )
        yield _steps(folder, planned, rank, hooks)
        destroy_process_group()
    except Exception as error:
        write_report(ranks_folder, rank, error)
        if is_peer_lost(error):
            why = str(error).partition("\n")[0]
            raise RunBroken(f"another rank is gone ({why})") from None
        raise


def _steps(folder: Path, planned: Planned, rank: int, hooks: LoopHooks) -> Iterator[Step] | Run:
    """The training loop of one rank; rank 0 first tells all others where to start."""
    import torch

    from windlass.runtime import RunStart, broadcast_start

    device = torch.device(planned.machine.device.kind)
    if rank:
        start = broadcast_start(None, device)
        checkpoint = Path(start.checkpoint) if start.checkpoint else None
        steps = train_rank(planned, rank, folder, checkpoint, hooks)
        return journal_steps(steps, folder, rank, start.attempt)
    reopened = reopen_run(load(folder), planned)
    path = reopened.checkpoint.path if reopened.checkpoint else None
    attempt = reopened.folder.attempt
    broadcast_start(RunStart(attempt=attempt, checkpoint=str(path) if path else None), device)
    return continue_run(planned, reopened, lambda: train_rank(planned, 0, folder, path, hooks))
