"""The process on each host of a cluster that starts the ranks there, and one such rank."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.child_processes import ChildProcesses, module_command
from windlass.distributed.elastic import replan_for_devices
from windlass.distributed.launch_script import ranks_by_host
from windlass.distributed.rank_main import joined_ranks, journal_steps, rank_process
from windlass.errors import (
    PlanError,
    RecordError,
    RequestError,
    RunBroken,
    RunInterrupted,
    WindlassError,
)
from windlass.jobs import Planned, load
from windlass.program import lower, mesh_coord
from windlass.schema import CHECKPOINT_FOLDER, LAUNCH_FILE, LAUNCH_SECRET_FILE, Step
from windlass.torch_ext import device_for
from windlass.training import (
    LoopHooks,
    Run,
    continue_run,
    planned_from_record,
    rank_server,
    reopen_run,
    require_steps_left,
    train_rank,
    watchdog_timeouts,
)

if TYPE_CHECKING:
    from windlass.runtime import Rendezvous, StatusStore, StoreAddress
    from windlass.torch_ext import Device

_MAX_INTERVAL_SECONDS = 1.0
"""Time between two exchanges of the watchdogs; a fifth of their hang timeout if that is shorter."""
_JOIN_SECONDS, _REJOIN_SECONDS = 600.0, 120.0
"""Time in which all hosts must have come: at first, and for a restart."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHost:
    """One host of a cluster, as the launch script describes it."""

    nodes: int
    """Number of hosts."""
    node_rank: int
    """Index of this host."""
    per_node: int
    """Number of ranks on each host."""
    head: str | None
    """Name or address of the first host; None if it is the only one."""
    port: int | None
    """Port of the store there; None if there is only one host."""

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return ranks_by_host(self.nodes, self.per_node)[self.node_rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRank:
    """One rank of a cluster, as the process that starts it describes it."""

    rank: int
    """Index among all ranks of the run."""
    local_rank: int
    """Index among the ranks of its host."""
    store: Path | None
    """File of the store where the ranks meet; None if they are on several hosts."""
    head: str | None
    """Name or address of the host that keeps the store; None if there is only one host."""
    port: int | None
    """Port of the store there; None if there is only one host."""
    restart: int
    """How often all ranks have been restarted."""


def run_host(
    folder: Path,
    host: ClusterHost,
    *,
    restarts: int,
    stop: Callable[[], bool],
    report: Callable[[str, str], None],
) -> None:
    """Runs the ranks of one host of a cluster until the run is complete.

    If a rank of any host fails, all ranks of all hosts start again from the last checkpoint. On
    another number of hosts than the run is planned for, it is planned anew.

    Args:
        folder: the run folder, which every host sees.
        host: this host.
        restarts: how often the ranks are restarted at most.
        stop: polled; True asks all ranks to end after the current step.
        report: called with a word and a sentence for each restart and new plan.

    Raises:
        RequestError: the store cannot listen on the head's address.
        PlanError: there is no plan for so many devices with the same batch.
        RunFinished: the run has no step left.
        RunInterrupted: the run was asked to stop, and is saved.
        WindlassError: a rank failed; the message names it, its coordinates and instruction.
    """
    record = load(folder)
    planned, devices = planned_from_record(record), host.nodes * host.per_node
    require_steps_left(record, planned, _steps_done(folder, planned.request.train.steps))
    if devices != planned.plan.parallel.devices:
        before, planned = planned.plan.parallel, _planned_anew(folder, planned, host, stop)
        report("plan", f"made anew for {devices} of {before.devices} devices")
    with _store_address(folder, host) as address:
        for restart in range(restarts + 1):
            try:
                _run_attempt(folder, planned, host, address, restart, stop)
            except RunInterrupted:
                raise
            except WindlassError as error:
                if restart == restarts or stop():
                    raise
                report("lost", f"{error}; all ranks start again")
            else:
                return


def _planned_anew(
    folder: Path, planned: Planned, host: ClusterHost, stop: Callable[[], bool]
) -> Planned:
    """The run with a plan for the hosts that there are, which the first of them makes."""
    devices, end = host.nodes * host.per_node, time.monotonic() + _REJOIN_SECONDS
    if host.node_rank == 0:
        return replan_for_devices(folder, planned, devices)
    while planned.plan.parallel.devices != devices:
        if stop():
            raise RunInterrupted("stopped before the first host had planned the run anew")
        if time.monotonic() > end:
            raise PlanError(
                f"the first host has not planned `{folder}` for {devices} devices within "
                f"{_REJOIN_SECONDS:.0f} s: what it says tells why"
            )
        time.sleep(_POLL_SECONDS)
        with suppress(RecordError):  # its files change one by one
            planned = planned_from_record(load(folder))
    return planned


def _steps_done(folder: Path, steps: int) -> int:
    """The step of the newest good checkpoint, which is read only if it could be that of `steps`."""
    from windlass.runtime import checkpoint_folders, checkpoint_name, latest_checkpoint

    checkpoints = folder / CHECKPOINT_FOLDER
    names = [path.name for path in checkpoint_folders(checkpoints)]
    if not names or names[-1] < checkpoint_name(steps):
        return 0
    checkpoint = latest_checkpoint(checkpoints)
    return checkpoint.manifest.step if checkpoint else 0


@contextmanager
def _store_address(folder: Path, host: ClusterHost) -> Iterator["StoreAddress"]:
    """Where the ranks of a cluster meet; the first of several hosts keeps the store there."""
    from windlass.runtime import RANKS_FOLDER, HeadAddress, create_store_file, host_store

    if host.head is None or host.port is None:
        yield create_store_file(folder / RANKS_FOLDER)
        return
    address = HeadAddress(host.head, host.port)
    store = host_store(address) if host.node_rank == 0 else None
    yield address
    del store  # it listened until now


def _run_attempt(
    folder: Path,
    planned: Planned,
    host: ClusterHost,
    address: "StoreAddress",
    restart: int,
    stop: Callable[[], bool],
) -> None:
    """Starts the ranks of this host once all hosts are there, and watches them until they end."""
    import torch

    from windlass.runtime import (
        RANKS_FOLDER,
        HostWatchdog,
        StatusStore,
        connect_watchdog_store,
        rank_placements,
    )

    namespace = "" if isinstance(address, Path) else _namespace(folder, "status", restart)
    timeouts, parallel = watchdog_timeouts(planned), planned.plan.parallel
    server = rank_server(planned, host.per_node)
    store = StatusStore(
        lambda: connect_watchdog_store(address, namespace), host.node_rank, host.nodes, host.ranks,
        interval_seconds=min(_MAX_INTERVAL_SECONDS, timeouts.hang_seconds / 5),
    )  # fmt: skip
    with closing(store):
        _wait_for_hosts(store, host, _REJOIN_SECONDS if restart else _JOIN_SECONDS, stop)
        watchdog = HostWatchdog(
            folder / RANKS_FOLDER,
            ChildProcesses(module_command("windlass"), server),
            {
                rank: _rank_words(folder, rank, local_rank, address, restart)
                for local_rank, rank in enumerate(host.ranks)
            },
            [mesh_coord(rank, parallel) for rank in range(parallel.devices)],
            cache(lambda: lower(planned.plan, planned.graph)),
            store,
            timeouts,
            placements=rank_placements(
                device_for(f"{planned.machine.device.kind}:0"),
                host.per_node,
                torch.get_num_threads(),
            ),
        )
        if server is not None:
            server.close()  # all ranks of this host have started
        with closing(watchdog):
            watchdog.watch(stop)


def _wait_for_hosts(
    store: "StatusStore", host: ClusterHost, seconds: float, stop: Callable[[], bool]
) -> None:
    """Returns when all hosts are there."""
    end, place = time.monotonic() + seconds, f"HEAD={host.head}, port {host.port}"
    while store.missing_hosts:
        store.exchange(_POLL_SECONDS)
        if stop():
            raise RunInterrupted("stopped before all hosts were there")
        if store.connection_error is not None:
            raise RunBroken(
                f"the store of the first host at {place} cannot be reached: "
                f"{store.connection_error}; start the script with NODE_RANK=0 on that host, and "
                "with the same HEAD and PORT on all"
            )
        if time.monotonic() > end:
            missing = ", ".join(map(str, store.missing_hosts))
            raise RunBroken(
                f"of {host.nodes} hosts, these have not come to {place} within {seconds:.0f} s: "
                f"{missing}; start the script once on each host, with its own NODE_RANK"
            )
        time.sleep(_POLL_SECONDS)


def _rank_words(
    folder: Path, rank: int, local_rank: int, address: "StoreAddress", restart: int
) -> list[str]:
    """The command line of one rank of this host."""
    if isinstance(address, Path):
        place = ["--store", str(address)]
    else:
        place = ["--head", address.host, "--port", str(address.port)]
    numbers = {"--rank": rank, "--local-rank": local_rank, "--restart": restart}
    options = [word for name, number in numbers.items() for word in (name, str(number))]
    return ["rank", str(folder), *options, *place]


def _namespace(folder: Path, purpose: str, restart: int) -> str:
    """The prefix of all keys of one attempt: known only to those who can read the run folder."""
    try:
        secret = (folder / LAUNCH_SECRET_FILE).read_text()
    except OSError as error:
        raise RecordError(
            f"`{folder}` was not prepared by `windlass launch` for several hosts: {error}"
        ) from None
    return f"{secret}/{purpose}/{restart}"


@contextmanager
def run_cluster_rank(folder: Path, cluster_rank: ClusterRank) -> Iterator[Iterator[Step] | Run]:
    """One rank of a prepared run on a cluster, from its start to its end.

    Every start of all ranks together is one attempt, which resumes from the newest good
    checkpoint. Rank 0 locks the folder, journals the run and yields its steps. Every other rank
    yields none, and journals its own. An error is also reported in the run folder.

    Args:
        folder: the run folder, which every host sees.
        cluster_rank: the rank, and where it meets the others.

    Raises:
        RecordError: the run has finished, or another process holds its folder.
        WindlassError: any other error; the message names the rank and its instruction.
    """
    from windlass.runtime import is_peer_lost

    rank, local_rank = cluster_rank.rank, cluster_rank.local_rank
    try:
        with rank_process(folder, rank, local_rank) as process:
            world_size = process.planned.plan.parallel.devices
            with joined_ranks(process, _rendezvous(folder, cluster_rank, world_size)):
                hooks = LoopHooks(
                    stop=process.parent.stop_requested, heartbeat=process.heartbeat.slots
                )
                yield _steps(folder, process.planned, rank, process.device, hooks)
    except Exception as error:
        if is_peer_lost(error):
            why = str(error).partition("\n")[0]
            raise RunBroken(f"another rank is gone ({why})") from None
        raise


def _rendezvous(folder: Path, place: ClusterRank, world_size: int) -> "Rendezvous":
    """Where the ranks of one attempt find each other."""
    from windlass.runtime import HeadAddress, Rendezvous

    if place.head is not None and place.port is not None:
        address: StoreAddress = HeadAddress(place.head, place.port)
        namespace = _namespace(folder, "ranks", place.restart)
    elif place.store is not None:
        address, namespace = place.store, str(place.restart)
    else:
        raise RequestError(
            f"a rank of a cluster needs its store: run `sh {folder / LAUNCH_FILE}` instead"
        )
    return Rendezvous(address, namespace, place.rank, place.local_rank, world_size)


def _steps(
    folder: Path, planned: Planned, rank: int, device: "Device", hooks: LoopHooks
) -> Iterator[Step] | Run:
    """The training loop of one rank; rank 0 first tells all others where to start."""
    from windlass.runtime import RunStart, broadcast_start

    if rank:
        start = broadcast_start(None, device)
        checkpoint = Path(start.checkpoint) if start.checkpoint else None
        steps = train_rank(planned, rank, folder, checkpoint, device, hooks)
        return journal_steps(steps, folder, rank, start.attempt)
    reopened = reopen_run(load(folder), planned)
    path = reopened.checkpoint.path if reopened.checkpoint else None
    attempt = reopened.folder.attempt
    broadcast_start(RunStart(attempt=attempt, checkpoint=str(path) if path else None), device)
    return continue_run(
        planned, reopened, lambda: train_rank(planned, 0, folder, path, device, hooks)
    )
