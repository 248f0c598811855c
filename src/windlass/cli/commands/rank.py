"""`windlass device`: one of a run's devices; started by a process that trains, or by torchrun."""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from windlass import api
from windlass.cli.commands.train import graceful_stop, show_run
from windlass.errors import RequestError

_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torch's launcher tells each process it starts."""


def device(
    folder: Path,
    *,
    port: int | None = None,
    device: int = 0,
    attempt: int = 1,
    checkpoint: Path | None = None,
    notes: bool = False,
    fault: str | None = None,
    board: str | None = None,
    guarded: bool = False,
) -> None:
    """Be one device of a run on several.

    Args:
        folder: of the run.
        port: of the loopback, where devices meet; without it torchrun's environment tells.
        device: which of them this is.
        attempt: of the run.
        checkpoint: that all go on from.
        notes: note what layers make, for a proof.
        fault: make this mistake, to see that a proof finds it.
        board: `host:port` of the store that torch's launcher met at, for this to be a guard.
        guarded: whether a guard has started it.
    """
    if port is None:
        _on_a_cluster(folder, board, guarded=guarded)
        return
    with api.run_rank(
        folder,
        port=port,
        rank=device,
        attempt=attempt,
        checkpoint=checkpoint,
        instrumentation=api.Instrumentation(fault=fault) if notes else None,
    ) as steps:
        for step in steps:
            _tell(asdict(step) | {"by_kind": dict(step.by_kind)})
        _tell(None)


def _tell(told: dict[str, object] | None) -> None:
    """One line of JSON for the process that started this one; None: all is done and saved."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _on_a_cluster(folder: Path, board: str | None, *, guarded: bool) -> None:
    """A guard, which torch's launcher starts, or its device."""
    missing = [name for name in _TOLD if name not in os.environ]
    if missing or not (board or guarded):
        wanted = ", ".join(f"`{name}`" for name in missing)
        wanted = f"{wanted} not in the environment" if missing else "`--board` is not there"
        raise RequestError(
            f"{wanted}: a device is started by torchrun; `sh {folder / 'launch.sh'}` does so"
        )
    rank, size, local = (int(os.environ[name]) for name in _TOLD[:3])
    worker = api.ClusterRank(
        rank=rank, world_size=size, local_rank=local, master_address=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
    )  # fmt: skip
    if board:
        with graceful_stop() as stop:
            api.supervise_rank(folder, worker, board, stop=stop)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the guard tells when to stop
    with api.run_cluster_rank(folder, worker) as steps:
        if isinstance(steps, api.Run):
            show_run(steps)
        else:
            for _ in steps:
                pass
