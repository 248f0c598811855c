"""Loads weights and optimizer state of a checkpoint into the tensors of a run."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from windlass.atomic_files import atomic_write, fsync_folder, storage_errors
from windlass.errors import CheckpointError
from windlass.models import LayerStack, ParamShard
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    Manifest,
    checkpoint_name,
    layer_file,
)
from windlass.runtime.checkpoint.convert_moments import (
    load_average,
    load_factors,
    load_moments,
    read_average,
    read_moments,
    require_moments,
)
from windlass.runtime.checkpoint.layer_tensors import read_tensor, read_tensors
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, stream_tensors
from windlass.runtime.parameters import LayerParameters, MasterParameter, persistent_buffers
from windlass.torch_ext import MomentCodec


def load_checkpoint(
    checkpoint: Checkpoint, layers: Sequence[LayerParameters], indices: Sequence[int]
) -> None:
    """Loads weights and buffers of a checkpoint into full layers that nobody updates.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    for index, layer in zip(indices, layers, strict=True):
        tensors = {f"weight/{weight.name}": weight.working for weight in layer.frozen}
        tensors |= {f"buffer/{name}": each for name, each in layer.persistent_buffers.items()}
        if tensors:
            read_tensors(checkpoint.path / layer_file(index), tensors)


def load_weights(checkpoint: Checkpoint, stack: LayerStack) -> None:
    """Loads the weights of a checkpoint into the layers of a stack, in place.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    for index, (name, layer) in enumerate(zip(stack.names, stack.layers, strict=True)):
        named = {f"{name}.{path}": weight for path, weight in layer.named_parameters()}
        owned = {each: named[each] for each in named if each not in stack.tied_weights}
        tensors = {f"weight/{each}": weight.detach() for each, weight in owned.items()}
        if tensors:
            read_tensors(checkpoint.path / layer_file(index), tensors)


def load_layer_shard(
    checkpoint: Checkpoint,
    index: int,
    weights: Sequence[MasterParameter],
    layer: LayerParameters,
    shards: Mapping[str, ParamShard],
) -> None:
    """Loads one rank's shard of a layer.

    Args:
        weights: parameters that the rank updates: full ones, tensor-parallel shards, or optimizer
            shards of either.
        shards: the rank's tensor-parallel shard of each parameter, by full name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    file, manifest = checkpoint.path / layer_file(index), checkpoint.manifest
    buffers = {f"buffer/{name}": buffer for name, buffer in layer.persistent_buffers.items()}
    if buffers:
        read_tensors(file, buffers)
    codec = MomentCodec(torch.device("cpu"))
    for weight in weights:
        read_tensors(file, {f"steps/{weight.name}": weight.steps})
        shard = shards[weight.name]
        if tuple(weight.shape) == shard.full_shape:
            load_moments(file, [weight], seed=manifest.seed, step=manifest.step)
            read_tensors(file, {f"weight/{weight.name}": weight.master})
            load_average(weight, read_average(file, weight.name))
        else:
            _load_shard(file, manifest, weight, shard, codec)
        weight.refresh_working_copy()


def read_weight(
    checkpoint: Checkpoint, index: int, shards: Mapping[str, ParamShard], name: str
) -> Tensor:
    """One weight of a layer in full, in the type that the file has.

    Args:
        shards: a tensor-parallel rank's part of each weight, by full name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    full = read_tensor(checkpoint.path / layer_file(index), f"weight/{name}")
    if tuple(full.shape) != shards[name].full_shape:
        raise CheckpointError(
            f"`{checkpoint.path}` has `{name}` as {tuple(full.shape)}, and the model has it as "
            f"{shards[name].full_shape}: it is of another model"
        )
    return full


def _load_shard(
    file: Path, manifest: Manifest, weight: MasterParameter, shard: ParamShard, codec: MomentCodec
) -> None:
    """Loads a shard of one parameter; moments below float32 are quantized again."""

    def part(full: Tensor) -> Tensor:
        flat = shard.extract(full).reshape(-1)
        return flat[weight.offset : weight.offset + weight.master.numel()].view(weight.shape)

    full = torch.empty(shard.full_shape, dtype=weight.master.dtype)
    read_tensors(file, {f"weight/{weight.name}": full})
    weight.master.detach().copy_(part(full))
    average = read_average(file, weight.name)
    load_average(weight, None if average is None else part(average))
    if weight.factors is not None:
        load_factors(file, weight.name, weight.factors)
        return
    seed, step = manifest.seed, manifest.step
    moments = read_moments(
        file, weight.name, shard.full_shape, "float32", codec, seed=seed, step=step
    )
    require_moments(file, weight, len(moments))
    parts = [part(moment.values) for moment in moments]
    if weight.moments[0].values.dtype in (torch.float32, torch.float64):
        for moment, values in zip(weight.moments, parts, strict=True):
            moment.values.copy_(values)
    else:
        codec.encode_all(
            (parts[0], parts[1]), weight.moments,
            seed=seed, step=step, weight=weight.name, first=weight.offset,
        )  # fmt: skip


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
