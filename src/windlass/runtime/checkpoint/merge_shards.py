"""Merges the shards of a checkpoint, so that every layer is in one file.

A run may be resumed under any plan, so shards are merged before anybody loads them. A shard is one
rank's part of a layer: of its tensor-parallel shard of each weight, flattened, the elements from
the one on that is part of the checkpoint key. Parts that `TensorPart` describes are merged too.

The files are its safetensors form, one rectangle of a tensor in each, so that other programs read
them too. Its own form has a pickled index, which nobody should read from a file of somebody else.
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from windlass.atomic_files import atomic_write, link_or_copy, storage_errors
from windlass.errors import CheckpointError
from windlass.models import LayerStack, ParamShard, TensorParallelRank, layer_sharding, param_shards
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    is_sharded,
    layer_file,
    part_files,
    shard_files,
)
from windlass.runtime.checkpoint.layer_tensors import frozen_file, open_layer, places_file
from windlass.runtime.checkpoint.safetensors_io import TensorPart, write_tensors
from windlass.runtime.parameters import SHARD_SEPARATOR
from windlass.torch_ext import MomentCodec, StoredMoment

_CPU = torch.device("cpu")
_WHOLE_KINDS = ("steps", "rows", "columns")
"""What every rank that has a part of a weight keeps for all of it."""
_SHARDED_KINDS = ("weight", "moment1", "moment2", "average")


def merge_shards(checkpoint: Checkpoint, stack: LayerStack, into: Path) -> Checkpoint:
    """The same checkpoint with full layers; the checkpoint itself if it is not sharded.

    Args:
        into: folder of the merged checkpoint, on the same disk; replaced if it exists.

    Raises:
        CheckpointError: a shard is missing or belongs to another model.
    """
    shutil.rmtree(into, ignore_errors=True)
    if not (is_sharded(checkpoint.manifest) or part_files(checkpoint.manifest)):
        return checkpoint
    with storage_errors(into):
        into.mkdir()
        for index in range(len(stack.layers)):
            _merge_layer(checkpoint, stack, index, into / layer_file(index))
        manifest = checkpoint.manifest.model_copy(update={"files": {}}).with_checksum()
        atomic_write(into / MANIFEST_FILE, manifest.to_json())
    return Checkpoint(path=into, manifest=manifest, damaged=checkpoint.damaged)


def _merge_layer(checkpoint: Checkpoint, stack: LayerStack, index: int, to: Path) -> None:
    if parts := part_files(checkpoint.manifest, index):
        write_tensors(to, open_parts(checkpoint.path, parts).full_tensors().items())
        return
    files = shard_files(checkpoint.manifest, index)
    full = checkpoint.path / layer_file(index)
    for whole, name in ((full, to), (frozen_file(full), frozen_file(to)),
                        (places_file(full), places_file(to))):  # fmt: skip
        if whole.name in checkpoint.manifest.files:
            link_or_copy(whole, name)
    if not files:
        return
    rows, columns = 1 + max(file.row for file in files), 1 + max(file.column for file in files)
    layer, sharding = stack.layers[index], layer_sharding(stack, index)
    ranks = [
        TensorParallelRank(degree=rows * columns, index=rank, columns=columns)
        for rank in range(rows * columns)
    ]
    shards = [(rank, param_shards(layer, sharding, rank)) for rank in ranks]
    merger = _LayerMerger(stack.names[index], shards)
    for file in files:
        merger.add(checkpoint.path / file.file, file.row * columns + file.column)
    write_tensors(to, merger.full_tensors().items())


def open_parts(folder: Path, names: Sequence[str]) -> "PartFiles":
    """Files of a folder that have rectangles of tensors.

    Raises:
        CheckpointError: a file cannot be read.
    """
    # Torch takes long to import this, and only runs of another stack on several devices need it.
    return PartFiles([folder / name for name in names])


class _LayerMerger:
    """The full tensors of one layer, filled shard by shard.

    Args:
        shards: each tensor-parallel rank with its shards of the layer's weights, by names inside
            the layer.
    """

    def __init__(
        self, name: str, shards: list[tuple[TensorParallelRank, dict[str, ParamShard]]]
    ) -> None:
        self._name, self._shards = name, shards
        self._local: dict[tuple[str, int], Tensor] = {}
        """Tensor-parallel shard of each tensor, by key and rank."""
        self._filled: dict[tuple[str, int], int] = defaultdict(int)
        """Number of elements that are filled, by key and rank."""
        self._unsharded: dict[str, Tensor] = {}
        self._codec = MomentCodec(_CPU)

    def add(self, path: Path, rank: int) -> None:
        """Adds all tensors of a file that tensor-parallel rank `rank` wrote."""
        with open_layer(path) as layer:
            tensors = {key: layer.read(key) for key in layer.keys}
        for key, tensor in self._decoded(tensors).items():
            kind, _, rest = key.partition("/")
            full, _, offset = rest.rpartition(SHARD_SEPARATOR)
            if kind == "buffer":
                self._unsharded[key] = tensor
            elif kind in _WHOLE_KINDS:
                self._unsharded[f"{kind}/{full}"] = tensor
            elif kind in _SHARDED_KINDS:  # other kinds are padding up to a page
                self._fill(f"{kind}/{full}", rank, int(offset), tensor)

    def _decoded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with float32 moments: quantization blocks of shards and weights differ."""
        decoded = dict(tensors)
        for key in tensors:
            kind, _, rest = key.partition("/")
            if kind != "moment1" or tensors[key].dtype in (torch.float32, torch.float64):
                continue
            stored = (
                StoredMoment(decoded[f"moment1/{rest}"], decoded.pop(f"scale1/{rest}", None)),
                StoredMoment(decoded[f"moment2/{rest}"], decoded.pop(f"scale2/{rest}", None)),
            )
            decoded[f"moment1/{rest}"], decoded[f"moment2/{rest}"] = self._codec.decode_all(stored)
        return decoded

    def _fill(self, key: str, rank: int, offset: int, tensor: Tensor) -> None:
        shard = self._shard(key, rank)
        if not self._shards[rank][0].is_first_replica(shard.replicated_over):
            return  # another tensor-parallel rank has the same elements
        if (key, rank) not in self._local:
            self._local[key, rank] = torch.empty(shard.shape, dtype=tensor.dtype)
        flat = self._local[key, rank].view(-1)
        flat[offset : offset + tensor.numel()] = tensor.reshape(-1)
        self._filled[key, rank] += tensor.numel()

    def _shard(self, key: str, rank: int) -> ParamShard:
        inner = key.partition("/")[2].removeprefix(f"{self._name}.")
        shard = self._shards[rank][1].get(inner)
        if shard is None:
            raise CheckpointError(f"the checkpoint has `{key}`, and the model does not")
        return shard

    def full_tensors(self) -> dict[str, Tensor]:
        """All tensors of the layer, by key.

        Raises:
            CheckpointError: a shard is missing.
        """
        full: dict[str, Tensor] = {}
        for (key, rank), local in self._local.items():
            if self._filled[key, rank] != local.numel():
                raise CheckpointError(
                    f"the checkpoint has {self._filled[key, rank]} of {local.numel()} elements of "
                    f"`{key}`, tensor-parallel rank {rank}"
                )
            shard = self._shard(key, rank)
            if key not in full:
                full[key] = torch.empty(shard.full_shape, dtype=local.dtype)
            shard.write_into(full[key], local)
        for key in full:
            for rank, (tp_rank, _) in enumerate(self._shards):
                is_first = tp_rank.is_first_replica(self._shard(key, rank).replicated_over)
                if is_first and (key, rank) not in self._local:
                    raise CheckpointError(
                        f"the checkpoint has nothing of `{key}` of tensor-parallel rank {rank}"
                    )
        return full | self._unsharded


