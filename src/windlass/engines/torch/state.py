"""Checkpoints of the engine: each rank writes and reads its own rectangles of every tensor.

The files are those of `torch.distributed.checkpoint` in safetensors, and no tensor is gathered. So
a run goes on under any mesh without being merged, and under the own runtime merged layer by layer.
Checkpoints of the own runtime are read as they are, one weight at a time.
"""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.optimizer import StageOptimizer
from windlass.engines.torch.weights import StageWeight, StageWeights, local_shard
from windlass.runtime import (
    DTYPES,
    Checkpoint,
    RankContext,
    SavedFile,
    TensorPart,
    layer_file,
    open_parts,
    part_file,
    part_files,
    read_moments,
    read_tensors,
    read_weight,
    write_checkpoint_file,
)
from windlass.torch_ext import MomentCodec

_Parts = dict[str, tuple[TensorPart, ...]]
"""Rectangles that a rank has of the tensors of a layer, by key."""


class StageState:
    """The weights and optimizer state of a stage, as checkpoints have them."""

    def __init__(
        self, context: RankContext, ranks: MeshRank, stage: StageWeights, optimizer: StageOptimizer
    ) -> None:
        self._context, self._ranks = context, ranks
        self._stage, self._optimizer = stage, optimizer
        self._staged: dict[int, _Parts] = {}
        """Copies in host memory of what this rank writes, by layer."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads the state of a checkpoint with every layer in parts, or in one file.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        if not part_files(checkpoint.manifest):
            self._load_whole(checkpoint)
            return
        layers = {*self._stage.buffers, *(weight.layer for weight in self._stage.weights)}
        for index in sorted(layers):
            names = part_files(checkpoint.manifest, index)
            if names:
                open_parts(checkpoint.path, names).fill(self._parts(index))

    def _load_whole(self, checkpoint: Checkpoint) -> None:
        codec, manifest = MomentCodec(torch.device("cpu")), checkpoint.manifest
        for index, buffers in self._stage.buffers.items():
            if buffers:
                file = checkpoint.path / layer_file(index)
                read_tensors(file, {f"buffer/{name}": each for name, each in buffers.items()})
        for weight in self._stage.weights:
            pieces, name = {weight.name: weight.shard}, weight.name
            full = read_weight(checkpoint, weight.layer, pieces, name)
            self._take(weight, weight.parameter, full)
            if not weight.parameter.requires_grad:
                continue
            file = checkpoint.path / layer_file(weight.layer)
            read_tensors(file, {f"steps/{name}": self._optimizer.updates(weight)})
            moments = read_moments(
                file, name, weight.shard.full_shape, "float32", codec,
                seed=manifest.seed, step=manifest.step,
            )  # fmt: skip
            for own, stored in zip(self._optimizer.moments(weight), moments, strict=True):
                self._take(weight, own, stored.values)

    def _take(self, weight: StageWeight, into: Tensor, full: Tensor) -> None:
        """Copies this rank's shard of a full tensor."""
        part, local = weight.shard.extract(full), local_shard(into.detach())
        first = self._first_row(weight)
        local.copy_(part[first : first + len(local)] if part.dim() else part)

    def _first_row(self, weight: StageWeight) -> int:
        """The first row of the tensor-parallel rank's part that this rank has; 0 of a scalar."""
        rows, ranks = (*weight.shard.shape, 1)[0], self._ranks
        return min(rows, ranks.shard * -(-rows // ranks.shards)) if weight.shard.shape else 0

    def stage_save(self) -> None:
        """Copies to host memory what this rank will write."""
        self._staged = {
            index: {
                key: tuple(TensorPart(each.offsets, _on_host(each.values)) for each in parts)
                for key, parts in self._parts(index, saves=True).items()
            }
            for index in self._stage.buffers
        }

    def save_layer(self, index: int, to: Path) -> tuple[SavedFile, ...]:
        """Writes what this rank has of a layer; a file has one rectangle of each tensor."""
        staged = self._staged.pop(index, {})
        files: list[SavedFile] = []
        for number, parts in enumerate(zip_longest(*staged.values())):
            present = {key: part for key, part in zip(staged, parts, strict=True) if part}
            files += write_checkpoint_file(
                ((key, part.values) for key, part in present.items()),
                part_file(to, self._ranks.rank, number), None,
                {key: part.offsets for key, part in present.items()},
            )  # fmt: skip
        return tuple(files)

    def _parts(self, index: int, *, saves: bool = False) -> _Parts:
        """What this rank has of a layer.

        Args:
            index: the layer.
            saves: leaves out what another rank has and writes too.
        """
        ranks, parts = self._ranks, _Parts()
        is_first = ranks.coord.tensor_rank == 0 and ranks.shard == 0
        if saves and ranks.replica:
            return parts
        for weight in self._stage.weights:
            others_have_it = weight.is_copy or (weight.is_whole and ranks.coord.tensor_rank > 0)
            if weight.layer != index or (saves and others_have_it):
                continue
            for key, tensor in self._tensors(weight, saves=saves):
                parts[key] = tuple(self._rectangles(weight, tensor))
            if weight.parameter.requires_grad and (is_first or not saves):
                steps = self._optimizer.updates(weight)
                parts[f"steps/{weight.name}"] = (TensorPart((), steps),)
        for name, buffer in self._stage.buffers.get(index, {}).items():
            if is_first or not saves:
                parts[f"buffer/{name}"] = (TensorPart((0,) * buffer.dim(), buffer),)
        return {key: each for key, each in parts.items() if each}

    def _tensors(self, weight: StageWeight, *, saves: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards of a weight and of its moments, by key."""
        shard = local_shard(weight.parameter.detach())
        trained = weight.parameter.requires_grad
        if saves and not trained:
            shard = shard.to(DTYPES[self._context.plan.precision])
        yield f"weight/{weight.name}", shard
        if not trained:
            return
        for which, moment in enumerate(self._optimizer.moments(weight), start=1):
            yield f"moment{which}/{weight.name}", local_shard(moment.detach())

    def _rectangles(self, weight: StageWeight, local: Tensor) -> Iterator[TensorPart]:
        """The rectangles of a full tensor that a shard is."""
        rows = len(local) if local.dim() else 1
        for piece in weight.shard.pieces(self._first_row(weight), rows):
            yield TensorPart(piece.offsets, local[piece.part])


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, which no update changes."""
    return tensor.detach().to("cpu", copy=True)
