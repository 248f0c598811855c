"""Weights from files of another software as the first checkpoint of a run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from windlass.atomic_files import atomic_write, fsync_folder, storage_errors
from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    Manifest,
    checkpoint_name,
    layer_file,
)
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, stream_tensors
from windlass.runtime.parameters import persistent_buffers


def import_weights(stack: LayerStack, folder: Path, manifest: Manifest) -> Checkpoint:
    """Writes a checkpoint of weights and running statistics alone, in the types of their files.

    One parameter at a time is in memory.

    Args:
        stack: a model on the meta device that knows where its weights are.
        folder: the run's folder of checkpoints; created if missing.

    Raises:
        ModelError: a file with weights cannot be read.
    """
    path = folder / checkpoint_name(manifest.step)
    temporary = folder / f".{path.name}.tmp"
    files = {}
    with storage_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for index in range(len(stack.layers)):
            file = temporary / layer_file(index)
            stream_tensors(file, dict(_tensors(stack, index)), _values(stack, index))
            files[file.name] = FileChecksum.of(file)
        complete = manifest.model_copy(update={"files": files}).with_checksum()
        atomic_write(temporary / MANIFEST_FILE, complete.to_json())
        fsync_folder(temporary)
        temporary.rename(path)
        fsync_folder(folder)
    return Checkpoint(path=path, manifest=complete)


def _tensors(stack: LayerStack, index: int) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that a layer owns, on the meta device, by its name in a checkpoint."""
    if stack.weights is None:
        return
    name = stack.names[index]
    for path, parameter in stack.layers[index].named_parameters():
        full_name = f"{name}.{path}"
        if full_name not in stack.tied_weights:
            yield f"weight/{full_name}", parameter.to(stack.weights.dtype(full_name))
    for full_name, buffer in persistent_buffers(name, stack.layers[index]).items():
        if full_name in stack.weights.parameters:
            yield f"buffer/{full_name}", buffer.to(stack.weights.dtype(full_name))


def _values(stack: LayerStack, index: int) -> Iterator[Tensor]:
    for key, _ in _tensors(stack, index):
        if stack.weights is not None:
            yield stack.weights.read(key.partition("/")[2])
