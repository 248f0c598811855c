"""`export` writes the weights of a run as one file, and its masks as another."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from windlass.api.runs import RUNS, load
from windlass.api.training.legs import request_at_step
from windlass.api.training.resume import objects_of_record
from windlass.api.training.run_files import planned_from_record
from windlass.errors import CheckpointError, RequestError
from windlass.schema import CHECKPOINT_FOLDER, MERGED_CHECKPOINT_FOLDER

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFiles:
    """What `export` wrote."""

    step: int
    """Updates that the weights have had."""
    weights: Path | None
    masks: Path | None
    sparse_layers: int
    """Layers of which `masks` holds a mask."""


def export(
    run: str | Path = "last",
    *,
    to: Path | str | None = None,
    masks: Path | str | None = None,
    root: Path | str = RUNS,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
) -> ExportedFiles:
    """Writes the weights of a run's newest good checkpoint as one safetensors file.

    Absent weights are zeros there: names and shapes are those of the dense model.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        to: file of the weights; None writes none.
        masks: file of the masks, which `sparsity.mask` takes; None writes none.
        root: the folder that holds the run folders.
        model: the model of a run that was given it as an object.

    Raises:
        RequestError: no file is named, or the model was an object that is not given here.
        RecordError: no such run, or one of its files has changed.
        CheckpointError: it has no complete checkpoint, or no sparse layer for `masks`.
        StorageError: a file cannot be written.
    """
    from windlass.runtime import export_masks, export_weights, latest_checkpoint, merge_shards

    if to is None and masks is None:
        raise RequestError("name the file to write: `--to FILE`, `--masks FILE`, or both")
    record = load(run, root=root)
    planned = planned_from_record(record)
    checkpoint = latest_checkpoint(record.folder / CHECKPOINT_FOLDER)
    if checkpoint is None:
        raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
    identity = request_at_step(planned.request, checkpoint.manifest.step).model_identity
    stack = objects_of_record(record, model=model).stack(identity, seed=None)
    weights_file, masks_file = (None if name is None else Path(name) for name in (to, masks))
    layers = 0
    with TemporaryDirectory(dir=record.folder) as folder:
        merged = merge_shards(checkpoint, stack, Path(folder) / MERGED_CHECKPOINT_FOLDER)
        if masks_file is not None:
            layers = export_masks(merged, stack, masks_file)
        if weights_file is not None:
            export_weights(merged, stack, weights_file)
    return ExportedFiles(
        step=checkpoint.manifest.step, weights=weights_file, masks=masks_file, sparse_layers=layers
    )