class PartFiles:
    """Files that have rectangles of tensors.

    Args:
        files: all of a layer, or of several; they are in one folder.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._folder = files[0].parent
        self._reader = HuggingFaceStorageReader(str(self._folder))
        self._reader.fs = _Listed(files)
        try:
            metadata = self._reader.read_metadata()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"`{self._folder}` cannot be read: {error}") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            key: each
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def fill(self, into: Mapping[str, Sequence[TensorPart]]) -> None:
        """Reads rectangles of tensors, of which the files may have others.

        Raises:
            CheckpointError: the files lack a tensor, or a part of it.
        """
        items: list[ReadItem] = []
        for key, parts in into.items():
            if key not in self._stored:
                raise CheckpointError(f"`{self._folder}` has no `{key}`: it is of another model")
            chunks = [ChunkStorageMetadata(torch.Size(o), each.shape) for o, each in parts]
            found = create_read_items_for_chunk_list(key, self._stored[key], chunks)
            have = sum(each.lengths.numel() for each in found)
            if have != sum(each.values.numel() for each in parts):
                raise CheckpointError(f"`{self._folder}` lacks a part of `{key}`")
            items += found
        self._reader.read_data(LoadPlan(items), _Planner(into)).wait()

    def full_tensors(self) -> dict[str, Tensor]:
        """All tensors in full, by key.

        Raises:
            CheckpointError: the files lack a part of one.
        """
        full = {
            key: torch.empty(each.size, dtype=each.properties.dtype)
            for key, each in self._stored.items()
        }
        self.fill({key: (TensorPart((0,) * each.dim(), each),) for key, each in full.items()})
        return full


class _Listed(FileSystem):
    """Some files of a folder."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: object) -> list[str]:  # noqa: ARG002  torch's name
        return [str(each) for each in self._files]


class _Planner(DefaultLoadPlanner):
    """Finds the memory for what is read among parts."""

    def __init__(self, into: Mapping[str, Sequence[TensorPart]]) -> None:
        super().__init__()
        self._into = into

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._into[index.fqn][index.index or 0].values
