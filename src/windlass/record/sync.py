"""Sends a store of runs to another one, here or elsewhere, and receives one on a server."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from tempfile import TemporaryFile

from windlass.atomic_files import storage_errors
from windlass.errors import RecordError
from windlass.record.annotations import is_change, kept_change_name
from windlass.record.merge import MergeReport, Progress, copy_runs
from windlass.record.remote import ObjectStore, ServerStore
from windlass.record.stores import (
    JOURNAL_NAME,
    FolderStore,
    Store,
    free_journal_name,
    is_annotation,
    is_document,
    is_record_file,
    journal_copies,
    kept_name,
    require_run_id,
)
from windlass.tracking import ID_FILE, MOST_ID_BYTES, RUN_FORMAT, journal_writer_id, unite_journals

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


def sync_runs(
    root: Path,
    target: str,
    *,
    token: str | None = None,
    checkpoints: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Copies into `target` whatever it lacks of the runs under `root`, also of those going on.

    Args:
        root: the folder that holds the runs.
        target: a folder, the address of a Windlass server (`https://...`), or a URL that fsspec
            opens (`s3://bucket/runs`).
        token: the token of the server.
        checkpoints: copy checkpoints too.
        progress: called with how far it is.

    Raises:
        RecordError: the target cannot be opened or refuses, or a run is of a newer Windlass.
        StorageError: the disk is full.
    """
    if not root.is_dir():
        raise RecordError(f"`{root}` is no folder of runs")
    source = FolderStore(root)
    into = open_store(target, token=token)
    report = MergeReport(warnings=list(source.warnings), runs=len(source.runs()))
    copy_runs(source, into, report, checkpoints=checkpoints, progress=progress)
    return report


def open_store(place: str, *, token: str | None = None) -> Store:
    """The store at a path or URL.

    Raises:
        RecordError: it cannot be opened, or a server asks for a token and none is given.
    """
    scheme, separator, _ = place.partition("://")
    if not separator:
        return FolderStore(Path(place))
    if scheme not in ("http", "https"):
        return ObjectStore(place)
    if token is None:
        raise RecordError(
            f"the server at `{place}` asks for a token; name the file that holds it with "
            "`--token-file`"
        )
    return ServerStore(place, token)


class SyncReceiver:
    """What a server does with the files that other sites send, so that none is lost here."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._last = FolderStore(root)

    def runs(self) -> bytes:
        """The names of the folders of all runs by id, as JSON."""
        return json.dumps(FolderStore(self._root).runs()).encode()

    def files(self, run_id: str) -> bytes:
        """Sizes of the files of a run by name, as JSON; none if there is no such run.

        Raises:
            RecordError: `run_id` is no id.
        """
        store = self._store(run_id)
        known = run_id in store.runs()
        return json.dumps(store.files(run_id, checkpoints=True) if known else {}).encode()

    def read(self, run_id: str, name: str, length: int | None = None) -> bytes:
        """The content of a file, or its first `length` bytes.

        Raises:
            RecordError: there is no such file in the record.
        """
        return self._store_with(run_id, name).read(run_id, name, length)

    def digest(self, run_id: str, name: str) -> str:
        """SHA-256 of the content of a file, in hexadecimal.

        Raises:
            RecordError: there is no such file in the record.
        """
        return self._store_with(run_id, name).digest(run_id, name)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[BufferedIOBase]:
        """A file without a name on the disk of the runs, while it is written and taken."""
        with storage_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self._root) as content:
                yield content

    def put(self, run_id: str, name: str, folder: str, content: BufferedIOBase) -> None:
        """Takes a file; sent again it changes nothing.

        Whatever is sent, nothing that can be read here is lost: two copies of a journal become
        one with the records of both, and a document that another one replaces is kept beside it.

        Args:
            folder: the name of the run's folder at the other site, for a run that is new here.

        Raises:
            RecordError: a name leads elsewhere or is not that of the content, the run is being
                written here, or the file would take the place of one that is kept.
        """
        store = self._store(run_id)
        if not is_record_file(name, checkpoints=True):
            raise RecordError("no file of a run's record has this name")
        if not _FOLDER.fullmatch(folder):
            raise RecordError("no folder of a run has this name")
        if run_id not in store.runs():
            store.add_run(run_id, folder)
        elif store.is_busy(run_id):
            raise RecordError(f"run {run_id} is being written here; sync again later")
        content.seek(0)
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        _require_own_name(run_id, name, digest, content)
        content.seek(0)
        if name not in store.files(run_id, checkpoints=True):
            store.write_from(run_id, name, content)
        elif store.digest(run_id, name) != digest:
            self._replace(store, run_id, name, content)

    def _replace(self, store: FolderStore, run_id: str, name: str, content: BufferedIOBase) -> None:
        """Takes a file of which there is another one here."""
        if JOURNAL_NAME.fullmatch(name):
            _unite(store, run_id, name, content.read())
        elif is_document(name) and "+" not in name:
            current = store.read(run_id, name)
            digest = hashlib.sha256(current).hexdigest()
            kept, is_kept = kept_name(store, run_id, name, digest)
            if not is_kept:
                store.write(run_id, kept, current)
            store.write_from(run_id, name, content)
        elif is_annotation(name) and is_change(content.read()):
            current = store.read(run_id, name)
            if is_change(current):
                store.write(run_id, kept_change_name(current), current)
            content.seek(0)
            store.write_from(run_id, name, content)
        else:
            raise _kept_here(name)

    def _store(self, run_id: str) -> FolderStore:
        """The store; it is listed anew only for a run that was not there before."""
        require_run_id(run_id)
        if run_id not in self._last.runs():
            listed = FolderStore(self._root)
            # A run counts once its id file is there, which is sent last.
            for arriving, folder in self._last.runs().items():
                if arriving not in listed.runs():
                    listed.add_run(arriving, folder)
            self._last = listed
        return self._last

    def _store_with(self, run_id: str, name: str) -> FolderStore:
        store = self._store(run_id)
        known = run_id in store.runs() and name in store.files(run_id, checkpoints=True)
        if not known:
            raise RecordError(f"run {run_id} has no file of this name here")
        return store


def _require_own_name(run_id: str, name: str, digest: str, content: BufferedIOBase) -> None:
    """Refuses content that is not what its name says."""
    plain, _, hashed = name.partition("+")
    if is_document(name) and not digest.startswith(hashed):
        raise RecordError(f"`{name}` is no name for this content, whose hash is another one")
    if name == ID_FILE:
        content.seek(0)
        formats = (f"{run_id}\nformat {number}\n" for number in range(1, RUN_FORMAT + 1))
        sent = content.read(MOST_ID_BYTES)
        if sent not in [f"{run_id}\n".encode(), *map(str.encode, formats)]:
            raise RecordError(
                f"the {plain} file is not that of run {run_id}, or of a newer Windlass"
            )


def _unite(store: FolderStore, run_id: str, name: str, theirs: bytes) -> None:
    """Adds what a copy of a journal has to the one that is here, or keeps it beside that."""
    if journal_writer_id(theirs) is None:
        raise _kept_here(name)
    present = store.files(run_id)
    for own in [name, *journal_copies(name, set(present) - {name})]:
        ours = store.read(run_id, own)
        union = unite_journals(ours, theirs)
        if union is not None and union.content == ours:
            raise _kept_here(own)
        if union is not None:
            store.write(run_id, own, union.content)
            return
    store.write(run_id, free_journal_name(name, theirs, present), theirs)


def _kept_here(name: str) -> RecordError:
    return RecordError(f"`{name}` exists here with another content, which is kept")
