"""What one rank holds of one layer: flat shards of its weights and gradients, as in FSDP and ZeRO.

Tensor parallelism gives the rank a part of each weight. The parts of all weights that the layer
owns are laid out flat. Between uses, each of the data-parallel ranks that share a layer keeps a
shard of that flat layer, and updates a part of the shard. Gradients are accumulated in one flat
buffer; after the reductions only the part that this rank updates is left. Frozen weights are laid
out flat by themselves, in shards that nobody updates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from windlass.models import ParamShard, layer_sharding, param_shards
from windlass.program import (
    optimizer_shard_index,
    padded_elements,
    padded_frozen_elements,
    parameter_shard_index,
    updates_per_shard,
)
from windlass.runtime.distributed.process_groups import (
    TENSOR_AXES,
    PendingCollective,
    ProcessGroups,
)
from windlass.runtime.parameters import (
    DTYPES,
    NOT_LOADED,
    SHARD_SEPARATOR,
    LayerParameters,
    ModelParameter,
    grad_accum_dtype,
    is_hidden,
    master_dtype,
    persistent_buffers,
)
from windlass.runtime.rank_context import RankContext
from windlass.schema import Plan


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter(ModelParameter):
    """A parameter whose values are a part of its flat layer."""

    flat_offset: int
    """Its first element in the flat layer, or in the flat frozen part of it."""

    @property
    def flat_slice(self) -> slice:
        """Its elements in the flat layer."""
        return slice(self.flat_offset, self.flat_offset + self.shape.numel())


@dataclass(slots=True, kw_only=True, eq=False)
class FlatGradParameter(FlatParameter):
    """A parameter whose gradient is a view into its layer's flat gradient buffer."""

    takes_over: ClassVar[bool] = False
    grads: "FlatGradBuffer"
    """The gradient buffer of its layer."""

    def new_gradient(self, dtype: torch.dtype) -> Tensor:
        """The first gradient of a step, a view into the flat one, for the caller to fill."""
        del dtype
        self.gradient = self.grads.get()[self.flat_slice].view(self.shape)
        return self.gradient

    def _set_first_gradient(self, gradient: Tensor) -> None:
        self.new_gradient(gradient.dtype).copy_(gradient)


class FlatGradBuffer:
    """The flat gradient of one layer, allocated when a gradient is first added.

    It is never cleared: the first gradient of each parameter overwrites what was there.

    Args:
        elements: size, including padding.
        dtype: precision of the sum.
        device: where it is allocated.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._elements, self._dtype, self._device = elements, dtype, device
        self._flat: Tensor | None = None

    def get(self) -> Tensor:
        """The buffer `[elements]`; undefined values where no gradient was added."""
        if self._flat is None:
            self._flat = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        return self._flat

    def take(self) -> Tensor:
        """The buffer `[elements]`, handed over to the caller."""
        flat, self._flat = self.get(), None
        return flat

    def discard(self) -> None:
        """Frees the buffer."""
        self._flat = None


class Segment(NamedTuple):
    """A weight, or a piece of one, within the part of the flat layer that this rank updates."""

    name: str
    """Full name of the weight."""
    weight_offset: int
    """Its first element in this tensor-parallel rank's part of the weight."""
    shard_offset: int
    """Its first element in the part that this rank updates."""
    shape: torch.Size
    decays: bool
    """Whether weight decay applies."""
    matrix: bool
    """Whether it is a matrix between the first and the last layer, or a piece of one."""

    @property
    def shard_slice(self) -> slice:
        """Its elements in the part that this rank updates."""
        return slice(self.shard_offset, self.shard_offset + self.shape.numel())


