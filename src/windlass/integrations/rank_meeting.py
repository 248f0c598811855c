"""How the ranks of a loop that is not Windlass's own come to log into one run folder."""

import sys
import time
from pathlib import Path
from typing import NamedTuple

from windlass.errors import RecordError, RequestError
from windlass.tracking import ID_FILE, LOCK_FILE, is_locked, journal_files

_MESSAGE_BYTES = 4096
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


class RunPlace(NamedTuple):
    """Where a run is, for ranks that did not create it."""

    folder: Path
    attempt: int


def distributed_rank() -> int | None:
    """The rank of this process in `torch.distributed`; None if that is not initialized."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    return int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else None


def share_place(place: RunPlace | None) -> RunPlace | None:
    """Rank 0's place on all ranks of `torch.distributed`; every rank calls it at once.

    Args:
        place: on rank 0 where the run is, or None if it could not be created; not read elsewhere.
    """
    import torch
    from torch import distributed

    on_device = distributed.get_backend() not in ("gloo", "mpi")
    device = torch.accelerator.current_accelerator() if on_device else torch.device("cpu")
    text = f"{place.attempt}\n{place.folder.absolute()}".encode() if place else b""
    content = list(text[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"))
    message = torch.tensor(content, dtype=torch.uint8, device=device)
    distributed.broadcast(message, 0)
    attempt, _, folder = bytes(message.tolist()).rstrip(b"\0").decode().partition("\n")
    return RunPlace(Path(folder), int(attempt)) if folder else None


def await_place(folder: Path) -> RunPlace:
    """The place of a run once rank 0 has created or continued it, which is waited for a minute.

    Raises:
        RecordError: rank 0 does not come.
    """
    end = time.monotonic() + _WAIT_SECONDS
    while not ((folder / ID_FILE).is_file() and is_locked(folder / LOCK_FILE)):
        if time.monotonic() > end:
            raise RecordError(
                f"no rank 0 has opened a run in `{folder}` for {_WAIT_SECONDS:.0f} s; call "
                "`windlass.init` with the same folder on rank 0 too"
            )
        time.sleep(_POLL_SECONDS)
    attempts = [file.attempt for file in journal_files(folder) if file.rank == 0]
    return RunPlace(folder, max(attempts, default=1))


def require_folder(folder: Path | None, rank: int) -> Path:
    """The folder in which rank 0 opens the run.

    Raises:
        RequestError: none was named.
    """
    if folder is None:
        raise RequestError(
            f"rank {rank} does not know the run of rank 0; initialize torch.distributed first, or "
            "name one `folder` on all ranks"
        )
    return folder
