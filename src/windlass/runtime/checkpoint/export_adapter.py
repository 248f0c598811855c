"""Adapters of a checkpoint, and what is trained whole beside them, as a folder of PEFT."""

import json
import shutil
import uuid
from pathlib import Path

from torch import Tensor

from windlass.atomic_files import atomic_write, fsync_folder, storage_errors
from windlass.models import LayerStack, PeftAdapter, linear_layers
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.export_huggingface import require_new_folder
from windlass.runtime.checkpoint.layer_tensors import read_tensor
from windlass.runtime.checkpoint.safetensors_io import write_tensors


def export_adapter(
    checkpoint: Checkpoint, stack: LayerStack, adapter: PeftAdapter, to: Path
) -> None:
    """Writes a folder that PEFT loads beside the base model, whole or not at all.

    Args:
        checkpoint: a complete checkpoint, with every layer in one file.
        stack: the model; its weights are not touched.
        adapter: names and configuration.
        to: the folder, which does not exist yet or is empty.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
        StorageError: the folder is not empty, or the disk is full or not writable.
    """
    require_new_folder(to)
    tensors: dict[str, Tensor] = {}
    for linear in linear_layers(stack, adapted=True):
        a, b = (_weight(checkpoint, stack, f"{linear}.lora_{each}") for each in "ab")
        tensors |= adapter.tensors(linear, a, b)
    for weight in adapter.whole:
        tensors |= adapter.whole_tensors(weight, _weight(checkpoint, stack, weight))
    partial = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}.partial")
    with storage_errors(to):
        try:
            partial.mkdir(parents=True)
            content = json.dumps(adapter.content(tensors), indent=2, sort_keys=True) + "\n"
            atomic_write(partial / "adapter_config.json", content)
            write_tensors(partial / "adapter_model.safetensors", sorted(tensors.items()))
            partial.replace(to)
            fsync_folder(to.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _weight(checkpoint: Checkpoint, stack: LayerStack, name: str) -> Tensor:
    """The values of a weight by its full name."""
    return read_tensor(checkpoint.path / layer_file(stack.layer_of(name)), f"weight/{name}")
