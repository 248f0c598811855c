"""Checkpoints on disk: a folder of safetensors files and a manifest with their checksums.

    step-00000100/
        manifest.json                 step, position in the data, labels, size and hash of each file
        layer-0000.safetensors        weight/..., moment1/..., moment2/..., steps/... of one layer,
                                      and average/... if the run keeps averages of its weights
        ...

A layer that several ranks have parts of may be in several files instead, of one rank each.

A folder gets its name only when everything in it is on the disk; names that begin with a dot are
temporary, and any later start may remove them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import ValidationError

from windlass.atomic_files import atomic_write, fsync_folder, hash_file, storage_errors
from windlass.document import Document
from windlass.errors import CheckpointError
from windlass.models import PLACES_SUFFIX
from windlass.runtime.checkpoint.layer_tensors import BaseChangedError, read_places
from windlass.runtime.checkpoint.safetensors_io import FileChecksum
from windlass.runtime.optimizer_state.optimizer_state import Averaging
from windlass.runtime.step.step_state import LossScale

MANIFEST_FILE = "manifest.json"

_FORMAT = 2
"""Version of the checkpoint format that is written, and the only one that is read."""

_TRIES, _TRY_SECONDS = 20, 0.1
"""How often the newest checkpoint of a run that goes on is looked for, and the time in between."""

_SHARD_PATTERN = r"([0-9]+)(?:x([0-9]+))?\.[0-9]+\.safetensors"
"""End of a shard's file name: its tensor-parallel rank (or row and column) and its shard index."""


