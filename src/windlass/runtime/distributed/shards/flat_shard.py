"""What one rank holds of one layer: flat shards of its weights and gradients, as in FSDP and ZeRO.

The only rank of a run holds each weight as it is: its one segment is the whole weight. Otherwise
tensor parallelism gives the rank a part of each weight. The parts of all weights that the layer
owns are laid out flat. Between uses, each of the data-parallel ranks that share a layer keeps a
shard of that flat layer, and updates a part of the shard. Gradients are accumulated in one flat
buffer; after the reductions only the part that this rank updates is left. Frozen weights are laid
out flat by themselves, in shards that nobody updates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.models import ParamShard, expert_parameters, layer_sharding, param_shards
from windlass.program import (
    optimizer_shard_index,
    padded_elements,
    padded_frozen_elements,
    parameter_shard_index,
    updates_per_shard,
)
from windlass.runtime.checkpoint.checkpoint import layer_file
from windlass.runtime.distributed.flat_weights import (
    FlatGradBuffer,
    FlatGradParameter,
    FlatParameter,
    Segment,
    WeightPart,
)
from windlass.runtime.distributed.process_groups import (
    TENSOR_AXES,
    PendingCollective,
    ProcessGroups,
    SingleProcess,
)
from windlass.runtime.optimizer_state.optimizer_state import DTYPES, grad_accum_dtype, stored_dtype
from windlass.runtime.parameters import (
    NOT_LOADED,
    SHARD_SEPARATOR,
    LayerParameters,
    ModelParameter,
    is_hidden,
    persistent_buffers,
)
from windlass.runtime.rank_context import RankContext
from windlass.schema import optimizer_law


class LayerShard:
    """What this rank holds of one layer of its stage, or of a part of its weights."""

    def __init__(
        self, context: RankContext, groups: ProcessGroups | None, index: int, layer: nn.Module,
        part: WeightPart,
    ) -> None:  # fmt: skip
        self.part = part
        """Which weights, and who shares them."""
        plan, stack, rank = self.part.plan, context.stack, groups or SingleProcess()
        tensor_parallel, optim_shard = (
            rank.tensor_parallel,
            optimizer_shard_index(self.part.data_rank, plan),
        )
        self.groups = groups
        """The rank's process groups; None if it is the only one, which has nothing flat."""
        self._is_first_replica = tensor_parallel.is_first_replica
        self.index, self.name = index, stack.names[index]
        # The layer itself is not kept: its weights are those of all ranks.
        self._buffers = tuple(layer.buffers())
        self.persistent_buffers = persistent_buffers(self.name, layer)
        """Buffers that belong in a checkpoint, by full name."""
        layer = stack.layers[index]  # of the other one, parameters that are tied may be empty
        self._device, self._dtype = context.device.torch_device, stored_dtype(plan)
        self._precision = plan.precision
        self._law = optimizer_law(plan.optimizer)
        self.is_hidden = is_hidden(index, stack)
        """Whether the layer is neither the first nor the last one."""
        parts = param_shards(layer, layer_sharding(stack, index), tensor_parallel)
        divided = expert_parameters(layer) if rank.experts.degree > 1 else frozenset()
        self.shapes = {
            self._full_name(name): torch.Size(
                rank.experts.shape(piece.shape) if name in divided else piece.shape
            )
            for name, piece in parts.items()
        }
        """Shape of every weight that the layer computes with, by full name."""
        self._frozen_names = frozenset(
            self._full_name(name)
            for name, parameter in layer.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        )
        owned = {
            self._full_name(n): piece
            for n, piece in parts.items()
            if self._full_name(n) not in stack.tied_weights
            and (n in divided) == (self.part.experts is not None)
        }
        self.pieces: Mapping[str, ParamShard] = owned
        """This tensor-parallel rank's part of each weight that the layer owns, by full name."""
        names = self._frozen_names
        self.frozen_of_layer = names - stack.tied_weights.keys()
        """Full names of all frozen weights that the layer owns, of its other parts too."""
        trained, self._weight_elements = self._laid_out(n for n in owned if n not in names)
        frozen, frozen_elements = self._laid_out(n for n in owned if n in names)
        self.elements = padded_elements(self._weight_elements, plan)
        """Elements of the flat trained weights, including padding."""
        self.frozen_elements = padded_frozen_elements(frozen_elements, plan)
        """Elements of the flat frozen weights, including padding."""
        self.optim_shard_elements = self.elements // plan.sharding.optimizer
        """Elements that this rank updates."""
        self.param_shard_elements = self.elements // plan.sharding.parameters
        """Elements of the weight shard that this rank keeps between uses."""
        self.optim_shard_begin = optim_shard * self.optim_shard_elements
        """First element of the flat layer that this rank updates."""
        self.param_shard_begin = (
            self.optim_shard_begin // self.param_shard_elements * self.param_shard_elements
            if self.param_shard_elements
            else 0
        )
        """First element of the weight shard in the flat layer."""
        self.frozen_shard_elements = self.frozen_elements // plan.sharding.parameters
        """Elements of the shard of frozen weights that this rank keeps."""
        self.frozen_shard_begin = self.frozen_shard_elements * parameter_shard_index(
            self.part.data_rank, plan
        )
        """First element of that shard in the flat frozen weights."""
        self.saves_frozen = optim_shard % updates_per_shard(plan) == 0
        """Whether this rank saves its shard of frozen weights, which others may have too."""
        apart = 2 * rank.coord.data_rank + (self.part.experts is not None)
        self.file_part = (tensor_parallel.label, apart if divided else optim_shard)
        """Label of the tensor-parallel rank, and a number for what it has that others have not: of
        the optimizer shard, or of the part and the replica where experts are divided."""
        self.is_first_shard = tensor_parallel.index == 0 == optim_shard and not self.part.experts
        """Whether this is the first optimizer shard of the first tensor-parallel rank."""
        is_whole = plan.sharding.optimizer * tensor_parallel.degree == 1
        self.is_full_layer = is_whole and not divided
        """Whether this rank updates the full layer."""
        self._pending: tuple[PendingCollective, set[str]] | None = None
        self._grads = FlatGradBuffer(self.elements, grad_accum_dtype(plan), self._device)
        self.parameters: tuple[FlatParameter, ...] = tuple(
            FlatParameter(
                name=name, working=NOT_LOADED, shape=self.shapes[name], flat_offset=offset
            )
            if groups is None
            else FlatGradParameter(
                name=name, working=NOT_LOADED, shape=self.shapes[name], flat_offset=offset,
                grads=self._grads,
            )
            for name, offset in trained.items()
        )  # fmt: skip
        """The weights that the layer owns and updates."""
        self.frozen = tuple(
            FlatParameter(
                name=name, working=NOT_LOADED, shape=self.shapes[name], flat_offset=offset,
                frozen=True,
            )
            for name, offset in frozen.items()
        )  # fmt: skip
        """The weights that the layer owns and never updates."""
        self.segments = tuple(
            self._segments(self.parameters, self.optim_shard_begin, self.optim_shard_elements)
        )
        """What this rank updates."""
        self.frozen_segments = tuple(
            self._segments(self.frozen, self.frozen_shard_begin, self.frozen_shard_elements)
        )
        """What this rank keeps of frozen weights."""

    def _full_name(self, inner: str) -> str:
        return f"{self.name}.{inner}"

    def _laid_out(self, names: Iterable[str]) -> tuple[dict[str, int], int]:
        """First element of each weight, one behind the other, and the elements of all."""
        names = tuple(names)
        counts = (self.shapes[name].numel() for name in names)
        *offsets, total = accumulate(counts, initial=0)
        return dict(zip(names, offsets, strict=True)), total

    def _segments(
        self, weights: Sequence[FlatParameter], begin: int, elements: int
    ) -> Iterator[Segment]:
        """What a range of the flat layer has of each weight."""
        end = begin + elements
        for weight in weights:
            count = weight.shape.numel()
            low, high = max(weight.flat_offset, begin), min(weight.flat_offset + count, end)
            if low < high or self.groups is None:
                shape = weight.shape if high - low == count else torch.Size((high - low,))
                offset = low - weight.flat_offset + self._first_element(weight.name)
                yield Segment(
                    weight.name, offset, low - begin, shape,
                    decays=len(self.pieces[weight.name].full_shape) >= 2,
                    matrix=self._law.updates_as_matrix(
                        self.pieces[weight.name].full_shape, hidden=self.is_hidden
                    ),
                )  # fmt: skip

    def _first_element(self, name: str) -> int:
        """First element of a weight that this rank has, of a tensor-parallel rank's part of it."""
        experts = self.part.experts
        return 0 if experts is None else experts.index * self.shapes[name].numel()

    def values(self, segment: Segment, full_weight: Callable[[str], Tensor]) -> Tensor:
        """A segment's values, of a weight that `full_weight` gives in full by its full name."""
        begin = segment.weight_offset - self._first_element(segment.name)
        part = self._own_part(segment.name, full_weight).reshape(-1)
        return part[begin:][: segment.shape.numel()].view(segment.shape)

    def frozen_values(self, full_weight: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Gives this rank's segments of frozen weights by their names in a checkpoint."""
        segments = {self.checkpoint_name(segment): segment for segment in self.frozen_segments}
        return lambda name: self.values(segments[name], full_weight)

    def _own_part(self, name: str, full_weight: Callable[[str], Tensor]) -> Tensor:
        """What this rank has of a weight while a layer computes."""
        part = self.pieces[name].extract(full_weight(name))
        return part if self.part.experts is None else self.part.experts.own(part)

    def checkpoint_name(self, segment: Segment) -> str:
        """The name of a segment in a checkpoint."""
        if self.is_full_layer:
            return segment.name
        return f"{segment.name}{SHARD_SEPARATOR}{segment.weight_offset}"

    def flat_weights(self, full_weight: Callable[[str], Tensor]) -> Tensor:
        """This rank's tensor-parallel part of the layer's trained weights, `[elements]`."""
        flat = torch.zeros(self.elements, dtype=self._dtype, device=self._device)
        self._fill(flat, self.parameters, full_weight)
        return flat

    def frozen_shard(self, full_weight: Callable[[str], Tensor]) -> Tensor:
        """This rank's shard of the layer's frozen weights, `[frozen_shard_elements]`."""
        dtype = DTYPES[self._precision]
        flat = torch.zeros(self.frozen_elements, dtype=dtype, device=self._device)
        self._fill(flat, self.frozen, full_weight)
        shard = flat[self.frozen_shard_begin :][: self.frozen_shard_elements]
        return shard.clone() if len(shard) < len(flat) else shard

    def _fill(
        self, flat: Tensor, weights: Sequence[FlatParameter], full_weight: Callable[[str], Tensor]
    ) -> None:
        """Copies a rank's part of weights to their places in a flat layer."""
        for weight in weights:
            part = self._own_part(weight.name, full_weight)
            flat[weight.flat_slice] = part.reshape(-1).to(flat.dtype)

    def layer_parameters(
        self, by_name: dict[str, ModelParameter], tied_weights: Mapping[str, str],
        owned: Sequence[ModelParameter], frozen: Sequence[ModelParameter],
    ) -> LayerParameters:  # fmt: skip
        """What the layer computes with: its own weights and the tied ones.

        Args:
            by_name: parameters of the layers before, by full name; extended by those of this layer
                and by tied weights that another stage will send.
        """
        by_name |= {weight.name: weight for weight in (*owned, *frozen)}
        for name, shape in self.shapes.items():
            owner = tied_weights.get(name, name)
            if owner not in by_name:
                by_name[owner] = ModelParameter(
                    name=owner, working=NOT_LOADED, shape=shape, frozen=name in self._frozen_names
                )
        return LayerParameters(
            name=self.name,
            owned=tuple(owned),
            frozen=tuple(frozen),
            # A weight with two names in one layer is taken once, as its template takes it.
            used=tuple(
                by_name[owner]
                for name in self.shapes
                for owner in (tied_weights.get(name, name),)
                if owner == name or not owner.startswith(f"{self.name}.")
            ),
            buffers=self._buffers,
            persistent_buffers=self.persistent_buffers,
        )

    def use_full_weights(self, flat: Tensor) -> None:
        """Lets the layer compute with views into its unsharded weights, `[elements]`."""
        for weight in self.parameters:
            weight.working = flat[weight.flat_slice].view(weight.shape).requires_grad_()

    def use_full_frozen(self, flat: Tensor) -> None:
        """Lets the layer compute with views into its frozen weights, `[frozen_elements]`."""
        for weight in self.frozen:
            weight.working = flat[weight.flat_slice].view(weight.shape)

    def free_full_weights(self) -> None:
        """Frees the unsharded weights."""
        for weight in (*self.parameters, *self.frozen):
            weight.working = NOT_LOADED

    def start_reduce(self) -> None:
        """Starts to sum the gradient over tensor-parallel and data-parallel ranks."""
        names = self._finish_accumulation()
        if self.groups is not None and self.parameters:
            flat = self._take_flat_gradient(names)
            self._sum_replicated(flat, self.groups)
            self._pending = self.groups.reduce_grads(flat, self.part), names

    def reduced_grads(self) -> list[Tensor | None]:
        """The reduced gradient of each segment, handed over; None for a weight without one."""
        if self.groups is None:
            for weight in self.parameters:
                weight.flush_sparse_gradient()
            gradients = [weight.gradient for weight in self.parameters]
            for weight in self.parameters:
                weight.clear_gradient()
            return gradients
        if self._pending is not None:
            (pending, names), self._pending = self._pending, None
            return self._by_segment(pending.wait(), names)
        names = self._finish_accumulation()  # no other rank contributes
        if not names:
            return [None] * len(self.segments)
        return self._by_segment(self._take_flat_gradient(names), names)

    def discard_grads(self) -> None:
        """Drops the gradients of a step that was aborted."""
        self._grads.discard()
        self._pending = None

    def _finish_accumulation(self) -> set[str]:
        """Adds pending sparse gradients, and returns the names of weights that have a gradient.

        The parameters give up their views; the values stay in the flat buffer.
        """
        for weight in self.parameters:
            weight.flush_sparse_gradient()
        names = {weight.name for weight in self.parameters if weight.gradient is not None}
        for weight in self.parameters:
            weight.clear_gradient()
        return names

    def _take_flat_gradient(self, names: set[str]) -> Tensor:
        """The flat gradient, `[elements]`: zero in the padding and for weights not in `names`."""
        flat = self._grads.take()
        for weight in self.parameters:
            if weight.name not in names:
                flat[weight.flat_slice].zero_()
        flat[self._weight_elements :].zero_()
        return flat

    def _sum_replicated(self, flat: Tensor, groups: ProcessGroups) -> None:
        """Sums the gradients of weights that several tensor-parallel ranks hold alike."""
        for axis in TENSOR_AXES if groups.tensor_parallel.degree > 1 else ():
            views = [
                flat[weight.flat_slice]
                for weight in self.parameters
                if self.pieces[weight.name].replicated_over == axis
            ]
            if views:
                replicated = torch.cat(views)
                groups.all_reduce_tensor_parallel(replicated, axis)
                parts = replicated.split([len(view) for view in views])
                for view, part in zip(views, parts, strict=True):
                    view.copy_(part)

    def _by_segment(self, shard: Tensor, names: set[str]) -> list[Tensor | None]:
        return [
            shard[segment.shard_slice].view(segment.shape) if segment.name in names else None
            for segment in self.segments
        ]

    def is_responsible_for(self, segment: Segment) -> bool:
        """Whether this rank counts a segment in the norm and saves it.

        Only the first of the tensor-parallel ranks that hold the same values does.
        """
        return self._is_first_replica(self.pieces[segment.name].replicated_over)

    @property
    def is_saved(self) -> bool:
        """Whether this rank writes it to checkpoints.

        Data-parallel ranks that hold the same shard take turns, layer by layer.
        """
        plan = self.part.plan
        shards = plan.sharding.optimizer
        turn = self.index % (plan.parallel.replicas // shards)
        return self.part.data_rank // shards == turn

    def checkpoint_file(self, to: Path) -> Path:
        """Its file in a checkpoint, given that of the full layer."""
        if self.is_full_layer:
            return to
        return to.with_name(layer_file(self.index, shard=self.file_part))