class LayerShard:
    """What this rank holds of one layer of its stage.

    Args:
        context: what this rank runs.
        groups: its process groups.
        index: index of the layer.
        layer: the layer, with real buffers.
    """

    def __init__(
        self, context: RankContext, groups: ProcessGroups, index: int, layer: nn.Module
    ) -> None:
        plan, stack = context.plan, context.stack
        tensor_parallel, optim_shard = (
            groups.tensor_parallel,
            optimizer_shard_index(groups.coord.data_rank, plan),
        )
        self._groups, self._name, self._layer = groups, stack.names[index], layer
        self._device, self._dtype = context.device.torch_device, master_dtype(plan.precision)
        self._precision = plan.precision
        self.is_hidden = is_hidden(index, stack)
        """Whether the layer is neither the first nor the last one."""
        parts = param_shards(layer, layer_sharding(stack, index), tensor_parallel)
        self.shapes = {self._full_name(n): torch.Size(part.shape) for n, part in parts.items()}
        """Shape of every weight that the layer computes with, by full name."""
        self._frozen_names = frozenset(
            self._full_name(name)
            for name, parameter in layer.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        )
        owned = {
            self._full_name(n): part
            for n, part in parts.items()
            if self._full_name(n) not in stack.tied_weights
        }
        self.pieces: Mapping[str, ParamShard] = owned
        """This tensor-parallel rank's part of each weight that the layer owns, by full name."""
        names = self._frozen_names
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
            groups.coord.data_rank, plan
        )
        """First element of that shard in the flat frozen weights."""
        self.saves_frozen = optim_shard % updates_per_shard(plan) == 0
        """Whether this rank saves its shard of frozen weights, which others may have too."""
        self.file_part = (tensor_parallel.label, optim_shard)
        """Label of the tensor-parallel rank and index of the optimizer shard, for file names."""
        self.is_first_shard = tensor_parallel.index == 0 == optim_shard
        """Whether this is the first optimizer shard of the first tensor-parallel rank."""
        self.is_full_layer = plan.sharding.optimizer * tensor_parallel.degree == 1
        """Whether this rank updates the full layer."""
        self._pending: tuple[PendingCollective, set[str]] | None = None
        self.grads = FlatGradBuffer(self.elements, grad_accum_dtype(plan), self._device)
        self.parameters = tuple(
            FlatGradParameter(
                name=name, working=NOT_LOADED, shape=self.shapes[name], flat_offset=offset,
                grads=self.grads,
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
        return f"{self._name}.{inner}"

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
            if low < high:
                shape = weight.shape if high - low == count else torch.Size((high - low,))
                yield Segment(
                    weight.name, low - weight.flat_offset, low - begin, shape,
                    decays=len(self.pieces[weight.name].full_shape) >= 2,
                    matrix=len(self.pieces[weight.name].full_shape) == 2 and self.is_hidden,
                )  # fmt: skip

    def checkpoint_name(self, segment: Segment) -> str:
        """The name of a segment in a checkpoint."""
        if self.is_full_layer:
            return segment.name
        return f"{segment.name}{SHARD_SEPARATOR}{segment.weight_offset}"

    def flatten(self, layer: nn.Module) -> Tensor:
        """This rank's tensor-parallel part of the layer's trained weights, `[elements]`.

        Args:
            layer: the layer, with real weights.
        """
        flat = torch.zeros(self.elements, dtype=self._dtype, device=self._device)
        named = {self._full_name(n): p.detach() for n, p in layer.named_parameters()}
        self._fill(flat, self.parameters, named.__getitem__)
        return flat

    def frozen_shard(self, full_weight: Callable[[str], Tensor]) -> Tensor:
        """This rank's shard of the layer's frozen weights, `[frozen_shard_elements]`.

        Args:
            full_weight: gives a weight in full by its full name.
        """
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
            part = self.pieces[weight.name].extract(full_weight(weight.name))
            flat[weight.flat_slice] = part.reshape(-1).to(flat.dtype)

    def layer_parameters(
        self, by_name: dict[str, ModelParameter], tied_weights: Mapping[str, str]
    ) -> LayerParameters:
        """What the layer computes with: its own weights and the tied ones.

        Args:
            by_name: parameters of the layers before, by full name; extended by those of this layer
                and by tied weights that another stage will send.
            tied_weights: full name of a tied weight to that of its owner.
        """
        by_name |= {weight.name: weight for weight in (*self.parameters, *self.frozen)}
        for name, shape in self.shapes.items():
            owner = tied_weights.get(name, name)
            if owner not in by_name:
                by_name[owner] = ModelParameter(
                    name=owner, working=NOT_LOADED, shape=shape, frozen=name in self._frozen_names
                )
        return LayerParameters(
            name=self._name,
            owned=self.parameters,
            frozen=self.frozen,
            used=tuple(by_name[tied_weights.get(name, name)] for name in self.shapes),
            buffers=tuple(self._layer.buffers()),
            persistent_buffers=persistent_buffers(self._name, self._layer),
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
        if self.parameters:
            flat = self._take_flat_gradient(names)
            self._sum_replicated(flat)
            self._pending = self._groups.reduce_grads(flat), names

    def reduced_grads(self) -> list[Tensor | None]:
        """The reduced gradient of each segment, handed over; None for a weight without one."""
        if self._pending is not None:
            (pending, names), self._pending = self._pending, None
            return self._by_segment(pending.wait(), names)
        names = self._finish_accumulation()  # no other rank contributes
        if not names:
            return [None] * len(self.segments)
        return self._by_segment(self._take_flat_gradient(names), names)

    def discard_grads(self) -> None:
        """Drops the gradients of a step that was aborted."""
        self.grads.discard()
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
        flat = self.grads.take()
        for weight in self.parameters:
            if weight.name not in names:
                flat[weight.flat_slice].zero_()
        flat[self._weight_elements :].zero_()
        return flat

    def _sum_replicated(self, flat: Tensor) -> None:
        """Sums the gradients of weights that several tensor-parallel ranks hold alike."""
        for axis in TENSOR_AXES if self._groups.tensor_parallel.degree > 1 else ():
            views = [
                flat[weight.flat_slice]
                for weight in self.parameters
                if self.pieces[weight.name].replicated_over == axis
            ]
            if views:
                replicated = torch.cat(views)
                self._groups.all_reduce_tensor_parallel(replicated, axis)
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
        replicated_over = self.pieces[segment.name].replicated_over
        return self._groups.tensor_parallel.is_first_replica(replicated_over)


def remote_layer_parameters(name: str) -> LayerParameters:
    """The empty parameters of a layer that belongs to another stage."""
    return LayerParameters(name=name, owned=(), used=(), buffers=(), persistent_buffers={})


def writes_checkpoint(layer: int, plan: Plan, groups: ProcessGroups) -> bool:
    """Whether this rank writes its shard of a layer to checkpoints.

    Data-parallel ranks that hold the same shard take turns, layer by layer.
    """
    copies = plan.parallel.data // plan.sharding.optimizer
    return groups.coord.data_rank // plan.sharding.optimizer == layer % copies
