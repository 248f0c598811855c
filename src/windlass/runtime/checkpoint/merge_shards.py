"""Joined: a checkpoint that several devices wrote in parts, with each layer whole in one file.

A run may be resumed under any plan, so parts are put together before anybody reads them. A part is
one device's share of a layer: of a slice of each weight, laid flat, the shard that its name says
begins at some element.
"""

import os
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.atomic_files import storage_errors, atomic_write
from windlass.errors import CheckpointError
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_params import ParamShard, param_shards
from windlass.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    is_sharded,
    layer_file,
    shard_files,
)
from windlass.runtime.checkpoint.safetensors_io import write_tensors
from windlass.runtime.parameters import SHARD_SEPARATOR
from windlass.torch_ext.quantized_moments import MomentCodec, StoredMoment

_CPU = torch.device("cpu")
_FILLED = ("weight", "moment1", "moment2")


def merge_shards(checkpoint: Checkpoint, stack: LayerStack, into: Path) -> Checkpoint:
    """The same checkpoint with whole layers; itself if it has them already.

    Args:
        checkpoint: a whole one.
        chain: the model; its weights are not touched.
        into: the folder of the joined one, on the same disk; made anew.

    Raises:
        CheckpointError: a part is missing, or of another model.
        StorageError: the disk is full.
    """
    shutil.rmtree(into, ignore_errors=True)
    if not is_sharded(checkpoint.manifest):
        return checkpoint
    with storage_errors(into):
        into.mkdir()
        for index in range(len(stack.layers)):
            _join(checkpoint, stack, index, into / layer_file(index))
        manifest = checkpoint.manifest.model_copy(update={"files": {}}).with_checksum()
        atomic_write(into / MANIFEST_FILE, manifest.to_json())
    return Checkpoint(path=into, manifest=manifest, damaged=checkpoint.damaged)


def _join(checkpoint: Checkpoint, chain: LayerStack, index: int, to: Path) -> None:
    parts = shard_files(checkpoint.manifest, index)
    whole = checkpoint.path / layer_file(index)
    if whole.name in checkpoint.manifest.files:
        os.link(whole, to)
    if not parts:
        return
    rows, columns = (1 + max(at) for at in zip(*((p.row, p.column) for p in parts), strict=True))
    layer, name = chain.layers[index], chain.names[index]
    places = [
        TensorParallelRank(degree=rows * columns, index=at, columns=columns) for at in range(rows * columns)
    ]
    found = _Tensors(name, [(at, param_shards(layer, layer_sharding(chain, index), at)) for at in places])
    for part in parts:
        found.take(checkpoint.path / part.file, part.row * columns + part.column)
    write_tensors(to, found.whole().items())


class _Tensors:
    """The whole tensors of one layer, filled part by part.

    Args:
        name: of the layer.
        cuts: of each slice, its place and the pieces of its weights by names inside the layer.
    """

    def __init__(self, name: str, cuts: list[tuple[TensorParallelRank, dict[str, ParamShard]]]) -> None:
        self._name, self._cuts = name, cuts
        self._local: dict[tuple[str, int], Tensor] = {}
        self._filled: dict[tuple[str, int], int] = defaultdict(int)
        self._plain: dict[str, Tensor] = {}
        self._codec = MomentCodec(_CPU)

    def take(self, path: Path, at: int) -> None:
        """Takes all that a part of slice `at` holds."""
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"`{path}` cannot be read: {error}") from None
        for key, tensor in self._decoded(tensors).items():
            kind, _, rest = key.partition("/")
            full, _, first = rest.rpartition(SHARD_SEPARATOR)
            if kind == "buffer":
                self._plain[key] = tensor
            elif kind == "steps":
                self._plain[f"steps/{full}"] = tensor
            elif kind in _FILLED:  # not what only fills a page
                self._fill(f"{kind}/{full}", at, int(first), tensor)

    def _decoded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same with moments in float32: blocks of a shard are not those of the whole."""
        found = dict(tensors)
        for key in tensors:
            kind, _, rest = key.partition("/")
            if kind != "moment1" or tensors[key].dtype in (torch.float32, torch.float64):
                continue
            kept = (
                StoredMoment(found[f"moment1/{rest}"], found.pop(f"scale1/{rest}", None)),
                StoredMoment(found[f"moment2/{rest}"], found.pop(f"scale2/{rest}", None)),
            )
            found[f"moment1/{rest}"], found[f"moment2/{rest}"] = self._codec.decode_all(kept)
        return found

    def _fill(self, key: str, at: int, first: int, tensor: Tensor) -> None:
        piece = self._piece(key, at)
        if not self._cuts[at][0].is_first_replica(piece.replicated_over):
            return  # another slice has the same
        if (key, at) not in self._local:
            self._local[key, at] = torch.empty(piece.shape, dtype=tensor.dtype)
        flat = self._local[key, at].view(-1)
        flat[first : first + tensor.numel()] = tensor.reshape(-1)
        self._filled[key, at] += tensor.numel()

    def _piece(self, key: str, at: int) -> ParamShard:
        inner = key.partition("/")[2].removeprefix(f"{self._name}.")
        piece = self._cuts[at][1].get(inner)
        if piece is None:
            raise CheckpointError(f"the checkpoint has `{key}`, and the model does not")
        return piece

    def whole(self) -> dict[str, Tensor]:
        """All of the layer.

        Raises:
            CheckpointError: a part is missing.
        """
        found: dict[str, Tensor] = {}
        for (key, at), local in self._local.items():
            if self._filled[key, at] != local.numel():
                raise CheckpointError(
                    f"the checkpoint has {self._filled[key, at]} of {local.numel()} elements of "
                    f"`{key}`, slice {at}"
                )
            piece = self._piece(key, at)
            if key not in found:
                found[key] = torch.empty(piece.full_shape, dtype=local.dtype)
            piece.write_into(found[key], local)
        return found | self._plain
