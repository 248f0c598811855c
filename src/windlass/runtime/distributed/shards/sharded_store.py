"""The store of one rank among several, with weight shards and optimizer state in device memory.

Between uses a rank keeps its shard of each layer. `unshard_weights` all-gathers the full layer,
`free_weights` frees all but the shard, `reduce_grads` leaves the part of the gradient that this
rank updates, and `all_gather_params` combines the parts of a shard after the update. Without
parameter sharding the shard is the full layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from windlass.models import ParamShard, materialize_layer
from windlass.program import Program, layers_of_stage, tied_owner_layers
from windlass.runtime.block_scores import block_norms
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.host_staging import host_staging
from windlass.runtime.checkpoint.load_state import load_layer_shard, read_weight
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.distributed.flat_weights import WeightPart, weight_parts
from windlass.runtime.distributed.process_groups import PendingCollective, ProcessGroups
from windlass.runtime.distributed.shards.flat_shard import (
    LayerShard,
    remote_layer_parameters,
    writes_checkpoint,
)
from windlass.runtime.distributed.shards.local_layer import LocalLayer
from windlass.runtime.distributed.shards.shard_ranks import ShardRanks
from windlass.runtime.interpreter import Handlers
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.optimizer_state.dtypes import master_dtype
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import write_checkpoint_file
from windlass.runtime.parameters import (
    LayerParameters,
    MasterParameter,
    ModelParameter,
    checkpoint_tensors,
)
from windlass.runtime.rank_context import RankContext


class ShardedStore:
    """The weights and optimizer state of one rank among several, all in device memory.

    Args:
        context: what this rank runs.
        optimizer: optimizer, applied at once.
        groups: the rank's process groups.
        before_update: called with a layer's index before its state changes.
    """

    def __init__(
        self,
        context: RankContext,
        optimizer: Optimizer,
        groups: ProcessGroups,
        *,
        before_update: Callable[[int], None],
    ) -> None:
        self._context, self._plan, self._groups = context, context.plan, groups
        self._optimizer, self._before_update = optimizer, before_update
        self._shards_params = self._plan.sharding.parameters > 1
        self._staging = host_staging(context.device)
        self._parts = weight_parts(self._plan, groups.coord, groups.experts)
        self._local: dict[int, tuple[LocalLayer, ...]] = {}
        """What this rank keeps of each layer, part by part."""
        self._gathers: dict[int, list[PendingCollective]] = {}
        """All-gathers of weights that nobody has waited for yet, by layer."""
        self._averages: dict[LayerShard, Tensor] = {}
        """Averaged weights in place of `working`, while an evaluation reads them."""
        self.offloaded_grad_norms: dict[int, list[Tensor]] = {}
        self.layers: tuple[LayerParameters, ...] = tuple(self._create_layers())
        self._owner_layers = tied_owner_layers(groups.graph)
        for layer in context.stack.layers:
            layer.to_empty(device="meta")  # frees a model built in full: the shards are kept

    # The state at the start.

    def _create_layers(self) -> Iterator[LayerParameters]:
        stack, device = self._context.stack, str(self._context.device.torch_device)
        local_layers = layers_of_stage(self._plan, self._groups.coord.stage)
        by_name: dict[str, ModelParameter] = {}
        for index, name in enumerate(stack.names):
            if index not in local_layers:
                yield remote_layer_parameters(name)
                continue
            layer = materialize_layer(stack, index, seed=self._context.seed, device=device)
            shards = [
                LayerShard(self._context, self._groups, index, layer, part) for part in self._parts
            ]
            self._local[index] = tuple(
                LocalLayer.of(shard, layer, name, self._plan) for shard in shards
            )
            yield shards[0].layer_parameters(by_name, stack.tied_weights, shards[1:])
            for local in self._local[index]:
                if local.shard.part.plan.sharding.parameters == 1:
                    local.shard.use_full_weights(local.working)
                    local.shard.use_full_frozen(local.frozen)

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Loads the state of a checkpoint, if there is one.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        if checkpoint is None:
            return
        for index, local in self._all_local():
            load_layer_shard(
                checkpoint, index, local.parameters, self.layers[index], local.shard.pieces
            )
            full_weight = partial(read_weight, checkpoint, index, local.shard.pieces)
            local.frozen.copy_(local.shard.frozen_shard(full_weight))
            if local.shares_updates:
                part = local.shard.part
                self._groups.all_gather_initial_params(local.working, local.updated, part)

    def _all_local(self) -> Iterator[tuple[int, LocalLayer]]:
        """Each part of each layer of this stage, with the layer's index."""
        for index, parts in self._local.items():
            yield from ((index, local) for local in parts)

    # Instructions.

    def handlers(self) -> Handlers:
        """The handlers of collectives on weights and gradients."""
        return {
            "unshard_weights": self._unshard_weights,
            "free_weights": self._free_weights,
            "all_gather_params": self._all_gather_params,
            "reduce_grads": self._reduce_grads,
        }

    def _unshard_weights(self, index: int, _: int) -> None:
        self._gathers[index] = []
        for local in self._sharded_parts(index):
            shard = local.shard
            working = self._averages.get(shard, local.working)
            shard.use_full_weights(self._gather(index, working, shard.elements, shard.part))
            frozen = self._gather(index, local.frozen, shard.frozen_elements, shard.part)
            shard.use_full_frozen(frozen)

    def _sharded_parts(self, index: int) -> Iterator[LocalLayer]:
        """The parts of a layer whose weights are gathered."""
        for local in self._local[index]:
            if local.shard.part.plan.sharding.parameters > 1:
                yield local

    def _gather(self, index: int, own: Tensor, elements: int, part: WeightPart) -> Tensor:
        """The flat weights `[elements]` of which this rank has its own; starts to gather them."""
        full = torch.empty(elements, dtype=own.dtype, device=self._context.device.torch_device)
        if elements:
            self._gathers[index].append(self._groups.unshard_weights(full, own, part))
        return full

    def _free_weights(self, index: int, _: int) -> None:
        self._wait_for_gather(index)
        for local in self._sharded_parts(index):
            local.shard.free_full_weights()

    def _all_gather_params(self, index: int, _: int) -> None:
        for local in self._local[index]:
            if local.shares_updates:
                self._groups.all_gather_params(local.working, local.updated, local.shard.part)

    def _reduce_grads(self, index: int, _: int) -> None:
        for local in self._local[index]:
            local.shard.start_reduce()

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """Parameters whose gradients this rank contributes to the norm.

        Values that several tensor-parallel ranks hold alike are contributed by the first of them.
        """
        if layer not in self._local:
            return ()
        counted: list[ModelParameter] = []
        for local in self._local[layer]:
            for weight, gradient in zip(local.parameters, local.shard.reduced_grads(), strict=True):
                weight.gradient = weight.gradient if gradient is None else gradient
            if len(self._parts) == 1 or local.shard.part.is_first_copy:
                counted += self._responsible_parameters(local)
        return tuple(counted)

    def _responsible_parameters(self, local: LocalLayer) -> Iterator[MasterParameter]:
        """The parameters that this rank counts in the norm and saves."""
        for weight, segment in zip(local.parameters, local.shard.segments, strict=True):
            if local.shard.is_responsible_for(segment):
                yield weight

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank's shards count in the norm: several ranks hold each shard.

        Where experts are divided, `grads_for_norm` leaves out what does not count.
        """
        return len(self._parts) > 1 or self._parts[0].is_first_copy

    def begin_step(self, step: int) -> None:
        """Drops the gradients of a step that was aborted."""
        del step
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drops all gradients of this step."""
        for _, local in self._all_local():
            local.shard.discard_grads()
            for weight in local.parameters:
                weight.clear_gradient()

    def wait_for_layer(self, layer: int) -> None:
        """Waits for the all-gathers that bring the weights that a layer computes with."""
        for owner in (layer, *self._owner_layers[layer]):
            self._wait_for_gather(owner)

    def _wait_for_gather(self, layer: int) -> None:
        for gather in self._gathers.pop(layer, ()):
            gather.wait()

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Does nothing: no gradient is offloaded."""

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Updates this rank's part of a layer."""
        self._before_update(layer)
        with torch.no_grad():
            for local in self._local[layer]:
                like = local.working.new_empty(0, dtype=master_dtype(self._plan.precision))
                ranks = ShardRanks(local.shard, self._groups, like)
                self._optimizer.update(local.parameters, step, clip_divisor, ranks)

    def flush_deferred_updates(self, program: Program) -> None:
        """Does nothing: no update is deferred."""

    def load_layers(self, layers: Sequence[int]) -> None:
        """All-gathers layers of this stage."""
        for layer in self._sharded_layers(layers):
            self._unshard_weights(layer, 0)

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees all but the shards of layers."""
        for layer in self._sharded_layers(layers):
            self._free_weights(layer, 0)

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Lets layers compute with averaged weights while it is open."""
        try:
            for _, local in self._all_local():
                self._averages[local.shard] = local.averaged(averaging, self._groups)
                if local.shard.part.plan.sharding.parameters == 1:
                    local.shard.use_full_weights(self._averages[local.shard])
            yield
        finally:
            self._averages.clear()
            for _, local in self._all_local():
                if local.shard.part.plan.sharding.parameters == 1:
                    local.shard.use_full_weights(local.working)

    def _sharded_layers(self, layers: Sequence[int]) -> Iterator[int]:
        """The layers to all-gather for a pass through some layers, owners of tied weights too."""
        if self._shards_params:
            needed = {i for layer in layers for i in (layer, *self._owner_layers[layer])}
            local = (i for i in needed if i in self._local)
            yield from sorted(i for i in local if self.layers[i].owned or self.layers[i].frozen)

    def block_norms(self, layer: int, name: str) -> Tensor:
        """`Float32[n]`: norm of each kept block of a sparse weight, the same on all its ranks.

        Args:
            layer: index of the layer.
            name: full name of the values, `[n B B]`.
        """
        self.load_layers((layer,))
        self.wait_for_layer(layer)
        weight = next(weight for weight in self.layers[layer].owned if weight.name == name)
        norms = block_norms(weight.working)
        self.free_layers((layer,))
        piece = self._local[layer][0].shard.pieces[name]
        if not piece.is_sharded:
            return norms
        full = norms.new_zeros(piece.full_shape[0])
        replace(piece, full_shape=full.shape, ranges=piece.ranges[:1]).write_into(full, norms)
        self._groups.sum_over_tensor_parallel(full)
        return full

    def reset_blocks(self, layer: int, name: str, slots: Tensor) -> None:
        """Zeroes what this rank holds of kept blocks of a sparse weight, and of their moments.

        Args:
            layer: index of the layer.
            name: full name of the values, `[n B B]`.
            slots: positions of the blocks in the full values, `Int64[m]`.
        """
        local = self._local[layer][0]
        weight = next(weight for weight in local.shard.parameters if weight.name == name)
        size, begin = weight.shape[1:].numel(), weight.flat_offset - local.shard.param_shard_begin
        for slot in _local_positions(local.shard.pieces[name], slots):
            first = begin + slot * size
            local.working[max(0, first) : max(0, first + size)] = 0
            for segment in local.parameters:
                if segment.name == name:
                    segment.reset_elements(slot * size, (slot + 1) * size)

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Writes this rank's shard of a layer, unless another rank writes the same."""
        written = [
            local
            for local in self._local.get(layer, ())
            if writes_checkpoint(layer, local.shard.part)
            and (local.shard.elements or not local.shard.part.experts)
        ]
        if not written:
            return ()
        is_full = written[0].shard.is_full_layer
        if not is_full:
            to = to.with_name(layer_file(layer, shard=written[0].shard.file_part))
        tensors = chain.from_iterable(self._saved_tensors(layer, local) for local in written)
        return write_checkpoint_file(tensors, to, self._staging)

    def _saved_tensors(self, layer: int, local: LocalLayer) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint entries of what this rank holds of a part of a layer."""
        is_full = local.shard.is_full_layer
        writes_buffers = is_full or local.shard.is_first_shard
        return checkpoint_tensors(
            self._responsible_parameters(local),
            self.layers[layer].persistent_buffers if writes_buffers else {},
            frozen=self._saved_frozen(local),
            full=is_full,
        )

    def _saved_frozen(self, local: LocalLayer) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and values of the frozen weights that this rank saves."""
        shard = local.shard
        for segment in shard.frozen_segments if shard.saves_frozen else ():
            if shard.is_responsible_for(segment):
                values = local.frozen[segment.shard_slice].view(segment.shape)
                yield shard.checkpoint_name(segment), values

    def close(self) -> None:
        """Frees what saves passed through."""
        if self._staging is not None:
            self._staging.close()


def _local_positions(piece: ParamShard, slots: Tensor) -> Iterator[int]:
    """Where some positions of a full tensor's first dimension are in a rank's part of it."""
    ranges, positions, first = piece.ranges[0], slots.tolist(), 0
    if ranges is None:
        yield from positions
        return
    for start, stop in ranges:
        yield from (first + slot - start for slot in positions if start <= slot < stop)
        first += stop - start
