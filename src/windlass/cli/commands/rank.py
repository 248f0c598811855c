"""`windlass rank`: one rank of a run; started by `windlass train`, or on a cluster by torchrun."""

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from cyclopts import Parameter

from windlass import api
from windlass.cli.commands.train import graceful_stop, show_run
from windlass.errors import RequestError

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for each process it starts."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRankOptions:
    """Options of a rank that `windlass train` starts on its own host."""

    port: int | None = None
    """Loopback port where the ranks meet; on a cluster torchrun's variables give it instead."""
    rank: int = 0
    """Index of this rank among all of the run."""
    attempt: int = 1
    """Attempt of the run, counted from 1."""
    checkpoint: Path | None = None
    """The checkpoint to start from; without one, training starts at step 1."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class InstrumentationOptions:
    """Options of a rank whose run is verified."""

    fingerprints: bool = False
    """Record fingerprints of activations and gradients."""
    fault: str | None = None
    """Inject this fault."""

    @property
    def instrumentation(self) -> api.Instrumentation | None:
        """The same as a value; None for a run that is not verified."""
        return api.Instrumentation(fault=self.fault) if self.fingerprints else None


_NO_LOCAL_RANK, _NO_INSTRUMENTATION = LocalRankOptions(), InstrumentationOptions()


def rank(
    folder: Path,
    *,
    local: LocalRankOptions = _NO_LOCAL_RANK,
    instrumented: InstrumentationOptions = _NO_INSTRUMENTATION,
    status_store: str | None = None,
    supervised: bool = False,
) -> None:
    """Run one rank of a run.

    Args:
        folder: The run folder.
        local: Place of a rank that `windlass train` has started.
        instrumented: What a verification records and injects.
        status_store: `host:port` of torchrun's rendezvous store; this process then supervises its
            rank, which it starts as another process.
        supervised: Whether a supervisor on a cluster has started this process.
    """
    if local.port is None:
        _cluster_rank(folder, status_store, supervised=supervised)
        return
    with api.run_rank(
        folder,
        port=local.port,
        rank=local.rank,
        attempt=local.attempt,
        checkpoint=local.checkpoint,
        instrumentation=instrumented.instrumentation,
    ) as steps:
        for step in steps:
            _write_line(asdict(step) | {"by_kind": dict(step.by_kind)})
        _write_line(None)


def _write_line(step: dict[str, object] | None) -> None:
    """Writes one line of JSON for the parent process; None: all steps are done and saved."""
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


def _cluster_rank(folder: Path, status_store: str | None, *, supervised: bool) -> None:
    """Supervises a rank, as torchrun's process, or runs it, as the supervisor's process."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing or not (status_store or supervised):
        names = ", ".join(f"`{name}`" for name in missing)
        lacking = f"{names} not in the environment" if missing else "`--status-store` is not given"
        raise RequestError(
            f"{lacking}: torchrun starts ranks; run `sh {folder / 'launch.sh'}` instead"
        )
    index, size, local_rank = (int(os.environ[name]) for name in _TORCHRUN_VARIABLES[:3])
    cluster_rank = api.ClusterRank(
        rank=index, world_size=size, local_rank=local_rank,
        master_address=os.environ["MASTER_ADDR"], master_port=int(os.environ["MASTER_PORT"]),
    )  # fmt: skip
    if status_store:
        with graceful_stop() as stop:
            api.supervise_rank(folder, cluster_rank, status_store, stop=stop)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor tells when to stop
    with api.run_cluster_rank(folder, cluster_rank) as steps:
        if isinstance(steps, api.Run):
            show_run(steps)
        else:
            for _ in steps:
                pass
