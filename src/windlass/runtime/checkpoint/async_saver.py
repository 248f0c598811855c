"""Asynchronous saving: a thread writes a checkpoint layer by layer while training goes on.

Weights and optimizer state change only in an update. So the thread saves the layers in the order of
their updates, and the next step's update of a layer waits until that layer is saved, for which the
forward and backward passes in between leave time. No tensor is copied on a CPU: a save costs no
memory. On an accelerator the thread copies in a stream of its own, which begins where the last step
ended, so that no pass waits for a copy.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from windlass.atomic_files import atomic_write, fsync_folder, storage_errors
from windlass.errors import StorageError
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Manifest,
    checkpoint_folders,
    checkpoint_name,
    layer_file,
    rank_files_path,
    remove_unless_held,
    take_rank_files,
    write_rank_files,
)
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, PendingChecksum, SavedFile
from windlass.torch_ext import Device

SaveLayer = Callable[[int, Path], Sequence[SavedFile]]
"""Saves the layer of an index to a file, as `ParamStore.save_layer` does."""

_POLL_SECONDS = 0.02
"""Interval between checks for a file that another rank writes."""


class AsyncSaver:
    """Writes checkpoints into one folder, one at a time, in a thread.

    Args:
        folder: checkpoint folder; created when the first checkpoint is written.
        world_size: number of ranks that write one checkpoint together; rank 0 completes it.
    """

    def __init__(
        self,
        folder: Path,
        layers: int,
        *,
        keep: int,
        save_layer: SaveLayer,
        device: Device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._folder, self._has_made_folder = folder, False
        self._rank, self._world_size = rank, world_size
        self._keep = keep
        self._save_layer = save_layer
        self._device, self._stream = device, device.new_stream()
        self._updated = device.new_event()
        """Recorded behind all updates that are to be saved."""
        self._saved = [threading.Event() for _ in range(layers)]
        for event in self._saved:
            event.set()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="windlass-save", initializer=device.activate
        )
        self._pending: Future[None] | None = None
        self._abandoned = threading.Event()
        self._pending_step: int | None = None
        self.newest_step: int | None = None
        """Step of the newest complete checkpoint on the disk; None if there is none."""

    def note_existing(self, step: int) -> None:
        """Records that a complete checkpoint of `step` exists already."""
        self.newest_step = step

    def begin(self, manifest: Manifest) -> str:
        """Begins a checkpoint; from now on a layer may change only after `wait_for` it.

        Args:
            manifest: the manifest without `files` and `checksum`.

        Returns:
            Name of the checkpoint.

        Raises:
            StorageError: the previous save failed, or the folder cannot be made.
        """
        self.finish()
        self._make_folder()
        for event in self._saved:
            event.clear()
        self._pending_step = manifest.step
        self._updated.record(self._device.current_stream())
        self._pending = self._thread.submit(self._save, manifest)
        return checkpoint_name(manifest.step)

    def _make_folder(self) -> None:
        """Makes the folder of checkpoints once: one that is deleted during the run stays so."""
        if not self._has_made_folder:
            with storage_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            self._has_made_folder = True

    def wait_for(self, layer: int) -> None:
        """Blocks until a layer may change."""
        self._saved[layer].wait()

    def raise_if_failed(self) -> None:
        """Raises the error of a save that has ended; never waits."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the save under way, if any, is on the disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except FileNotFoundError:
            if self._folder.exists():
                raise
            # The run folder was deleted during the save: its journal says so.
        else:
            self.newest_step = self._pending_step

    def newest_after_save(self) -> int | None:
        """Waits for the save under way, and returns the step of the newest complete checkpoint."""
        with contextlib.suppress(StorageError, OSError):
            self.finish()
        return self.newest_step

    def close(self) -> None:
        """Waits for the save under way and ends the thread; errors are not raised again.

        It does not wait for other ranks, which may have ended.
        """
        self._abandoned.set()
        self._thread.shutdown(wait=True)

    def _save(self, manifest: Manifest) -> None:
        name = checkpoint_name(manifest.step)
        temporary = self._folder / f".{name}.tmp"
        try:
            with storage_errors(self._folder / name):
                if self._world_size == 1:
                    shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(exist_ok=True)
                files = self._write_layers(temporary)
                if self._rank:
                    write_rank_files(temporary, self._rank, files)
                    self._wait_for_file(self._folder / name)
                    return
                files |= self._files_of_other_ranks(temporary)
                complete = manifest.model_copy(update={"files": files}).with_checksum()
                atomic_write(temporary / MANIFEST_FILE, complete.to_json())
                fsync_folder(temporary)
                self._publish(temporary, self._folder / name)
                self._remove_old(manifest.step)
        finally:
            # Also if the disk is full: training must not wait forever.
            for event in self._saved:
                event.set()
            if not self._rank:
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_layers(self, folder: Path) -> dict[str, FileChecksum]:
        """Writes this rank's files, and returns their checksums by name."""
        checksums: dict[Path, PendingChecksum] = {}
        self._updated.wait(self._stream)
        with self._device.use_stream(self._stream):
            for index, event in enumerate(self._saved):
                for saved in self._save_layer(index, folder / layer_file(index)):
                    checksums[saved.path] = saved.checksum
                event.set()
        return {path.name: checksum() for path, checksum in checksums.items()}

    def _files_of_other_ranks(self, folder: Path) -> dict[str, FileChecksum]:
        """Waits for all other ranks, and returns the checksums of what they have written."""
        files: dict[str, FileChecksum] = {}
        for rank in range(1, self._world_size):
            self._wait_for_file(rank_files_path(folder, rank))
            files |= take_rank_files(folder, rank)
        return files

    def _wait_for_file(self, path: Path) -> None:
        """Waits for a file of another rank, until it exists or this saver is closed."""
        while not path.exists() and not self._abandoned.wait(_POLL_SECONDS):
            pass
        if self._abandoned.is_set():
            raise OSError(f"the other ranks left before `{path}` was there")

    def _publish(self, temporary: Path, final: Path) -> None:
        """Gives the folder its final name; an existing one was found damaged and is removed."""
        if final.exists():
            remove_unless_held(final)
        temporary.rename(final)
        fsync_folder(self._folder)

    def _remove_old(self, step: int) -> None:
        # A newer checkpoint can only be one that a resume skipped as damaged: it does not count.
        name = checkpoint_name(step)
        complete = [path for path in checkpoint_folders(self._folder) if path.name <= name]
        for path in complete[: -self._keep]:
            remove_unless_held(path)  # one that somebody reads is removed later
