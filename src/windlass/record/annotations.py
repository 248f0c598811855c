"""Annotations: what people add to a run afterwards, one immutable file for each change.

`annotations/<uuid7>.json` in the run folder holds one change. Changes count in the order of their
names, so merging two copies of a run is a union of their files.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from windlass.atomic_files import atomic_write, read_regular_file
from windlass.errors import InputErrors, RecordError, is_text, shorten
from windlass.tracking import uuid7

ANNOTATIONS_FOLDER = "annotations"
_MAX_TAG_CHARACTERS = 200
_MAX_NOTE_CHARACTERS = 20_000
_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """What people have added to a run, all changes together."""

    tags: tuple[str, ...] = ()
    """Sorted."""
    notes: tuple[str, ...] = ()
    """In the order in which they were written."""
    archived: bool = False
    """Whether lists leave the run out."""
    broken: bool = False
    """Whether the run is no example for others: no verdict compares with it."""
    faults: tuple[str, ...] = ()
    """One sentence for each file that cannot be read; it counts as no change."""


def annotate(
    folder: Path,
    *,
    tags: Sequence[str] = (),
    remove: Sequence[str] = (),
    note: str | None = None,
    archived: bool | None = None,
    broken: bool | None = None,
    change_id: str | None = None,
) -> Annotations:
    """Adds one change to a run, also to one that is going on, and returns all of them together.

    Args:
        folder: the run folder.
        tags: words to find the run by.
        remove: tags to take away.
        note: a text to add; earlier notes stay.
        archived: whether lists leave the run out; None changes nothing.
        broken: whether verdicts leave the run out; None changes nothing.
        change_id: name of the change, which counts in the order of names; a change of the same
            name is replaced. None is a new one, after all others.

    Raises:
        RecordError: the change is empty.
        InputErrors: a tag or a note is empty, too long or no text.
        StorageError: the folder cannot be written.
    """
    _require_words(tags, remove, note)
    change: dict[str, object] = {
        "tags": list(tags),
        "remove": list(remove),
        "note": note,
        "archived": archived,
        "broken": broken,
    }
    change = {key: value for key, value in change.items() if value not in (None, [])}
    if not change:
        raise RecordError("nothing to note; give a tag, a note, or what has changed")
    path = folder / ANNOTATIONS_FOLDER / f"{change_id or uuid7()}.json"
    atomic_write(path, json.dumps(change, indent=1, ensure_ascii=False) + "\n")
    return read_annotations(folder)


def read_annotations(folder: Path) -> Annotations:
    """All changes of a run together; a damaged file is a fault, and counts as no change."""
    tags: dict[str, None] = {}
    notes: list[str] = []
    flags = {"archived": False, "broken": False}
    faults: list[str] = []
    for path in annotation_files(folder):
        try:
            change = _read_change(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is damaged"
            faults.append(f"{ANNOTATIONS_FOLDER}/{path.name}: {reason}")
            continue
        tags |= dict.fromkeys(_words(change, "tags"))
        for tag in _words(change, "remove"):
            tags.pop(tag, None)
        if isinstance(note := change.get("note"), str) and is_text(note):
            notes.append(note)
        flags |= {key: bool(change[key]) for key in flags if isinstance(change.get(key), bool)}
    return Annotations(tags=tuple(sorted(tags)), notes=tuple(notes), faults=tuple(faults), **flags)


def annotation_files(folder: Path) -> tuple[Path, ...]:
    """The files of changes in their order; none if there is no folder of them."""
    try:
        return tuple(sorted((folder / ANNOTATIONS_FOLDER).glob("[0-9a-f]*.json")))
    except OSError:
        return ()


def kept_change_name(content: bytes) -> str:
    """The name under which an annotation is kept whose own name another one has: of its hash."""
    return f"{ANNOTATIONS_FOLDER}/{UUID(bytes=hashlib.sha256(content).digest()[:16])}.json"


def is_change(content: bytes) -> bool:
    """Whether the content of an annotation can be read."""
    try:
        return bool(_parse_change(content))
    except (ValueError, RecursionError):
        return False


def _read_change(path: Path) -> Mapping[str, object]:
    return _parse_change(read_regular_file(path, most_bytes=_MAX_FILE_BYTES))


def _parse_change(content: bytes) -> Mapping[str, object]:
    change = json.loads(content)
    if not isinstance(change, dict):
        raise ValueError("no table")  # noqa: TRY004  told as damage, like all other faults
    return change


def _words(change: Mapping[str, object], key: str) -> list[str]:
    words = change.get(key, [])
    words = words if isinstance(words, list) else []
    return [word for word in words if isinstance(word, str) and is_text(word)]


def _require_words(tags: Sequence[str], remove: Sequence[str], note: str | None) -> None:
    texts = [("tag", tag, _MAX_TAG_CHARACTERS) for tag in (*tags, *remove)]
    if note is not None:
        texts.append(("note", note, _MAX_NOTE_CHARACTERS))
    faults = [
        f"the {kind} `{shorten(text)}` {fault}"
        for kind, text, most in texts
        if (fault := _fault_of_text(text, most))
    ]
    if faults:
        raise InputErrors(faults)


def _fault_of_text(text: str, most: int) -> str | None:
    if not text.strip():
        return "is empty; write a word"
    if not is_text(text):
        return "is not UTF-8 text, or has a NUL"
    if len(text) > most:
        return f"has {len(text)} characters, more than {most}; shorten it"
    return None
