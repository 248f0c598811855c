"""Saving while training goes on: a thread saves layer by layer, and copies no tensor.

Weights and optimizer state change only in an update. So the thread goes through the layers in the
order of the updates, and the next step's update of a layer waits until that layer is saved, which
the forward and backward passes before it leave time for. A save costs no memory.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from windlass.files import storage_faults, sync_folder, write_whole
from windlass.runtime.checkpoint import (
    MANIFEST_FILE,
    Manifest,
    folder_name,
    layer_file,
    stored,
)
from windlass.runtime.shelf import Proof

Save = Callable[[int, Path], Proof | None]


class Saver:
    """Writes checkpoints into one folder, one at a time, beside the training.

    Args:
        folder: made when the first checkpoint is written.
        layers: how many layers are saved.
        keep: how many checkpoints stay.
        save: saves one layer, as `Residence.save` does.
    """

    def __init__(self, folder: Path, layers: int, *, keep: int, save: Save) -> None:
        self._folder = folder
        self._keep = keep
        self._save_layer = save
        self._written = [threading.Event() for _ in range(layers)]
        for event in self._written:
            event.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-save")
        self._pending: Future[None] | None = None
        self._begun: int | None = None
        self.newest: int | None = None
        """Step of the newest checkpoint that is whole on the disk; None if there is none."""

    def found(self, step: int) -> None:
        """Takes note of a whole checkpoint that was there before."""
        self.newest = step

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
        return folder_name(manifest.step)

    def wait_for(self, layer: int) -> None:
        """Returns when a layer may change."""
        self._written[layer].wait()

    def check(self) -> None:
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
            self.newest = self._begun

    def close(self) -> None:
        """Waits for the save under way and ends the thread; what failed is not told again."""
        self._thread.shutdown(wait=True)

    def _save(self, manifest: Manifest) -> None:
        name = folder_name(manifest.step)
        beside = self._folder / f".{name}.tmp"
        try:
            with storage_faults(self._folder / name):
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
                self._write(beside, manifest)
                self._publish(beside, self._folder / name)
                self._forget_old(manifest.step)
        finally:
            # Also when the disk is full: the training must not wait for ever.
            for event in self._written:
                event.set()
            shutil.rmtree(beside, ignore_errors=True)

    def _write(self, beside: Path, manifest: Manifest) -> None:
        proofs: dict[str, Proof] = {}
        for index, written in enumerate(self._written):
            proof = self._save_layer(index, beside / layer_file(index))
            if proof is not None:
                proofs[layer_file(index)] = proof
            written.set()
        files = {name: proof() for name, proof in proofs.items()}
        whole = manifest.model_copy(update={"files": files}).sealed()
        write_whole(beside / MANIFEST_FILE, whole.to_json())
        sync_folder(beside)

    def _publish(self, beside: Path, final: Path) -> None:
        """Gives the folder its name; one that is there already was found damaged, and goes."""
        if final.exists():
            self._remove(final)
        beside.rename(final)
        sync_folder(self._folder)

    def _forget_old(self, step: int) -> None:
        # A newer one can only be one that a resume passed over as damaged: it does not count.
        good = [path for path in stored(self._folder) if path.name <= folder_name(step)]
        for path in good[: -self._keep]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first: a kill in the midst of deleting must not leave half a checkpoint.
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
