"""One layer, or a part of it, whose weights and optimizer state are offloaded between uses.

One queue runs all transfers in the order in which the program starts them; whoever needs a layer
waits for it. A layer's update runs in that queue too, part by part, and leaves the updated weights
in device memory.

With parameter sharding, a prefetch brings the shard, `unshard` all-gathers the full layer, and the
shard is freed at once. Where weights stay in device memory, the optimizer state may be sharded over
more ranks than the weights: then a rank updates a part of what it holds, and `all_gather_params`
combines the parts. Experts that ranks divide may be whole where other weights are sharded: then
they compute as they came, and are freed with the unsharded weights of the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.errors import RunBroken
from windlass.program import updates_per_shard
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.distributed.shards.layer_part import LayerPart
from windlass.runtime.offload.direct_io import page_aligned_buffer
from windlass.runtime.offload.frozen_weights import FrozenWeights
from windlass.runtime.offload.initial_state import create_state, load_state
from windlass.runtime.offload.layer_state import OffloadedLayerState
from windlass.runtime.offload.offload_tier import OffloadTier, WaitingGradients
from windlass.runtime.offload.staging_buffers import LayerUpdate
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferStats
from windlass.runtime.optimizer_state.optimizer_state import DTYPES, Averaging
from windlass.runtime.parameters import (
    LayerParameters,
    ModelParameter,
)


class OffloadedLayer(LayerPart):
    """What this rank keeps in tiers of one layer, or of a part of its weights."""

    def __init__(self, tier: OffloadTier, shard: LayerShard) -> None:
        self._tier, self.shard, self._index, self._plan = tier, shard, shard.index, tier.plan
        self.owned: Sequence[ModelParameter] = shard.parameters
        self._is_sharded = tier.plan.sharding.parameters > 1
        self._shares_updates = updates_per_shard(tier.plan) > 1
        """Whether this rank updates a part of the weights it holds; they stay in device memory."""
        self._loaded: tuple[Tensor, TransferHandle] | None = None
        """The buffer that holds its weights in device memory, `UInt8[n]`, and the transfer or
        update that fills it."""
        self._in_use = False
        """Whether the program has unsharded the layer, where these weights are whole already."""
        self._segments: Sequence[Tensor] = ()
        """Weights of the segments that this rank updates, in device memory."""
        self._flat: Tensor | None = None
        """Flat weight shard, `[param_shard_elements]`, where it shares updates."""
        self._frozen_segments: Sequence[Tensor] = ()
        """Frozen weights of the segments that this rank keeps, in device memory."""
        self._reduced: list[Tensor | None] | None = None
        """Reduced gradients of the segments."""
        self._averaging: Averaging | None = None
        """What the layer computes with in place of the trained weights, during an evaluation."""
        self._state = OffloadedLayerState(
            tier.stores, self._index, tier.plan,
            {shard.checkpoint_name(s): tuple(s.shape) for s in shard.segments},
            shard.persistent_buffers if shard.is_first_shard else {},
            grad_layers=tier.grad_layers, decays=[segment.decays for segment in shard.segments],
        )  # fmt: skip
        kept = {shard.checkpoint_name(s): tuple(s.shape) for s in shard.frozen_segments}
        self._frozen = FrozenWeights(tier.stores, self._index, tier.plan, kept) if kept else None

    # The state at the start.

    def initialize(self, checkpoint: Checkpoint | None, layer: LayerParameters) -> None:
        """Creates its state in the tiers, or takes that of a checkpoint."""
        with storage_errors(self._tier.folder):
            if checkpoint is None:
                create_state(self._tier, self.shard, self._state, self._frozen)
            else:
                load_state(
                    checkpoint, layer, self._tier.staging, self.shard, self._state, self._frozen
                )

    def gather_first(self) -> None:
        """Assembles its weight shard where it shares updates."""
        shard = self.shard
        if not (self._shares_updates and shard.elements and self._loaded and shard.groups):
            return
        flat = self._flat_shard(shard.param_shard_elements)
        part = self._updated_part(flat)
        segments = [part[s.shard_slice].view(s.shape) for s in shard.segments]
        for segment, loaded in zip(segments, self._segments, strict=True):
            segment.copy_(loaded.detach())
        self._flat, self._segments, self._loaded = flat, segments, (flat, self._loaded[1])
        shard.groups.all_gather_params(flat, part, shard.part)
        if not self._is_sharded:
            shard.use_full_weights(flat)

    def _updated_part(self, flat: Tensor) -> Tensor:
        """The part of a weight shard that this rank updates."""
        begin = self.shard.optim_shard_begin - self.shard.param_shard_begin
        return flat[begin:][: self.shard.optim_shard_elements]

    # Instructions.

    def load(self) -> None:
        """Prefetches it, unless it is in device memory."""
        if self._loaded is None:
            self.prefetch()

    def prefetch(self) -> None:
        """Queues the transfer of its weights, or of their averages."""
        memory, averaging = self._new_weights(), self._averaging
        read_frozen = self._new_frozen()

        def read_weights(stats: TransferStats) -> None:
            if memory.numel() and averaging is not None:
                self._state.read_averages(memory, averaging, self._tier.staging, stats)
            elif memory.numel():
                self._state.read_weights(memory, stats)
            read_frozen(stats)

        self._loaded = memory, self._tier.submit(read_weights)

    def _new_weights(self) -> Tensor:
        """A new buffer for its weights, `UInt8[n]`, with which the layer computes from now on."""
        region = self._state.working
        memory = page_aligned_buffer(region.nbytes, self._tier.context.device)
        views = region.views(memory)
        if self._is_sharded or self._shares_updates:
            self._segments = views
        else:
            for weight, view in zip(self.owned, views, strict=True):
                weight.working = view.detach().requires_grad_()
        return memory

    def _new_frozen(self) -> Callable[[TransferStats], None]:
        """Gives it new memory for its frozen weights; returns what reads them into it."""
        frozen = self._frozen
        if frozen is None:
            return lambda _: None
        memory = page_aligned_buffer(frozen.region.nbytes, self._tier.context.device)
        views = frozen.region.views(memory)
        if self._is_sharded:
            self._frozen_segments = views
        else:
            for weight, view in zip(self.shard.frozen, views, strict=True):
                weight.working = view
        return partial(frozen.read, memory)

    def unshard(self) -> None:
        """All-gathers its weights; notes where they are whole that they are in use."""
        self._in_use = not self._is_sharded
        self.gather()

    def gather(self) -> None:
        """All-gathers the shards that ranks have loaded."""
        shard = self.shard
        if not self._is_sharded:
            return
        self.wait_for_transfer()
        if shard.elements:
            shard.use_full_weights(self._gather(self._flat_param_shard(), shard.elements))
        if shard.frozen_elements:
            own = self._flat_shard(shard.frozen_shard_elements)
            for segment, values in zip(shard.frozen_segments, self._frozen_segments, strict=True):
                own[segment.shard_slice] = values.view(-1)
            shard.use_full_frozen(self._gather(own, shard.frozen_elements))

    def _gather(self, own: Tensor, elements: int) -> Tensor:
        """The flat weights `[elements]` of which this rank has its own."""
        if self.shard.groups is None:
            return own
        full = own.new_empty(elements)
        return self.shard.groups.unshard_weights(full, own, self.shard.part).wait()

    def _flat_shard(self, elements: int) -> Tensor:
        device = self._tier.context.device.torch_device
        return torch.zeros(elements, dtype=DTYPES[self._plan.precision], device=device)

    def _flat_param_shard(self) -> Tensor:
        """This rank's weight shard, `[param_shard_elements]`."""
        if self._flat is not None:
            return self._flat
        flat = self._flat_shard(self.shard.param_shard_elements)
        for segment, weight in zip(self.shard.segments, self._segments, strict=True):
            flat[segment.shard_slice] = weight.detach().view(-1)
        return flat

    def free(self) -> None:
        """Frees the full weights; what stays on the device stays."""
        if self._is_sharded:
            self.shard.free_full_weights()
        elif self._plan.is_offloaded("parameters") or not self._tier.program_shards:
            self._in_use = False
            self._drop_loaded()
            self.shard.free_full_weights()

    def free_shard(self) -> None:
        """Frees what was loaded, unless the layer still computes with it."""
        if not self._in_use:
            self.free_own()

    def free_own(self) -> None:
        """Frees what was loaded."""
        if not self._is_sharded:
            self.free()
        else:
            self._drop_loaded()
            self._segments = self._frozen_segments = ()

    def _drop_loaded(self) -> None:
        if self._loaded is not None:
            self._loaded[1].wait()
            self._loaded = None

    def unload(self, *, stays: bool) -> None:
        """Frees the gathered weights, and unless they stay the loaded ones."""
        if self._is_sharded:
            self.free()
        if not stays and self._loaded is not None:
            self.free_own()

    def all_gather_params(self) -> None:
        """Combines the parts of its shard, which stays in device memory."""
        if self._flat is not None and self.shard.groups is not None:
            self.wait_for_transfer()
            part = self._updated_part(self._flat)
            self.shard.groups.all_gather_params(self._flat, part, self.shard.part)

    def wait(self, user: int) -> None:
        """Waits for the transfer of whole weights; those gathered have waited for theirs."""
        if self._is_sharded:
            return
        if self._loaded is None:
            raise RunBroken(f"layer {user} needs layer {self._index}, which was not prefetched")
        self._loaded[1].wait()

    def wait_for_transfer(self) -> None:
        """Waits for its transfer or update."""
        if self._loaded is not None:
            self._loaded[1].wait()

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Lets what is loaded while it is open be averaged weights."""
        weights = [(weight, weight.working) for weight in (*self.owned, *self.shard.frozen)]
        trained = self._loaded, self._segments, self._flat, self._frozen_segments
        self._loaded, self._averaging = None, averaging
        try:
            yield
        finally:
            self._averaging = None
            self._loaded, self._segments, self._flat, self._frozen_segments = trained
            for weight, working in weights:
                weight.working = working

    def grads_for_norm(self) -> Sequence[ModelParameter]:
        """The segments that this rank counts, as parameters of their own."""
        return tuple(
            ModelParameter(
                name=segment.name, working=gradient, shape=segment.shape, gradient=gradient
            )
            for segment, gradient in zip(self.shard.segments, self._reduced_grads(), strict=True)
            if gradient is not None and self.shard.is_responsible_for(segment)
        )

    def _reduced_grads(self) -> list[Tensor | None]:
        """The reduced gradient of each segment."""
        if self._reduced is None:
            self._reduced = self.shard.reduced_grads()
        return self._reduced

    def _take_gradients(self) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """The gradients of its segments, handed over, and whether each has one."""
        gradients, self._reduced = self._reduced_grads(), None
        return gradients, tuple(gradient is not None for gradient in gradients)

    def drop_gradients(self) -> None:
        """Drops those that have not been offloaded."""
        self._reduced = None
        self.shard.discard_grads()
        for weight in self.owned:
            weight.clear_gradient()

    def offload_grads(self) -> None:
        """Queues the transfer of its gradients once the one before has ended."""
        tier, state = self._tier, self._state
        tier.gradients.wait()
        tier.gradients.norms[self._index] = tier.optimizer.gradient_norms(self.grads_for_norm())
        gradients, has_gradient = self._take_gradients()
        transfer = tier.submit(
            lambda stats: state.write_grads(gradients, tier.staging, stats), *_present(gradients)
        )
        tier.gradients.put(self._index, WaitingGradients(tier.step, has_gradient), transfer)

    def update(self, step: int, clip_divisor: Tensor | None) -> None:
        """Queues its update, by gradients in device memory or offloaded ones.

        Without gradients it is only prefetched.
        """
        tier = self._tier
        offloaded = tier.gradients.take(self._index)
        gradients: list[Tensor | None] | None
        if offloaded is not None:
            gradients, clip_divisor = None, tier.gradients.clip_divisor
            step, has_gradient = offloaded
        else:
            tier.gradients.wait()
            gradients, has_gradient = self._take_gradients()
        # Offloaded gradients, even dropped ones, may have overwritten the working weights, which an
        # update writes again.
        if offloaded is None and not any(has_gradient):
            self.load()
            return
        tier.before_update(self._index)
        read_frozen = None
        if self._loaded is None:
            memory, read_frozen = self._new_weights(), self._new_frozen()
        else:
            memory = self._loaded[0]
        keeps_segments = self._is_sharded or self._shares_updates
        weights = self._segments if keeps_segments else [weight.working for weight in self.owned]
        request = LayerUpdate(
            passes=tier.optimizer.part_passes(step=step, clip_divisor=clip_divisor),
            reads_gradient=tier.optimizer.reads_gradient,
            weights=[weight.detach() for weight in weights],
            gradients=gradients,
            has_gradient=has_gradient,
            working_memory=memory if self._plan.is_offloaded("parameters") else None,
        )

        def update(stats: TransferStats) -> None:
            self._state.update(request, tier.staging, tier.queue, stats)
            if read_frozen is not None:
                read_frozen(stats)

        transfer = tier.submit(update, *_present(gradients or ()), *_present((clip_divisor,)))
        self._loaded = memory, transfer
        if gradients is not None:
            tier.gradients.read_by(transfer)

    def save(self, to: Path) -> tuple[SavedFile, ...]:
        """Saves what this rank saves of it; what is in files is hard-linked."""
        shard, frozen, file = self.shard, self._frozen, self.shard.checkpoint_file(to)
        if not (shard.segments or frozen or shard.persistent_buffers):
            return ()
        saved = (SavedFile(file, self._state.save(file)),)
        if frozen is None or not (shard.is_first_shard if frozen.is_left else shard.saves_frozen):
            return saved
        return (*saved, frozen.save(to if frozen.is_left else file))


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors without those that are None."""
    return [tensor for tensor in tensors if tensor is not None]
