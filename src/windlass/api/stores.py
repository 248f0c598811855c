"""Stores of runs: those of several sites as one, and this one sent elsewhere."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from windlass.answer import Shown
from windlass.errors import RecordError, RequestError
from windlass.flags import AnyPath, Flag, Watch
from windlass.jobs import Progress
from windlass.record import RUNS, MergeReport, merge_folders, sync_runs as sync_store
from windlass.training import never_stop

_SHORTEST_PAUSE, _PAUSE_FACTOR = 5.0, 10.0
"""Seconds between two looks at the runs, and the pause in durations of a look."""
_NAP_SECONDS = 0.2


class ShownMerge(Shown[MergeReport]):
    """What a merge did."""

    def lines(self) -> Iterator[str]:
        """What was copied, and the warnings."""
        return self.value.lines(str(self.given.get("into", RUNS)))


def merge_runs(
    *sources: AnyPath,
    into: AnyPath = RUNS,
    checkpoints: Flag = False,
    progress: Watch = None,
) -> Annotated[MergeReport, ShownMerge]:
    """Copy the runs of several folders into one; done again it copies only what is new.

    For example: `windlass merge site-a/runs site-b/runs --into runs`.

    Args:
        sources: Folders that hold run folders.
        into: The folder that then holds all of them.
        checkpoints: Copy checkpoints too.
        progress: Called with how far it is.

    Raises:
        RequestError: no folder is named.
        RecordError: a source is no folder of runs, or was written by a newer Windlass.
        StorageError: the disk is full.
    """
    if not sources:
        raise RequestError("name at least one folder of runs to merge")
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


def follow_sync(
    target: str,
    *,
    root: Path | str = RUNS,
    token: str | None = None,
    checkpoints: bool = False,
    pause_seconds: float = _SHORTEST_PAUSE,
    stop: Callable[[], bool] = never_stop,
) -> Iterator[MergeReport | str]:
    """Goes on sending what is added to the runs here: reports of what was sent.

    Runs never wait for it: they write to their own disk. While the target is away it is asked again
    and again, and gets then what it lacks; the first refusal of a row is a sentence.

    Args:
        target: a folder, a URL that fsspec opens, or the address of a Windlass server.
        root: the folder that holds the run folders.
        token: the token of the server.
        checkpoints: send checkpoints too.
        pause_seconds: shortest pause between two looks at the runs.
        stop: asked again and again; True ends.
    """
    fault = ""
    while not stop():
        began = time.monotonic()
        try:
            report = sync_runs(target, root=root, token=token, checkpoints=checkpoints)
        except RecordError as error:
            if str(error) != fault:
                yield str(error)
            fault = str(error)
        else:
            fault = ""
            if report.copied_files:
                yield report
        pause = max(pause_seconds, _PAUSE_FACTOR * (time.monotonic() - began))
        end = time.monotonic() + pause
        while not stop() and time.monotonic() < end:
            time.sleep(_NAP_SECONDS)
