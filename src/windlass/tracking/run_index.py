"""Finds a run by its name, and tells its state."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

from windlass.errors import RecordError, did_you_mean
from windlass.schema import RunState
from windlass.tracking.folder_lock import ID_FILE, LOCK_FILE, is_locked
from windlass.tracking.journal import Journal
from windlass.tracking.run_folder import (
    RUN_FORMAT,
    SHORT_ID_DIGITS,
    read_run_format,
    read_run_id,
)

LAST = "last"
"""Names the newest run; `last~1` the one before it, in the words of git."""
_BEFORE_LAST = re.compile(rf"{LAST}(?:~(\d{{1,9}}))?")
_MAX_NAMES = 5


def describe_other_formats(root: Path) -> str | None:
    """One sentence on the runs under `root` that have another format; None if there are none."""
    formats = {folder: _format(folder) for folder in _folders(root)}
    others = sorted(folder.name for folder, number in formats.items() if number != RUN_FORMAT)
    if not others:
        return None
    names = ", ".join(f"`{name}`" for name in others[:_MAX_NAMES])
    names += f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
    count = "1 run" if len(others) == 1 else f"{len(others)} runs"
    return (
        f"another version of Windlass wrote {count} in `{root}` (this one reads format "
        f"{RUN_FORMAT}): {names}; read them with that version"
    )


def find_run(root: Path, query: str) -> Path:
    """The run folder that `query` names.

    Args:
        query: a path, a folder's name, the beginning of an id or of its short end, `last`, or
            `last~2` for the second run before the last one.

    Raises:
        RecordError: no run matches, more than one does, or the one that does has another format.
    """
    if "/" in query or query in (".", ".."):
        read_run_id(Path(query))
        return Path(query)
    folders = tuple(_folders(root))
    ids = {folder: read_run_id(folder) for folder in folders if _is_readable(folder)}
    before = _BEFORE_LAST.fullmatch(query)
    if before is not None and ids:
        return _run_before_last(root, ids, int(before[1] or 0))
    exact = [folder for folder in ids if query in (folder.name, ids[folder])]
    matches = exact or [folder for folder in ids if _matches(query, folder.name, ids[folder])]
    if len(matches) == 1:
        return matches[0]
    if not matches and (Path(query) / ID_FILE).is_file():
        return Path(query)
    if not matches:
        raise _no_match(root, query, folders, ids)
    names = ", ".join(f"`{folder.name}`" for folder in sorted(matches)[-_MAX_NAMES:])
    raise RecordError(f"`{query}` means {len(matches)} runs: {names}; write more of the name")


def _run_before_last(root: Path, ids: Mapping[Path, str], count: int) -> Path:
    """The run that so many others came after."""
    if count >= len(ids):
        raise RecordError(
            f"`{LAST}~{count}` of {len(ids)} runs in `{root}`; the first one is "
            f"`{LAST}~{len(ids) - 1}`, and `windlass runs` lists them"
        )
    # Ids begin with the time of the start.
    return sorted(ids, key=lambda folder: ids[folder])[-1 - count]


def run_state(folder: Path, journals: Sequence[Journal]) -> RunState:
    """The state of a run, from its lock and the last event of its last attempt."""
    if is_locked(folder / LOCK_FILE):
        return "running"
    end = journals[-1].end if journals else None
    state = end.fields.get("state") if end else None
    return cast(RunState, state) if state in get_args(RunState) else "killed"


def describe_parent(meta: Mapping[str, object]) -> str | None:
    """The run that another one started from, `<end of id>@<step>`; None if it has none."""
    parent = meta.get("parent")
    if not isinstance(parent, Mapping):
        return None
    return f"{str(parent.get('id', '?'))[-SHORT_ID_DIGITS:]}@{parent.get('step', '?')}"


def _no_match(
    root: Path, query: str, folders: Sequence[Path], ids: Mapping[Path, str]
) -> RecordError:
    """What is wrong where no readable run matches; a run of another format may do so."""
    for folder in folders:
        if folder not in ids and (folder.name.startswith(query) or folder.name.endswith(query)):
            try:
                read_run_id(folder)
            except RecordError as error:
                return error
    if not ids:
        others = describe_other_formats(root)
        more = f" ({others})" if others else ""
        return RecordError(f"no run in `{root}`{more}; start one with `windlass train`")
    names = [name for folder in ids for name in (folder.name, ids[folder][-SHORT_ID_DIGITS:])]
    return RecordError(f"no run `{query}` in `{root}`{did_you_mean(query, (LAST, *names))}")


def _is_readable(folder: Path) -> bool:
    return _format(folder) == RUN_FORMAT


def _format(folder: Path) -> int | None:
    """The format of a run; None if its id file cannot be read."""
    try:
        return read_run_format(folder)
    except RecordError:
        return None


def _folders(root: Path) -> Iterator[Path]:
    if root.exists() and not root.is_dir():
        raise RecordError(f"`{root}` is no folder of runs")
    if root.is_dir():
        yield from (folder for folder in root.iterdir() if (folder / ID_FILE).is_file())


def _matches(query: str, name: str, run_id: str) -> bool:
    short = run_id[-SHORT_ID_DIGITS:]
    return run_id.startswith(query) or short.startswith(query) or name.startswith(query)
