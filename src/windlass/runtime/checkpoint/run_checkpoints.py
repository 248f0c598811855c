"""RunCheckpoints: the checkpoints of one run: what it resumes from, saves and names in messages."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.atomic_files import atomic_write, link_or_copy, storage_errors
from windlass.errors import CheckpointError
from windlass.models import LayerStack
from windlass.runtime.checkpoint.async_saver import AsyncSaver
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    Manifest,
    checkpoint_name,
    layer_file,
)
from windlass.runtime.checkpoint.layer_tensors import frozen_file, places_file
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.runtime.checkpoint.safetensors_io import SavedFile, stream_tensors
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.optimizer_state.optimizer_state import Averaging, averaging_of
from windlass.runtime.rank_context import RankContext
from windlass.runtime.step.step_state import LossScale


class RunCheckpoints:
    """Saves the steps of one rank, beside training.

    Args:
        before_save: copies what will be saved, which may then change at once; None if weights stay
            as they are until their layer is saved.
    """

    def __init__(
        self,
        context: RankContext,
        batch: int,
        templates: Sequence[LayerTemplate],
        *,
        save_layer: Callable[[int, Path], Sequence[SavedFile]],
        rank: int,
        world_size: int,
        before_save: Callable[[], None] | None = None,
    ) -> None:
        self._context, self._batch, self._before_save = context, batch, before_save
        self._averaging = averaging_of(context.settings)
        self._has_statistics = any(template.has_running_statistics for template in templates)
        self._saver = AsyncSaver(
            context.checkpoints, len(context.stack.layers), keep=context.settings.keep,
            save_layer=save_layer, device=context.device, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        self.wait_for = self._saver.wait_for
        """Blocks until a layer, by its index, may change."""
        self.raise_if_failed = self._saver.raise_if_failed
        """Raises the error of a save that has ended."""
        self.finish = self._saver.finish
        """Waits until the save under way is on the disk."""
        self.close = self._saver.close
        """Waits for the save under way, and ends its thread."""

    def step_of(self, checkpoint: Checkpoint) -> int:
        """The step of a checkpoint to resume from, which must belong to this run.

        Raises:
            CheckpointError: it is of another model, or was made with another batch.
        """
        manifest, plan = checkpoint.manifest, self._context.plan
        if manifest.graph != plan.graph:
            raise CheckpointError(
                f"`{checkpoint.path}` is of `{manifest.graph}` and the plan of `{plan.graph}`"
            )
        if manifest.samples != manifest.step * self._batch:
            raise CheckpointError(
                f"`{checkpoint.path}` has taken {manifest.samples} samples in {manifest.step} "
                f"steps, not {self._batch} a step; resume with the batch it was made with"
            )
        require_same_averages(checkpoint, self._averaging)
        self._saver.note_existing(manifest.step)
        return manifest.step

    def save(self, step: int, loss_scale: LossScale | None) -> None:
        """Begins to save a step, whose updates are all submitted.

        Args:
            loss_scale: that of the next step; None in other precisions than float16.
        """
        if self._before_save is not None:
            self._saver.finish()
            self._before_save()
        self._saver.begin(
            Manifest(
                step=step,
                samples=step * self._batch,
                seed=self._context.settings.seed,
                plan=self._context.plan.label,
                graph=self._context.plan.graph,
                files={},
                loss_scale=loss_scale,
                averaging=self._averaging,
            )
        )
        if self._has_statistics:
            # They change in the next forward pass, not only in an update.
            self._saver.finish()

    def has(self, step: int) -> bool:
        """Whether a step is the newest one that is saved, once the save under way has ended."""
        return self._saver.newest_after_save() == step

    def last_good(self) -> str:
        """The checkpoint to resume from, for a message."""
        newest = self._saver.newest_after_save()
        if newest is None:
            return "no checkpoint was written yet"
        path = self._context.checkpoints / checkpoint_name(newest)
        return f"the last good checkpoint is `{path}`"


_AVERAGES = ".averages"
"""Folder of averaged weights beside that of merged ones."""


def evaluation_checkpoint(
    checkpoint: Checkpoint, stack: LayerStack, into: Path, *, ema: bool = False
) -> Checkpoint:
    """A checkpoint with every layer in one file, and the weights that an evaluation reads.

    If these are averages, they are written beside `into`, one tensor at a time in memory and
    without any optimizer state.

    Args:
        into: folder of merged shards, on the same disk; replaced if it exists.
        ema: whether averages that are kept beside the weights are meant.

    Raises:
        CheckpointError: a shard is missing or of another model, or no average is kept.
    """
    averaging = checkpoint.manifest.averaging
    if ema and (averaging is None or not averaging.is_kept):
        raise CheckpointError(
            f"`{checkpoint.path}` has no averages of its weights (EMA), which a run keeps with "
            "`train.ema`, such as 0.999; leave `--ema` out"
        )
    merged = merge_shards(checkpoint, stack, into)
    if averaging is None or (averaging.is_kept and not ema):
        return merged
    return _averaged(merged, averaging, len(stack.layers), into.with_name(_AVERAGES))


def require_same_averages(checkpoint: Checkpoint, averaging: Averaging | None) -> None:
    """Refuses to train on from a state of which another run would make other averages.

    An average that is kept may begin or end with any checkpoint.

    Raises:
        CheckpointError: only one of both optimizers averages its weights.
    """
    kinds = {each.kind for each in (checkpoint.manifest.averaging, averaging) if each is not None}
    theirs = checkpoint.manifest.averaging
    if "schedule-free" in kinds and (theirs is None or averaging is None or len(kinds) > 1):
        does, other = (
            ("does", "does not") if theirs and not theirs.is_kept else ("does not", "does")
        )
        raise CheckpointError(
            f"the optimizer that wrote `{checkpoint.path}` {does} average its weights, and that of "
            f"the run {other}; train on with the `train.optimizer` that wrote it"
        )


def _averaged(checkpoint: Checkpoint, averaging: Averaging, layers: int, into: Path) -> Checkpoint:
    shutil.rmtree(into, ignore_errors=True)
    with storage_errors(into):
        into.mkdir()
        for index in range(layers):
            source = checkpoint.path / layer_file(index)
            if source.exists():
                _average_layer(source, averaging, into / source.name)
        manifest = checkpoint.manifest.model_copy(update={"files": {}}).with_checksum()
        atomic_write(into / MANIFEST_FILE, manifest.to_json())
    return Checkpoint(path=into, manifest=manifest, damaged=checkpoint.damaged)


def _average_layer(source: Path, averaging: Averaging, to: Path) -> None:
    """Writes a layer's file with averaged weights and its buffers alone."""
    kept = "average" if averaging.is_kept else "moment1"
    try:
        with safe_open(source, framework="pt") as file:
            keys = [key for key in file.keys() if key.startswith(("weight/", "buffer/"))]  # noqa: SIM118
            shapes = {key: _empty(file, key) for key in keys}

            def values() -> Iterator[Tensor]:
                for key in keys:
                    kind, _, name = key.partition("/")
                    tensor = file.get_tensor(key)
                    other = f"{kept}/{name}"
                    # Weights that are never updated have no average.
                    if kind == "weight" and other in file.keys():  # noqa: SIM118
                        tensor = averaging.value(tensor, file.get_tensor(other))
                    yield tensor

            if keys:
                stream_tensors(to, shapes, values())
            else:
                link_or_copy(source, to)
        for beside in (frozen_file, places_file):  # what is never updated has no average
            if beside(source).exists():
                link_or_copy(beside(source), beside(to))
    except SafetensorError as error:
        raise CheckpointError(f"`{source}` cannot be read: {error}") from None


def _empty(file: safe_open, key: str) -> Tensor:
    """A tensor of a file without its values."""
    return torch.empty_like(file.get_tensor(key), device="meta")
