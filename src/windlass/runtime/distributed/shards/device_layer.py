"""One layer, or a part of it, whose weights and optimizer state stay in device memory.

Between uses a rank keeps its shard of the layer. `unshard` all-gathers the full weights, `free`
frees all but the shard, `start_reduce` leaves the part of the gradient that this rank updates, and
`all_gather_params` combines the parts of a shard after the update. Without parameter sharding the
shard is the full layer; the only rank of a run keeps each weight as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from windlass.models import ParamShard
from windlass.program import updates_per_shard
from windlass.runtime.block_scores import block_norms
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.load_state import load_layer_shard, read_weight
from windlass.runtime.distributed.process_groups import PendingCollective
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.distributed.shards.layer_part import LayerPart
from windlass.runtime.distributed.shards.shard_ranks import ShardRanks
from windlass.runtime.optimizer_state.optimizer_state import (
    DTYPES,
    Averaging,
    StateFormat,
    master_dtype,
    state_format,
)
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import (
    NOT_LOADED,
    LayerParameters,
    MasterParameter,
    ModelParameter,
    checkpoint_tensors,
    new_master_parameter,
    whole_parameter,
)
from windlass.schema import Plan


class DeviceLayer(LayerPart):
    """What this rank keeps in device memory of one layer, or of a part of its weights."""

    def __init__(
        self, shard: LayerShard, layer: nn.Module, plan: Plan, optimizer: Optimizer
    ) -> None:
        self.shard, self._optimizer, self._plan = shard, optimizer, plan
        self._is_sharded = shard.part.plan.sharding.parameters > 1
        self._shares_updates = shard.elements > 0 and updates_per_shard(shard.part.plan) > 1
        """Whether other ranks update parts of the shard that this rank keeps."""
        self._gathers: list[PendingCollective] = []
        """All-gathers of weights that nobody has waited for yet."""
        self._working = self._updated = self._frozen = NOT_LOADED
        """Flat shards in the run's precision: of the weights, `[param_shard_elements]`, the part
        of it that this rank updates, and of the frozen weights, `[frozen_shard_elements]`."""
        self._average: Tensor | None = None
        """Averaged weights in place of `_working`, while an evaluation reads them."""
        named = {f"{shard.name}.{path}": p.detach() for path, p in layer.named_parameters()}
        state = state_format(plan)
        self.owned: Sequence[ModelParameter] = shard.parameters
        self.parameters: tuple[MasterParameter, ...]
        """The segments that this rank updates, with their optimizer state."""
        if shard.groups is None:
            self.owned = self.parameters = tuple(
                whole_parameter(
                    weight.name, named[weight.name], plan.precision, state, hidden=shard.is_hidden
                )
                for weight in shard.parameters
            )
            for weight in shard.frozen:
                weight.working = named[weight.name].to(DTYPES[plan.precision]).contiguous()
            return
        self._frozen = shard.frozen_shard(named.__getitem__)
        self.parameters = tuple(self._segments(shard.flat_weights(named.__getitem__), state))
        if not self._is_sharded:
            shard.use_full_weights(self._working)
            shard.use_full_frozen(self._frozen)

    def _segments(self, flat: Tensor, state: StateFormat) -> Iterator[MasterParameter]:
        """Keeps this rank's part of a layer's weights; yields what it updates of it."""
        shard = self.shard
        working = flat[shard.param_shard_begin :][: shard.param_shard_elements]
        self._working = working.to(DTYPES[self._plan.precision]).clone()
        begin = shard.optim_shard_begin - shard.param_shard_begin
        self._updated = masters = self._working[begin:][: shard.optim_shard_elements]
        if masters.dtype != flat.dtype:
            masters = flat[shard.optim_shard_begin :][: shard.optim_shard_elements].clone()
        for segment in shard.segments:
            own_working = self._updated[segment.shard_slice].view(segment.shape)
            master = own_working
            if masters is not self._updated:
                master = masters[segment.shard_slice].view(segment.shape)
            piece = shard.pieces[segment.name]
            yield new_master_parameter(
                segment.name, master, own_working, state,
                decays=segment.decays, matrix=segment.matrix, offset=segment.weight_offset,
                factors=state.new_factors(piece.full_shape, master, piece.ranges),
            )  # fmt: skip

    def initialize(self, checkpoint: Checkpoint | None, layer: LayerParameters) -> None:
        """Loads its part of a layer from a checkpoint, if there is one."""
        if checkpoint is None:
            return
        shard = self.shard
        load_layer_shard(checkpoint, shard.index, self.parameters, layer, shard.pieces)
        full_weight = partial(read_weight, checkpoint, shard.index, shard.pieces)
        if shard.groups is None:
            for weight in shard.frozen:
                weight.working.copy_(full_weight(weight.name))
            return
        self._frozen.copy_(shard.frozen_shard(full_weight))
        if self._shares_updates:
            shard.groups.all_gather_params(self._working, self._updated, shard.part)

    def load(self) -> None:
        """Does nothing, as all that moves weights between tiers: they are in device memory."""

    prefetch = gather_first = free_shard = free_own = offload_grads = wait_for_transfer = load

    def gather(self) -> None:
        """Starts to all-gather the full weights, if ranks share them."""
        if self._is_sharded:
            shard = self.shard
            working = self._working if self._average is None else self._average
            shard.use_full_weights(self._gather(working, shard.elements))
            shard.use_full_frozen(self._gather(self._frozen, shard.frozen_elements))

    def unshard(self) -> None:
        """Does as `gather`."""
        self.gather()

    def _gather(self, own: Tensor, elements: int) -> Tensor:
        """The flat weights `[elements]` of which this rank has its own; starts to gather them."""
        full = own.new_empty(elements)
        if elements and self.shard.groups is not None:
            self._gathers.append(self.shard.groups.unshard_weights(full, own, self.shard.part))
        return full

    def wait(self, user: int) -> None:
        """Waits for the all-gathers of its weights."""
        del user
        gathers, self._gathers = self._gathers, []
        for gather in gathers:
            gather.wait()

    def free(self) -> None:
        """Frees the gathered weights."""
        if self._is_sharded:
            self.wait(self.shard.index)
            self.shard.free_full_weights()

    def unload(self, *, stays: bool) -> None:
        """Frees the gathered weights, of layers that stay too: a shard of them does."""
        del stays
        self.free()

    def all_gather_params(self) -> None:
        """Combines the parts of the shard that ranks have updated."""
        if self._shares_updates and self.shard.groups is not None:
            self.shard.groups.all_gather_params(self._working, self._updated, self.shard.part)

    def grads_for_norm(self) -> Sequence[MasterParameter]:
        """The segments that this rank counts, with their gradients."""
        if self.shard.groups is None:
            for weight in self.parameters:
                weight.flush_sparse_gradient()
            return self.parameters
        for weight, gradient in zip(self.parameters, self.shard.reduced_grads(), strict=True):
            weight.gradient = weight.gradient if gradient is None else gradient
        return tuple(self._responsible_parameters())

    def _responsible_parameters(self) -> Iterator[MasterParameter]:
        """The parameters that this rank counts in the norm and saves."""
        for weight, segment in zip(self.parameters, self.shard.segments, strict=True):
            if self.shard.is_responsible_for(segment):
                yield weight

    def drop_gradients(self) -> None:
        """Drops the gradients of its segments."""
        self.shard.discard_grads()
        for weight in self.parameters:
            weight.clear_gradient()

    def update(self, step: int, clip_divisor: Tensor | None) -> None:
        """Updates its segments at once."""
        ranks = None
        if self.shard.groups is not None:
            like = self._working.new_empty(0, dtype=master_dtype(self._plan.precision))
            ranks = ShardRanks(self.shard, self.shard.groups, like)
        with torch.no_grad():
            self._optimizer.update(self.parameters, step, clip_divisor, ranks)

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Puts averaged weights beside the trained ones while it is open."""
        trained = [(weight, weight.working) for weight in self.owned]
        try:
            if self.shard.groups is None:
                for weight in self.parameters:
                    weight.working = weight.averaged(averaging)
            else:
                self._average = self._averaged_shard(averaging)
                if not self._is_sharded:
                    self.shard.use_full_weights(self._average)
            yield
        finally:
            self._average = None
            for owned, working in trained:
                owned.working = working

    def _averaged_shard(self, averaging: Averaging) -> Tensor:
        """A shard of averaged weights, `[param_shard_elements]`."""
        shard, flat = self.shard, self._working.detach().clone()
        part = flat[shard.optim_shard_begin - shard.param_shard_begin :]
        for segment, weight in zip(shard.segments, self.parameters, strict=True):
            part[segment.shard_slice] = weight.averaged(averaging).detach().view(-1)
        if self._shares_updates and shard.groups is not None:
            part = part[: shard.optim_shard_elements]
            shard.groups.all_gather_params(flat, part, shard.part)
        return flat

    def block_norms(self, name: str) -> Tensor:
        """`Float32[n]`: norm of each kept block of a sparse weight, the same on all its ranks.

        Args:
            name: full name of the values, `[n B B]`.
        """
        self.gather()
        self.wait(self.shard.index)
        norms = block_norms(next(w for w in self.owned if w.name == name).working)
        self.free()
        piece, groups = self.shard.pieces[name], self.shard.groups
        if groups is None or not piece.is_sharded:
            return norms
        full = norms.new_zeros(piece.full_shape[0])
        replace(piece, full_shape=full.shape, ranges=piece.ranges[:1]).write_into(full, norms)
        groups.sum_over_tensor_parallel(full)
        return full

    def reset_blocks(self, name: str, slots: Tensor) -> None:
        """Zeroes what this rank holds of kept blocks of a sparse weight, and of their moments.

        Args:
            name: full name of the values, `[n B B]`.
            slots: positions of the blocks in the full values, `Int64[m]`.
        """
        shard = self.shard
        weight = next(weight for weight in shard.parameters if weight.name == name)
        size, begin = weight.shape[1:].numel(), weight.flat_offset - shard.param_shard_begin
        for slot in _local_positions(shard.pieces[name], slots):
            first = begin + slot * size
            self._working[max(0, first) : max(0, first + size)] = 0
            for segment in self.parameters:
                if segment.name == name:
                    segment.reset_elements(slot * size, (slot + 1) * size)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint entries of what this rank holds."""
        shard = self.shard
        return checkpoint_tensors(
            self._responsible_parameters(),
            shard.persistent_buffers if shard.is_full_layer or shard.is_first_shard else {},
            frozen=self._saved_frozen(),
            full=shard.is_full_layer,
        )

    def _saved_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and values of the frozen weights that this rank saves."""
        shard = self.shard
        if shard.groups is None:
            yield from ((weight.name, weight.working) for weight in shard.frozen)
            return
        for segment in shard.frozen_segments if shard.saves_frozen else ():
            if shard.is_responsible_for(segment):
                values = self._frozen[segment.shard_slice].view(segment.shape)
                yield shard.checkpoint_name(segment), values


def _local_positions(piece: ParamShard, slots: Tensor) -> Iterator[int]:
    """Where some positions of a full tensor's first dimension are in a rank's part of it."""
    ranges, positions, first = piece.ranges[0], slots.tolist(), 0
    if ranges is None:
        yield from positions
        return
    for start, stop in ranges:
        yield from (first + slot - start for slot in positions if start <= slot < stop)
        first += stop - start