class Manifest(Document):
    """What a checkpoint contains, with a checksum of every file."""

    version: Literal[2] = 2
    step: int
    """Number of updates that the weights have had."""
    samples: int
    """Number of samples consumed in training order; the next step continues after them."""
    seed: int
    """Seed of the run."""
    plan: str
    """Label of the plan."""
    graph: str
    """Label of the graph."""
    files: dict[str, FileChecksum]
    """Size and hash of each file, by name."""
    loss_scale: LossScale | None = None
    """The loss scale of the next step; None where no loss is scaled."""
    averaging: Averaging | None = None
    """How the weights that evaluations read follow from the state; None means the weights."""
    checksum: str = ""
    """SHA-256 of this manifest without its `checksum`."""

    def with_checksum(self) -> Self:
        """The same manifest with its checksum."""
        return self.model_copy(update={"checksum": self._digest()})

    @property
    def is_intact(self) -> bool:
        """Whether the checksum matches the content."""
        return self.checksum == self._digest()

    def _digest(self) -> str:
        content = self.model_dump(mode="json", exclude={"checksum"}, exclude_none=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class RankFiles(Document):
    """The checkpoint files that one rank of several has written."""

    files: dict[str, FileChecksum]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, and the damaged ones that were skipped to find it."""

    path: Path
    manifest: Manifest
    damaged: tuple[str, ...] = ()
    """One sentence for each newer checkpoint that is damaged, newest first."""
    hold: "CheckpointHold | None" = None
    """Keeps the run that it belongs to from removing it; None where nobody else does."""


class CheckpointHold:
    """A shared lock on a checkpoint, which a run that goes on removes only when nobody has one.

    It is kept until `release`, or until nothing refers to it. A file system without locks keeps
    nothing.

    Raises:
        FileNotFoundError: it is gone, or about to be.
    """

    def __init__(self, path: Path) -> None:
        manifest = path / MANIFEST_FILE
        file = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        self.release = weakref.finalize(self, os.close, file)
        """Lets the run remove the checkpoint."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileNotFoundError(f"`{path}` is being removed") from None
        except OSError:
            return
        if os.fstat(file).st_ino != manifest.stat().st_ino:
            raise FileNotFoundError(f"`{path}` was replaced")


def remove_unless_held(path: Path) -> None:
    """Removes a checkpoint at once, or leaves it whole if a reader holds it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = os.open(path / MANIFEST_FILE, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        # Renamed first: a kill while deleting must not leave half a checkpoint.
        renamed = path.with_name(f".{path.name}.old")
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` updates."""
    return f"step-{step:08d}"


def layer_file(index: int, *, shard: tuple[str, int] | None = None) -> str:
    """The file name of a layer, or of one rank's shard of it.

    Args:
        shard: tensor-parallel rank (`3`, or `1x0` for row and column of a grid) and index of the
            optimizer shard; None for the full layer.
    """
    suffix = "" if shard is None else f".{shard[0]}.{shard[1]}"
    return f"layer-{index:04d}{suffix}.safetensors"


class LayerShardFile(NamedTuple):
    """A file with one rank's shard of a layer."""

    file: str
    """File name in the checkpoint's folder."""
    row: int
    """Row of the tensor-parallel rank in its grid; its index where there is only one column."""
    column: int
    """Column of the tensor-parallel rank in its grid."""


def shard_files(manifest: Manifest, index: int) -> tuple[LayerShardFile, ...]:
    """The files with the shards of a layer; none if the layer is in one file."""
    pattern = re.compile(rf"layer-{index:04d}\.{_SHARD_PATTERN}")
    matches = ((name, pattern.fullmatch(name)) for name in manifest.files)
    return tuple(
        LayerShardFile(name, int(match[1]), int(match[2] or 0)) for name, match in matches if match
    )


def is_sharded(manifest: Manifest) -> bool:
    """Whether any layer is saved in shards."""
    return any(re.fullmatch(rf"layer-[0-9]+\.{_SHARD_PATTERN}", name) for name in manifest.files)


def part_file(path: Path, rank: int, number: int) -> Path:
    """The file with some rectangles of a layer's tensors, one of each, beside the layer's file."""
    return path.with_name(f"{path.stem}.part-{rank}-{number}{path.suffix}")


def part_files(manifest: Manifest, index: int | None = None) -> tuple[str, ...]:
    """The files with rectangles of a layer, by default of any; none if it is saved otherwise."""
    layer = "[0-9]+" if index is None else f"{index:04d}"
    pattern = re.compile(rf"layer-{layer}\.part-[0-9]+-[0-9]+\.safetensors")
    return tuple(filter(pattern.fullmatch, manifest.files))


def write_rank_files(folder: Path, rank: int, files: dict[str, FileChecksum]) -> None:
    """Tells rank 0, which completes a checkpoint, what another rank has written."""
    atomic_write(rank_files_path(folder, rank), RankFiles(files=files).to_json())


def take_rank_files(folder: Path, rank: int) -> dict[str, FileChecksum]:
    """Reads and removes what `write_rank_files` left."""
    path = rank_files_path(folder, rank)
    rank_files = RankFiles.model_validate_json(path.read_bytes())
    path.unlink()
    return rank_files.files


def rank_files_path(folder: Path, rank: int) -> Path:
    """The file in which a rank lists what it has written."""
    return folder / f"rank-{rank}.json"


def checkpoint_folders(folder: Path) -> tuple[Path, ...]:
    """All checkpoints in a folder, oldest first; none if there is no such folder."""
    return tuple(sorted(folder.glob("step-*"))) if folder.is_dir() else ()


def latest_checkpoint(folder: Path, *, holds: bool = False) -> Checkpoint | None:
    """The newest complete checkpoint; None if the folder contains none at all.

    Args:
        holds: keeps the run, which may go on meanwhile, from removing what is read.

    Raises:
        CheckpointError: all checkpoints are damaged, one was written in another format, or one
            refers to files that have changed.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(_RemovedError):
            return _newest_whole(folder, holds=holds)
        time.sleep(_TRY_SECONDS)  # whoever removed it has written a newer one
    raise CheckpointError(
        f"the checkpoints in `{folder}` are replaced faster than they can be read; wait until the "
        "run has ended, or keep more of them (`train.keep`)"
    )


def hold_checkpoint(folder: Path, step: int) -> Checkpoint | None:
    """The checkpoint of a step, held while somebody reads it; None if there is none.

    Raises:
        CheckpointError: it is damaged, or was written in another format.
    """
    path = folder / checkpoint_name(step)
    with contextlib.suppress(_RemovedError):
        return _verified(path, holds=True) if path.is_dir() else None
    return None


def _newest_whole(folder: Path, *, holds: bool) -> Checkpoint | None:
    damaged: list[str] = []
    for path in reversed(checkpoint_folders(folder)):
        try:
            checkpoint = _verified(path, holds=holds)
        except (_FormatError, BaseChangedError, _RemovedError):
            raise
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return replace(checkpoint, damaged=tuple(damaged))
    if damaged:
        raise CheckpointError("; ".join((*damaged, "no earlier checkpoint is left")))
    return None


def _verified(path: Path, *, holds: bool) -> Checkpoint:
    """A checkpoint all of whose files are whole."""
    try:
        hold = CheckpointHold(path) if holds and (path / MANIFEST_FILE).is_file() else None
        return Checkpoint(path=path, manifest=verify_checkpoint(path), hold=hold)
    except (CheckpointError, FileNotFoundError) as error:
        if isinstance(error, FileNotFoundError) or not path.exists():
            raise _RemovedError(f"`{path}` was removed") from None
        raise


def link_checkpoint(source: Checkpoint, folder: Path, manifest: Manifest) -> Checkpoint:
    """Publishes the files of a checkpoint as a checkpoint of another run, without copying them.

    Args:
        folder: the other run's folder of checkpoints; created if missing.
    """
    path = folder / checkpoint_name(manifest.step)
    temporary = folder / f".{path.name}.tmp"
    complete = manifest.model_copy(update={"files": source.manifest.files}).with_checksum()
    with storage_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name in complete.files:
            try:
                (temporary / name).hardlink_to(source.path / name)
            except OSError:
                shutil.copyfile(source.path / name, temporary / name)
        atomic_write(temporary / MANIFEST_FILE, complete.to_json())
        fsync_folder(temporary)
        temporary.rename(path)
        fsync_folder(folder)
    return Checkpoint(path=path, manifest=complete)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose files another process has verified.

    Raises:
        CheckpointError: it has no manifest, or one of another format.
    """
    return Checkpoint(path=path, manifest=_read_manifest(path / MANIFEST_FILE))


def verify_checkpoint(path: Path) -> Manifest:
    """Reads all files of a checkpoint and returns its manifest.

    Raises:
        CheckpointError: a file is missing, truncated or changed, or the manifest has another
            format; the message names the file.
        BaseChangedError: a file that it refers to was changed, or is gone.
    """
    manifest = _read_manifest(path / MANIFEST_FILE)
    for name, checksum in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"`{file}` is missing from its checkpoint")
        if file.stat().st_size != checksum.bytes:
            raise CheckpointError(
                f"`{file}` has {file.stat().st_size} bytes where {checksum.bytes} were written"
            )
        if hash_file(file) != checksum.sha256:
            raise CheckpointError(f"`{file}` has changed since it was written: its hash differs")
        if name.endswith(PLACES_SUFFIX):
            read_places(file)
    return manifest


def remove_temporaries(folder: Path) -> None:
    """Removes the unfinished checkpoints of a killed process."""
    if folder.is_dir():
        for path in folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


class _RemovedError(CheckpointError):
    """A checkpoint was removed while it was read, by the run that it belongs to."""


class _FormatError(CheckpointError):
    """A checkpoint was written in an older format; unlike damage, it is not skipped."""


def _read_manifest(path: Path) -> Manifest:
    if not path.is_file():
        raise CheckpointError(f"`{path}` is missing from its checkpoint")
    content = path.read_bytes()
    version = _version(content)
    if version is not None and version < _FORMAT:
        raise _FormatError(
            f"`{path}` has checkpoint format {version} and this version of Windlass reads format "
            f"{_FORMAT}; resume the run with the version that started it, or start a new one"
        )
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise CheckpointError(f"`{path}` is not a valid manifest: {message}") from None
    if not manifest.is_intact:
        raise CheckpointError(f"`{path}` has changed since it was written: its checksum differs")
    return manifest


def _version(content: bytes) -> int | None:
    """The format version that a manifest states; None if it cannot be read."""
    try:
        manifest = json.loads(content)
    except ValueError:
        return None
    version = manifest.get("version") if isinstance(manifest, dict) else None
    return version if isinstance(version, int) else None
