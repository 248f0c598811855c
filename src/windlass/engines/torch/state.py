"""Checkpoints of the engine: the own runtime's files, so that a run goes on under either.

One layer after the other is gathered from its shards, and one rank of its stage writes it whole.
The ranks take turns at that, so none holds more than its share of the model beside its own.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.optimizer import StageOptimizer
from windlass.engines.torch.weights import StageWeight, StageWeights, local_shard
from windlass.models import layer_sharding, param_shards
from windlass.runtime import (
    DTYPES,
    Checkpoint,
    RankContext,
    SavedFile,
    layer_file,
    read_moments,
    read_tensors,
    read_weight,
    write_checkpoint_file,
)
from windlass.torch_ext import MomentCodec


class StageState:
    """The weights and optimizer state of a stage, as checkpoints have them.

    Args:
        context: what this rank runs.
        ranks: its place in the mesh.
        stage: its weights.
        optimizer: their moments.
    """

    def __init__(
        self, context: RankContext, ranks: MeshRank, stage: StageWeights, optimizer: StageOptimizer
    ) -> None:
        self._context, self._ranks = context, ranks
        self._stage, self._optimizer = stage, optimizer
        self._staged: dict[int, dict[str, Tensor]] = {}
        """Tensors in host memory of the layers that this rank writes, by layer."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads the state of a checkpoint with every layer in one file.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
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
        part = weight.shard.extract(full)
        size = -(-len(part) // self._ranks.shards) if part.dim() else 0
        start = min(len(part), self._ranks.shard * size)
        local = local_shard(into.detach())
        local.copy_(part[start : start + len(local)])

    def stage_save(self) -> None:
        """Copies to host memory what this rank will write; all ranks take part."""
        self._staged = {}
        for place, index in enumerate(self._stage.buffers):
            writer = place % self._ranks.shards
            tensors = dict(self._layer_tensors(index, writer))
            if tensors and self._writes(writer):
                self._staged[index] = tensors

    def save_layer(self, index: int, to: Path) -> tuple[SavedFile, ...]:
        """Writes a layer that `stage_save` has copied; none if another rank writes it."""
        return write_checkpoint_file(self._staged.pop(index, {}).items(), to, None)

    def _writes(self, writer: int) -> bool:
        ranks = self._ranks
        return (ranks.replica, ranks.coord.tensor_rank, ranks.shard) == (0, 0, writer)

    def _layer_tensors(self, index: int, writer: int) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint entries of a layer, in host memory; None are whole on other ranks."""
        if self._ranks.replica:
            return
        for weight in self._stage.weights:
            if weight.layer != index or weight.is_copy:
                continue
            trained = weight.parameter.requires_grad
            full = self._full(weight, weight.parameter, writer)
            if not trained:
                full = full.to(DTYPES[self._context.plan.precision])
            yield f"weight/{weight.name}", full
            if trained:
                for which, moment in enumerate(self._optimizer.moments(weight), start=1):
                    yield f"moment{which}/{weight.name}", self._full(weight, moment, writer)
                yield f"steps/{weight.name}", _on_host(self._optimizer.updates(weight))
        for name, buffer in self._stage.buffers[index].items():
            yield f"buffer/{name}", _on_host(buffer)

    def _full(self, weight: StageWeight, tensor: Tensor, writer: int) -> Tensor:
        """A full tensor in host memory on the rank that writes it; elsewhere anything."""
        tensor = tensor.detach()
        part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if weight.is_whole or self._ranks.shard != writer:
            return _on_host(part)
        return self._gathered(weight, part)

    def _gathered(self, weight: StageWeight, part: Tensor) -> Tensor:
        """A full tensor from the parts of all tensor-parallel ranks."""
        group = self._ranks.tensor_group
        full = torch.empty(weight.shard.full_shape, dtype=part.dtype)
        stack = self._context.stack
        layer, name = stack.layers[weight.layer], stack.names[weight.layer]
        inner = weight.name.removeprefix(f"{name}.")
        for index in range(group.size()):
            ranks = self._ranks.tensor_rank(index)
            shard = param_shards(layer, layer_sharding(stack, weight.layer), ranks)[inner]
            received = part.contiguous()
            if index != self._ranks.coord.tensor_rank:
                received = part.new_empty(shard.shape)
            dist.broadcast(received, group_src=index, group=group)
            shard.write_into(full, received.cpu())
        return full


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, which no update changes."""
    return tensor.detach().to("cpu", copy=True)
