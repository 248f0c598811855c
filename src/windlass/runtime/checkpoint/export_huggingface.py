"""Weights of a checkpoint as a folder of Hugging Face, and adapters as a folder of PEFT."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from windlass.atomic_files import atomic_folder, atomic_write, require_writable
from windlass.errors import StorageError
from windlass.models import (
    ExportLayout,
    LayerStack,
    PeftAdapter,
    TransformersLayout,
    linear_layers,
)
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.export_weights import dense_tensors
from windlass.runtime.checkpoint.layer_tensors import read_tensor
from windlass.runtime.checkpoint.safetensors_io import stream_tensors, write_tensors

_STEM = "model"
SHARD_BYTES = 5 * 10**9
"""Size of a file that is not exceeded, unless by one tensor alone."""


def export_huggingface(
    checkpoint: Checkpoint,
    stack: LayerStack,
    layout: ExportLayout | TransformersLayout,
    to: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that `transformers` loads, whole or not at all.

    One parameter at a time is in memory.

    Args:
        to: the folder, which does not exist yet or is empty.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
        ModelError: a value is too large for its type.
        StorageError: the folder is not empty, or the disk is full or not writable.
    """
    with torch.device("meta"):
        shapes = {name: tensor.to("meta") for name, tensor in _tensors(stack, layout, None)}
    shards = _shards(shapes, shard_bytes)
    files = _file_names(len(shards))
    values = (value for _, value in _tensors(stack, layout, checkpoint))
    require_new_folder(to)
    with atomic_folder(to) as folder:
        for name, content in layout.files.items():
            atomic_write(folder / name, content)
        for file, names in zip(files, shards, strict=True):
            shard = {name: shapes[name] for name in names}
            stream_tensors(folder / file, shard, islice(values, len(names)))
        if len(files) > 1:
            index = _index(shapes, files, shards)
            atomic_write(folder / f"{_STEM}.safetensors.index.json", index)


def export_adapter(
    checkpoint: Checkpoint, stack: LayerStack, adapter: PeftAdapter, to: Path
) -> None:
    """Writes a folder that PEFT loads beside the base model, whole or not at all.

    Args:
        to: the folder, which does not exist yet or is empty.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
        StorageError: the folder is not empty, or the disk is full or not writable.
    """

    def weight(name: str) -> Tensor:
        file = checkpoint.path / layer_file(stack.layer_of(name))
        return read_tensor(file, f"weight/{name}")

    require_new_folder(to)
    with atomic_folder(to) as folder:
        tensors: dict[str, Tensor] = {}
        for linear in linear_layers(stack, adapted=True):
            a, b = (weight(f"{linear}.lora_{each}") for each in "ab")
            tensors |= adapter.tensors(linear, a, b)
        for name in adapter.whole:
            tensors |= adapter.whole_tensors(name, weight(name))
        content = json.dumps(adapter.content(tensors), indent=2, sort_keys=True) + "\n"
        atomic_write(folder / "adapter_config.json", content)
        write_tensors(folder / "adapter_model.safetensors", sorted(tensors.items()))


def require_new_folder(path: Path) -> None:
    """Refuses a folder to write that holds something.

    Raises:
        StorageError: it does, or it is a file, or cannot be written.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        raise StorageError(f"`{path}` is there already; name another folder")
    require_writable(path)


def _tensors(
    stack: LayerStack, layout: ExportLayout | TransformersLayout, checkpoint: Checkpoint | None
) -> Iterator[tuple[str, Tensor]]:
    """All tensors in their order; shapes and types alone without a checkpoint."""
    written: dict[str, None] = {}
    for index in range(len(stack.layers)):
        for name, tensor in layout.tensors(dense_tensors(stack, index, checkpoint)):
            written[name] = None
            yield name, tensor
    yield from layout.other_tensors(written)


def _shards(shapes: Mapping[str, Tensor], most_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, in their order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in shapes.items():
        if shards[-1] and size + tensor.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [f"{_STEM}.safetensors"]
    return [f"{_STEM}-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]


def _index(
    shapes: Mapping[str, Tensor], files: Sequence[str], shards: Sequence[Sequence[str]]
) -> str:
    """Which file holds which tensor, as JSON."""
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    size = sum(tensor.nbytes for tensor in shapes.values())
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(content, indent=2) + "\n"
