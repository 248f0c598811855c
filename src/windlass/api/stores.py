"""Stores of runs: those of several sites as one, and this one sent elsewhere."""

from pathlib import Path

from windlass.api.machines import Progress
from windlass.api.runs import RUNS
from windlass.record import MergeReport, merge_folders, sync_runs as sync_store


def merge_runs(
    *sources: Path | str,
    into: Path | str = RUNS,
    checkpoints: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Copies the runs of several folders into one; done again it copies only what is new.

    Args:
        sources: folders that hold run folders.
        into: the folder that then holds all of them.
        checkpoints: copy checkpoints too.
        progress: called with how far it is.

    Raises:
        RecordError: a source is no folder of runs, or was written by a newer Windlass.
        StorageError: the disk is full.
    """
    folders = [Path(source) for source in sources]
    return merge_folders(folders, Path(into), checkpoints=checkpoints, progress=progress)


def sync_runs(
    target: str,
    *,
    root: Path | str = RUNS,
    token: str | None = None,
    checkpoints: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Sends to another store whatever it lacks of the runs here, also of those still going on.

    Args:
        target: a folder, a URL that fsspec opens, or the address of a Windlass server.
        root: the folder that holds the run folders.
        token: the token of the server.
        checkpoints: send checkpoints too.
        progress: called with how far it is.

    Raises:
        RecordError: the target cannot be opened or refuses.
        StorageError: the disk is full.
    """
    return sync_store(Path(root), target, token=token, checkpoints=checkpoints, progress=progress)
