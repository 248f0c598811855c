"""RunCheckpoints: the checkpoints of one run: what it resumes from, saves and names in messages."""

from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.errors import CheckpointError
from windlass.runtime.checkpoint.async_saver import AsyncSaver
from windlass.runtime.checkpoint.averaged_weights import require_same_averages
from windlass.runtime.checkpoint.checkpoint import Checkpoint, Manifest, checkpoint_name
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.optimizer_state.averages import averaging_of
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
