"""The offloaded store of one rank among several, which offloads its shard of each layer.

With parameter sharding, a prefetch brings the shard, `unshard_weights` all-gathers the full layer,
and the shard is freed at once. Where weights stay in device memory, the optimizer state may be
sharded over more ranks than the weights: then a rank updates a part of what it holds, and
`all_gather_params` combines the parts.

Experts that ranks divide have a store of their own. It may keep them whole where others are
sharded: then they compute as they came, and are freed with the unsharded weights of the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from windlass.models import materialize_layer
from windlass.program import layers_of_stage, updates_per_shard
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.load_state import load_layer_shard
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.distributed.flat_weights import WeightPart
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.distributed.shards.flat_shard import (
    LayerShard,
    remote_layer_parameters,
    writes_checkpoint,
)
from windlass.runtime.interpreter import Handlers
from windlass.runtime.offload.frozen_weights import FrozenWeights, places_of_base
from windlass.runtime.offload.initial_state import leave_shard_in, load_frozen_shard
from windlass.runtime.offload.layer_state import OffloadedLayerState
from windlass.runtime.offload.layer_weights import with_buffers
from windlass.runtime.offload.offloaded_store import OffloadedStore
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferQueue
from windlass.runtime.optimizer_state.dtypes import DTYPES, stored_dtype
from windlass.runtime.optimizer_state.state_format import state_format
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import (
    LayerParameters,
    MasterParameter,
    ModelParameter,
    new_master_parameter,
    persistent_buffers,
)
from windlass.runtime.rank_context import RankContext


class ShardedOffloadedStore(OffloadedStore):
    """The weights and optimizer state of one rank among several, in offload tiers between uses.

    Args:
        context: what this rank runs; its program says which gradients are offloaded.
        optimizer: optimizer, applied in the transfer queue.
        queue: the queue of all transfers.
        groups: the rank's process groups.
        part: the weights to keep, and who shares them.
        before_update: called with a layer's index before its state changes.
        staging: buffers that state passes through; None for new ones.
    """

    def __init__(
        self, context: RankContext, optimizer: Optimizer, queue: TransferQueue,
        groups: ProcessGroups, part: WeightPart, *,
        before_update: Callable[[int], None], staging: StagingBuffers | None = None,
    ) -> None:  # fmt: skip
        self._groups, self._part = groups, part
        self._shards_params = part.plan.sharding.parameters > 1
        self._program_shards = context.plan.sharding.parameters > 1
        """Whether the program unshards and frees layers, be these weights sharded or not."""
        self._in_use: set[int] = set()
        """Layers that the program has unsharded, where these weights are whole already."""
        self._layer_shards: dict[int, LayerShard] = {}
        self._segments: dict[int, Sequence[Tensor]] = {}
        """Weights of the segments that this rank updates, in device memory, by layer."""
        self._shares_updates = updates_per_shard(part.plan) > 1
        """Whether this rank updates a part of the weights it holds; they stay in device memory."""
        self._param_shards: dict[int, Tensor] = {}
        """Flat weight shard of each layer, `[param_shard_elements]`, where it shares updates."""
        self._frozen_shards: dict[int, Sequence[Tensor]] = {}
        """Frozen weights of the segments that this rank keeps, in device memory, by layer."""
        self._reduced: dict[int, list[Tensor | None]] = {}
        """Reduced gradients of the segments, by layer."""
        super().__init__(
            replace(context, plan=part.plan), optimizer, queue,
            before_update=before_update, staging=staging,
        )  # fmt: skip

    # The state at the start.

    def _load_resident(self) -> None:
        super()._load_resident()
        for index, shard in self._layer_shards.items() if self._shares_updates else ():
            self._gather_param_shard(index, shard)

    def _take_resident(self) -> Callable[[], None]:
        bring_back = super()._take_resident()
        segments, shards = dict(self._segments), dict(self._param_shards)

        def bring_back_shards() -> None:
            self._segments, self._param_shards = segments, shards
            bring_back()

        return bring_back_shards

    def _gather_param_shard(self, index: int, shard: LayerShard) -> None:
        """Assembles this rank's weight shard of a layer from the parts that each rank loaded."""
        if not shard.elements:
            return
        flat = self._flat_shard(shard.param_shard_elements)
        part = self._updated_part(flat, shard)
        segments = [part[s.shard_slice].view(s.shape) for s in shard.segments]
        for segment, loaded in zip(segments, self._segments[index], strict=True):
            segment.copy_(loaded.detach())
        self._param_shards[index], self._segments[index] = flat, segments
        self._loaded[index] = self._loaded[index]._replace(memory=flat)
        self._groups.all_gather_initial_params(flat, part, self._part)
        if not self._shards_params:
            shard.use_full_weights(flat)

    def _updated_part(self, flat: Tensor, shard: LayerShard) -> Tensor:
        """The part of a weight shard that this rank updates."""
        begin = shard.optim_shard_begin - shard.param_shard_begin
        return flat[begin:][: shard.optim_shard_elements]

    @property
    def _stage(self) -> int:
        return self._groups.coord.stage

    @property
    def _folder(self) -> Path:
        return super()._folder / "experts" if self._part.experts else super()._folder

    def _create_layers(self) -> Iterator[LayerParameters]:
        local_layers = layers_of_stage(self._plan, self._stage)
        by_name: dict[str, ModelParameter] = {}
        for index, name in enumerate(self._stack.names):
            if index not in local_layers:
                yield remote_layer_parameters(name)
                continue
            real = with_buffers(self._context, index)
            shard = LayerShard(self._context, self._groups, index, real, self._part)
            if self._part.experts and not shard.pieces:
                yield remote_layer_parameters(name)
                continue
            self._layer_shards[index] = shard
            weights = {shard.checkpoint_name(s): tuple(s.shape) for s in shard.segments}
            buffers = persistent_buffers(name, real) if shard.is_first_shard else {}
            self._states[index] = OffloadedLayerState(
                self._stores, index, self._plan, weights, buffers, grad_layers=self._grad_layers,
                decays=[segment.decays for segment in shard.segments],
            )  # fmt: skip
            kept = {shard.checkpoint_name(s): tuple(s.shape) for s in shard.frozen_segments}
            if kept:
                self._frozen[index] = FrozenWeights(self._stores, index, self._plan, kept)
            yield shard.layer_parameters(by_name, self._stack.tied_weights)

    def _create_states(self) -> None:
        places = places_of_base(self._stack, self._plan)
        for index, state in self._states.items():
            shard, frozen = self._layer_shards[index], self._frozen.get(index)
            whole = {name: places[name] for name in shard.frozen_of_layer if name in places}
            left = frozen is not None and leave_shard_in(frozen, shard, whole)
            name = self._stack.names[index]
            unused = {*shard.shapes} - {*shard.pieces} | {*(whole if left else ())}
            layer = materialize_layer(
                self._stack, index, seed=self._context.seed, device="cpu",
                empty=[each.removeprefix(f"{name}.") for each in unused],
            )  # fmt: skip
            masters = [weight.master for weight in self._master_parameters(index, layer)]
            state.create(masters, self._staging)
            if frozen is not None and not left:
                named = {f"{name}.{path}": p.detach() for path, p in layer.named_parameters()}
                frozen.create(shard.frozen_values(named.__getitem__).__getitem__)

    def _load_states(self, checkpoint: Checkpoint) -> None:
        for index, state in self._states.items():
            shard, layer = self._layer_shards[index], self.layers[index]
            if not (shard.segments or shard.frozen_segments or layer.persistent_buffers):
                continue
            weights = self._master_parameters(index, None)
            load_layer_shard(checkpoint, index, weights, layer, shard.pieces)
            state.create(
                [weight.master.detach() for weight in weights], self._staging,
                [weight.moments for weight in weights],
                updates=[int(weight.steps) for weight in weights],
                averages=[weight.average for weight in weights],
                factors=[weight.factors for weight in weights],
            )  # fmt: skip
            if index in self._frozen:
                load_frozen_shard(self._frozen[index], shard, checkpoint, index)

    def _master_parameters(
        self, index: int, layer: torch.nn.Module | None
    ) -> list[MasterParameter]:
        """The segments of a layer as parameters with new state; zeros without a layer."""
        shard = self._layer_shards[index]
        if layer is None:
            part = torch.zeros(shard.optim_shard_elements, dtype=stored_dtype(self._plan))
        else:
            flat = shard.flatten(layer).cpu()
            part = flat[shard.optim_shard_begin :][: shard.optim_shard_elements]
        state = state_format(self._plan)
        return [
            new_master_parameter(
                segment.name, master, master, state,
                decays=segment.decays, matrix=segment.matrix, offset=segment.weight_offset,
                factors=state.new_factors(shard.pieces[segment.name].full_shape, master),
            )
            for segment in shard.segments
            for master in (part[segment.shard_slice].view(segment.shape),)
        ]  # fmt: skip

    # Instructions.

    def handlers(self) -> Handlers:
        """The handlers of transfers, and of collectives on weights and gradients."""
        return {
            **super().handlers(),
            "unshard_weights": (
                self._unshard_weights
                if self._shards_params
                else lambda layer, _: self._in_use.add(layer)
            ),
            "free_shard": self._free_shard,
            "reduce_grads": lambda layer, _: self._layer_shards[layer].start_reduce(),
            "all_gather_params": self._all_gather_params,
        }

    def free_weights(self, layer: int, micro: int) -> None:
        """Frees a layer's full weights in device memory; with parameter sharding not the shard."""
        if self._shards_params:
            self._layer_shards[layer].free_full_weights()
        elif self._plan.is_offloaded("parameters") or not self._program_shards:
            self._in_use.discard(layer)
            super().free_weights(layer, micro)

    def _free_shard(self, layer: int, _: int) -> None:
        if layer not in self._in_use:
            self._free_local_weights(layer)

    def _free_local_weights(self, layer: int) -> None:
        if not self._shards_params:
            super()._free_local_weights(layer)
        else:
            self._loaded.pop(layer).transfer.wait()
            self._segments.pop(layer, None)
            self._frozen_shards.pop(layer, None)

    def _unshard_weights(self, layer: int, _: int) -> None:
        shard = self._layer_shards[layer]
        self._loaded[layer].transfer.wait()
        if shard.elements:
            own = self._flat_param_shard(layer, shard)
            shard.use_full_weights(self._gather(own, shard.elements))
        if shard.frozen_elements:
            own = self._flat_shard(shard.frozen_shard_elements)
            views = self._frozen_shards.get(layer, ())
            for segment, values in zip(shard.frozen_segments, views, strict=True):
                own[segment.shard_slice] = values.view(-1)
            shard.use_full_frozen(self._gather(own, shard.frozen_elements))

    def _gather(self, own: Tensor, elements: int) -> Tensor:
        """The flat weights `[elements]` of which this rank has its own."""
        return self._groups.unshard_weights(own.new_empty(elements), own, self._part).wait()

    def _flat_shard(self, elements: int) -> Tensor:
        dtype, device = DTYPES[self._plan.precision], self._device.torch_device
        return torch.zeros(elements, dtype=dtype, device=device)

    def _flat_param_shard(self, layer: int, shard: LayerShard) -> Tensor:
        """This rank's weight shard of a layer, `[param_shard_elements]`."""
        if self._shares_updates:
            return self._param_shards[layer]
        flat = self._flat_shard(shard.param_shard_elements)
        for segment, weight in zip(shard.segments, self._segments[layer], strict=True):
            flat[segment.shard_slice] = weight.detach().view(-1)
        return flat

    def _all_gather_params(self, layer: int, _: int) -> None:
        """Combines the parts of a layer's weight shard that this rank and others have updated."""
        if layer in self._param_shards:
            self._loaded[layer].transfer.wait()
            flat = self._param_shards[layer]
            part = self._updated_part(flat, self._layer_shards[layer])
            self._groups.all_gather_params(flat, part, self._part)

    def wait_for_layer(self, layer: int) -> None:
        """Returns when all weights that a layer computes with are in device memory.

        Raises:
            StorageError: they cannot be read.
        """
        if not self._shards_params:
            super().wait_for_layer(layer)

    def load_layers(self, layers: Sequence[int]) -> None:
        """Loads and all-gathers layers, for a forward pass outside of a step."""
        super().load_layers(layers)
        if self._shards_params:
            for owner in sorted({i for layer in layers for i in self._weight_layers[layer]}):
                self._unshard_weights(owner, 0)

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees layers; the shards of those in device memory between steps stay."""
        if not self._shards_params:
            super().free_layers(layers)
            return
        for owner in sorted({i for layer in layers for i in self._weight_layers[layer]}):
            self.free_weights(owner, 0)
            if owner not in self._resident:
                self._free_local_weights(owner)

    def begin_step(self, step: int) -> None:
        """Prepares for a step, and drops the gradients of one that was aborted."""
        super().begin_step(step)
        self._discard_reduced()

    def drop_gradients(self) -> None:
        """Drops all gradients of this step, those in device memory and offloaded ones."""
        super().drop_gradients()
        self._discard_reduced()

    def _discard_reduced(self) -> None:
        self._reduced.clear()
        for shard in self._layer_shards.values():
            shard.discard_grads()

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """Parameters whose gradients this rank contributes to the norm.

        Values that several tensor-parallel ranks hold alike are contributed by the first of them.
        """
        if layer not in self._layer_shards:
            return ()
        shard = self._layer_shards[layer]
        return tuple(
            ModelParameter(
                name=segment.name, working=gradient, shape=segment.shape, gradient=gradient
            )
            for segment, gradient in zip(shard.segments, self._reduced_grads(layer), strict=True)
            if gradient is not None and shard.is_responsible_for(segment)
        )

    def _reduced_grads(self, layer: int) -> list[Tensor | None]:
        """The reduced gradient of each segment."""
        if layer not in self._reduced:
            self._reduced[layer] = self._layer_shards[layer].reduced_grads()
        return self._reduced[layer]

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank's shards count in the norm: several ranks hold each shard."""
        return self._part.is_first_copy

    def _take_gradients(self, layer: int) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        gradients = self._reduced_grads(layer)
        del self._reduced[layer]
        return gradients, tuple(gradient is not None for gradient in gradients)

    def _updated_weights(self, layer: int) -> list[Tensor]:
        if self._shards_params or self._shares_updates:
            return [weight.detach() for weight in self._segments[layer]]
        return super()._updated_weights(layer)

    def _use_weights(self, layer: int, views: Sequence[Tensor]) -> None:
        if self._shards_params or self._shares_updates:
            self._segments[layer] = views
        else:
            super()._use_weights(layer, views)

    def _use_frozen_views(self, layer: int, views: Sequence[Tensor]) -> None:
        if self._shards_params:
            self._frozen_shards[layer] = views
        else:
            super()._use_frozen_views(layer, views)

    def has_layer(self, layer: int) -> bool:
        """Whether this rank has weights of a layer here."""
        return layer in self._layer_shards

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Saves this rank's shard of a layer, unless another rank saves the same."""
        if not (self.has_layer(layer) and writes_checkpoint(layer, self._part)):
            return ()
        shard = self._layer_shards[layer]
        frozen, whole = self._frozen.get(layer), to
        if not (shard.segments or frozen or self.layers[layer].persistent_buffers):
            return ()
        if not shard.is_full_layer:
            to = to.with_name(layer_file(layer, shard=shard.file_part))
        saved = (SavedFile(to, self._states[layer].save(to)),)
        if frozen is None or not (shard.is_first_shard if frozen.is_left else shard.saves_frozen):
            return saved
        return (*saved, frozen.save(whole if frozen.is_left else to))
