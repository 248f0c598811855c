"""The state of the files of run folders: what has changed since a catalogue read them."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from windlass.errors import is_text
from windlass.record.annotations import ANNOTATIONS_FOLDER
from windlass.schema import ATTEMPTS_FOLDER, JOURNAL_FOLDER, REPORT_FILE
from windlass.tracking import ID_FILE, LOCK_FILE

_UNREAD_FILES = (LOCK_FILE, REPORT_FILE)
_RANK_0 = "0."


def run_stamps(root: Path) -> dict[str, str]:
    """The state of every run under a folder, by the name of its folder.

    A run is read again when its state differs from the one that was noted: when a document, an
    annotation or a journal of rank 0 has another size, time of change or inode, or when there is
    another file. Nothing is opened.
    """
    stamps: dict[str, str] = {}
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except FileNotFoundError:
        return {}
    for name in folders:
        if is_text(name) and (files := _documents(root / name)):
            others = (_journals, _annotations, _attempts)
            state = [files, *(list(one(f"{root}/{name}")) for one in others)]
            stamps[name] = hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()
    return stamps


def _documents(folder: Path) -> Sequence[object]:
    """The files of a run folder itself; empty if it holds no run."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
        if ID_FILE not in entries:
            return []
        return sorted(
            _state(entry)
            for name, entry in entries.items()
            if name not in _UNREAD_FILES and not entry.is_dir()
        )
    except OSError:  # deleted meanwhile, or not readable
        return []


def _journals(folder: str) -> Iterator[object]:
    """Those of rank 0, and the names of all others."""
    for entry in _entries(f"{folder}/{JOURNAL_FOLDER}"):
        yield _state(entry) if entry.name.startswith(_RANK_0) else entry.name


def _annotations(folder: str) -> Iterator[object]:
    yield from map(_state, _entries(f"{folder}/{ANNOTATIONS_FOLDER}"))


def _attempts(folder: str) -> Iterator[object]:
    yield from (entry.name for entry in _entries(f"{folder}/{ATTEMPTS_FOLDER}"))


def _entries(folder: str) -> "list[os.DirEntry[str]]":
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []


def _state(entry: "os.DirEntry[str]") -> tuple[str, int, int, int]:
    try:
        stat = entry.stat()
    except OSError:
        return entry.name, -1, 0, 0
    return entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino
