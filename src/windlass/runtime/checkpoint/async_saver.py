"""Saving while training goes on: a thread saves layer by layer, and copies no tensor.

Weights and optimizer state change only in an update. So the thread goes through the layers in the
order of the updates, and the next step's update of a layer waits until that layer is saved, which
the forward and backward passes before it leave time for. A save costs no memory.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from windlass.atomic_files import storage_errors, fsync_folder, atomic_write
from windlass.errors import StorageError
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Manifest,
    checkpoint_name,
    layer_file,
    rank_files_path,
    checkpoint_folders,
    write_rank_files,
    take_rank_files,
)
from windlass.runtime.checkpoint.safetensors_io import FileChecksum
from windlass.runtime.checkpoint.safetensors_io import PendingChecksum
from windlass.runtime.checkpoint.safetensors_io import SavedFile

SaveLayer = Callable[[int, Path], SavedFile | None]
_LOOK_SECONDS = 0.02
"""Between two looks for what another device writes."""


class AsyncSaver:
    """Writes checkpoints into one folder, one at a time, beside the training.

    Args:
        folder: made when the first checkpoint is written.
        layers: how many layers are saved.
        keep: how many checkpoints stay.
        save: saves one layer, as `Residence.save` does.
        device: which of the run's devices this process is.
        devices: that write one checkpoint together; the first of them ends it.
    """

    def __init__(
        self,
        folder: Path,
        layers: int,
        *,
        keep: int,
        save_layer: SaveLayer,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._folder = folder
        self._device, self._devices = rank, world_size
        self._keep = keep
        self._save_layer = save_layer
        self._written = [threading.Event() for _ in range(layers)]
        for event in self._written:
            event.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-save")
        self._pending: Future[None] | None = None
        self._abandoned = threading.Event()
        self._begun: int | None = None
        self.newest_step: int | None = None
        """Step of the newest checkpoint that is whole on the disk; None if there is none."""

    def note_existing(self, step: int) -> None:
        """Takes note of a whole checkpoint that was there before."""
        self.newest_step = step

    def begin(self, manifest: Manifest) -> str:
        """Begins a checkpoint; tensors must not change except after `wait_for` their layer.

        Args:
            manifest: without `files` and `check`.

        Returns:
            The checkpoint's name.

        Raises:
            StorageError: the save before this one failed.
        """
        self.finish()
        for event in self._written:
            event.clear()
        self._begun = manifest.step
        self._pending = self._thread.submit(self._save, manifest)
        return checkpoint_name(manifest.step)

    def wait_for(self, layer: int) -> None:
        """Returns when a layer may change."""
        self._written[layer].wait()

    def raise_if_failed(self) -> None:
        """Raises what went wrong in a save that has ended; never waits.

        Raises:
            StorageError: the disk is full or closed.
        """
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the save under way, if any, is on the disk.

        Raises:
            StorageError: the disk is full or closed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            self.newest_step = self._begun

    def newest_after_save(self) -> int | None:
        """Step of the newest whole checkpoint once the save under way has ended, well or not."""
        with contextlib.suppress(StorageError, OSError):
            self.finish()
        return self.newest_step

    def close(self) -> None:
        """Waits for the save under way and ends the thread; what failed is not told again.

        It does not wait for other devices, which may have ended.
        """
        self._abandoned.set()
        self._thread.shutdown(wait=True)

    def _save(self, manifest: Manifest) -> None:
        name = checkpoint_name(manifest.step)
        beside = self._folder / f".{name}.tmp"
        try:
            with storage_errors(self._folder / name):
                if self._devices == 1:
                    shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True, exist_ok=True)
                proofs = self._write(beside)
                if self._device:
                    write_rank_files(beside, self._device, proofs)
                    self._await(self._folder / name)
                    return
                proofs |= self._told(beside)
                whole = manifest.model_copy(update={"files": proofs}).with_checksum()
                atomic_write(beside / MANIFEST_FILE, whole.to_json())
                fsync_folder(beside)
                self._publish(beside, self._folder / name)
                self._forget_old(manifest.step)
        finally:
            # Also when the disk is full: the training must not wait for ever.
            for event in self._written:
                event.set()
            if not self._device:
                shutil.rmtree(beside, ignore_errors=True)

    def _write(self, beside: Path) -> dict[str, FileChecksum]:
        """Writes this device's files, and tells what each must be to count as whole."""
        proofs: dict[Path, PendingChecksum] = {}
        for index, written in enumerate(self._written):
            saved = self._save_layer(index, beside / layer_file(index))
            if saved is not None:
                proofs[saved.path] = saved.checksum
            written.set()
        return {path.name: proof() for path, proof in proofs.items()}

    def _told(self, beside: Path) -> dict[str, FileChecksum]:
        """What the other devices have written; returns when all have."""
        found: dict[str, FileChecksum] = {}
        for device in range(1, self._devices):
            self._await(rank_files_path(beside, device))
            found |= take_rank_files(beside, device)
        return found

    def _await(self, path: Path) -> None:
        """Returns when a file of another device is there, or nobody wants it any more."""
        while not path.exists() and not self._abandoned.wait(_LOOK_SECONDS):
            pass
        if self._abandoned.is_set():
            raise OSError(f"the other devices left before `{path}` was there")

    def _publish(self, beside: Path, final: Path) -> None:
        """Gives the folder its name; one that is there already was found damaged, and goes."""
        if final.exists():
            self._remove(final)
        beside.rename(final)
        fsync_folder(self._folder)

    def _forget_old(self, step: int) -> None:
        # A newer one can only be one that a resume passed over as damaged: it does not count.
        good = [path for path in checkpoint_folders(self._folder) if path.name <= checkpoint_name(step)]
        for path in good[: -self._keep]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first: a kill in the midst of deleting must not leave half a checkpoint.
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
