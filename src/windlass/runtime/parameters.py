"""The tensors that persist from step to step on one device: weights and optimizer state.

Each weight is stored once, in the layer that owns it; tied layers refer to it. In bfloat16 the
layers compute with copies of float32 master weights, refreshed after each update.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from windlass.models import LayerStack, materialize_layer
from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.runtime.optimizer_state.optimizer_state import (
    DTYPES,
    Averaging,
    StateFormat,
    master_dtype,
    wide_dtype,
)
from windlass.schema import Precision
from windlass.torch_ext import CpuDevice, StoredMoment

NOT_LOADED = torch.empty(0)
"""Placeholder for weights that are not in device memory."""

SHARD_SEPARATOR = "@"
"""Separates a weight's name from the first element of its shard in checkpoint keys."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelParameter:
    """A parameter as layers use it: the working weights and the gradient of one step."""

    takes_over: ClassVar[bool] = True
    """Whether a step's first gradient, if it has the sum's precision, becomes the sum."""
    name: str
    """Full name: `<layer name>.<its name inside>`."""
    working: Tensor
    """Weights in the run's precision; empty while they are offloaded or on other devices."""
    shape: torch.Size
    frozen: bool = False
    """Whether it is never updated: it has no gradient, master weights or optimizer state."""
    gradient: Tensor | None = None
    """Sum over the step's micro-batches; None before the first one and after the update."""
    sparse_gradient: Tensor | None = None
    """Sum of gradients of looked-up rows over micro-batches; on a CPU of those rows alone. It is
    kept separately and added at the end, so that the total does not depend on the order in which
    layers run."""

    def add_gradient(self, gradient: Tensor, *, accumulated: bool) -> None:
        """Adds a micro-batch's gradient.

        Args:
            gradient: ownership passes to this parameter; the caller must not use it afterwards.
            accumulated: whether several micro-batches are accumulated, which happens in float32.
        """
        if gradient.is_sparse:
            wide = wide_dtype(gradient.dtype) if accumulated else gradient.dtype
            self._add_rows(gradient, wide)
            if not accumulated:
                self.flush_sparse_gradient()
        elif self.gradient is None:
            # The optimizer walks memory linearly, so the layout must be that of the weight.
            self._set_first_gradient(
                gradient.to(wide_dtype(gradient.dtype) if accumulated else gradient.dtype)
            )
        elif gradient.dtype == self.gradient.dtype or not gradient.is_cpu:
            self.gradient.add_(gradient)
        else:
            # In pieces, because torch makes a float32 copy of whatever is added to float32.
            pieces = zip(_pieces(self.gradient), _pieces(gradient.contiguous()), strict=True)
            for total, piece in pieces:
                total.add_(piece)

    def _add_rows(self, rows: Tensor, dtype: torch.dtype) -> None:
        """Adds a gradient of looked-up rows, each of which may occur several times."""
        if rows.is_cpu:
            rows = rows.to(dtype)
            total = rows if self.sparse_gradient is None else self.sparse_gradient + rows
            self.sparse_gradient = total.coalesce()
            return
        # The host would have to wait to know how many rows differ. This sums them in a fixed order.
        indices, values = rows._indices()[0], rows._values().to(dtype)  # noqa: SLF001  not coalesced
        dense = torch.ops.aten.embedding_dense_backward(values, indices, len(rows), -1, False)
        if self.sparse_gradient is None:
            self.sparse_gradient = dense
        else:
            self.sparse_gradient.add_(dense)

    def flush_sparse_gradient(self) -> None:
        """Adds the sparse gradient to the dense one; must be called before `gradient` is read."""
        sparse, self.sparse_gradient = self.sparse_gradient, None
        if sparse is None:
            return
        if self.gradient is None:
            self._set_first_gradient(sparse.to_dense() if sparse.is_sparse else sparse)
        else:
            self.gradient.add_(sparse.to(self.gradient.dtype))

    def _set_first_gradient(self, gradient: Tensor) -> None:
        """Stores the first gradient of a step, already in the accumulation precision."""
        self.gradient = gradient.contiguous()

    def new_gradient(self, dtype: torch.dtype) -> Tensor:
        """The first gradient of a step, for the caller to fill: its values are undefined."""
        self.gradient = torch.empty(self.shape, dtype=dtype, device=self.working.device)
        return self.gradient

    def clear_gradient(self) -> None:
        """Drops the gradient of this step."""
        self.gradient = self.sparse_gradient = None


_MATRIX = 2
"""Dimensions of a matrix; weights with fewer never decay."""


def is_hidden(index: int, stack: LayerStack) -> bool:
    """Whether a layer is neither the first nor the last one."""
    return 0 < index < len(stack.layers) - 1


@dataclass(slots=True, kw_only=True, eq=False)
class MasterParameter(ModelParameter):
    """A parameter, or a shard of one, with its master weights and optimizer state in memory."""

    master: Tensor
    """Weights that only the update changes, in float32 at least; the working tensor itself in
    float32, and where there are no master weights."""
    moments: tuple[StoredMoment, ...]
    """The optimizer's moments in their storage format, each in the weight's shape."""
    steps: Tensor
    """`Float[]`: number of updates so far, as torch's optimizers count them."""
    decays: bool
    """Whether weight decay applies; it does not to weights of one dimension."""
    average: Tensor | None = None
    """An average of the master weights over the updates so far; None if none is kept."""
    factors: FactoredMoment | None = None
    """The second moment of the whole weight by rows and columns; None if none is kept."""
    matrix: bool = False
    """Whether the optimizer updates it as a matrix; so it does a shard of one."""
    offset: int = 0
    """First element of this shard in the full weight; 0 for a full weight."""

    def refresh_working_copy(self) -> None:
        """Copies the master weights into the working weights, unless they are the same tensor."""
        if self.working is not self.master:
            self.working.detach().copy_(self.master)

    def averaged(self, averaging: Averaging) -> Tensor:
        """The averaged weight as layers compute with it, beside the trained one."""
        kept = self.average if averaging.is_kept else self.moments[0].values
        if kept is None:
            raise ValueError(f"`{self.name}` has no average, which the plan says with `ema`")
        value = averaging.value(self.master.detach(), kept).to(self.working.dtype)
        return value.detach().requires_grad_()

    def reset_elements(self, first: int, last: int) -> None:
        """Zeroes some elements of the full weight and their moments, as far as they are here."""
        begin, end = max(0, first - self.offset), min(self.master.numel(), last - self.offset)
        if begin < end:
            moments = (moment.values for moment in self.moments)
            averages = () if self.average is None else (self.average,)
            for tensor in (self.master, self.working, *moments, *averages):
                tensor.detach().view(-1)[begin:end] = 0


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """The parameters and buffers that one layer computes with."""

    name: str
    owned: tuple[ModelParameter, ...]
    """Parameters that this layer updates and saves."""
    frozen: tuple[ModelParameter, ...] = ()
    """Parameters that this layer saves and never updates."""
    used: tuple[ModelParameter, ...]
    """Parameters in the order of the template's; owned by this layer or tied to an earlier one."""
    buffers: tuple[Tensor, ...]
    """Buffers in the order of the template's."""
    persistent_buffers: Mapping[str, Tensor]
    """Full name -> buffer, for the buffers that belong in a checkpoint."""

    @property
    def weights(self) -> list[Tensor]:
        """The working weights that the template is called with."""
        return [weight.working for weight in self.used]

    @property
    def trained(self) -> list[ModelParameter]:
        """Those of the used parameters that get a gradient."""
        return [weight for weight in self.used if not weight.frozen]


def checkpoint_tensors(
    weights: Iterable[MasterParameter],
    buffers: Mapping[str, Tensor],
    *,
    frozen: Iterable[tuple[str, Tensor]] = (),
    full: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint entries of some parameters, as (key, tensor).

    Args:
        frozen: values of the parameters that are never updated, by name, or shards by their keys.
        full: whether these are full weights; the key of a shard contains its offset.
    """
    for name, values in frozen:
        yield f"weight/{name}", values
    named = [(w.name if full else f"{w.name}{SHARD_SEPARATOR}{w.offset}", w) for w in weights]
    for name, weight in named:
        yield f"weight/{name}", weight.master
    for name, weight in named:
        for which, moment in enumerate(weight.moments, start=1):
            yield f"moment{which}/{name}", moment.values
            if moment.scales is not None:
                yield f"scale{which}/{name}", moment.scales
        if weight.average is not None:
            yield f"average/{name}", weight.average
        for kind, tensor in () if weight.factors is None else weight.factors.named:
            yield f"{kind}/{name}", tensor
        yield f"steps/{name}", weight.steps
    for name, buffer in buffers.items():
        yield f"buffer/{name}", buffer


def resident_layers(
    stack: LayerStack, *, seed: int, precision: Precision, device: torch.device
) -> tuple[LayerParameters, ...]:
    """The weights of a full layer stack, materialized layer by layer, which nobody updates.

    Args:
        stack: the model; a layer on the meta device gets weights derived from `seed` and their
            names.
    """
    weights: dict[str, ModelParameter] = {}
    layers = []
    for index, name in enumerate(stack.names):
        layer = materialize_layer(stack, index, seed=seed, device=str(device), tied=False)
        named = {f"{name}.{inner}": weight for inner, weight in layer.named_parameters()}
        own = {
            full: _frozen_parameter(full, weight.to(DTYPES[precision]))
            for full, weight in named.items()
            if full not in stack.tied_weights
        }
        weights |= own
        layers.append(
            LayerParameters(
                name=name,
                owned=(),
                frozen=tuple(own.values()),
                used=tuple(weights[stack.tied_weights.get(full, full)] for full in named),
                buffers=tuple(layer.buffers()),
                persistent_buffers=persistent_buffers(name, layer),
            )
        )
    return tuple(layers)


def whole_parameter(
    name: str, parameter: Tensor, precision: Precision, state: StateFormat, *, hidden: bool
) -> MasterParameter:
    """A whole weight with new optimizer state, in the memory of the weight where types agree."""
    dtype = master_dtype(precision) if state.has_masters else DTYPES[precision]
    master = parameter.detach().to(dtype).contiguous()
    if master.dtype == DTYPES[precision]:
        working = master.requires_grad_()
    else:
        working = master.to(DTYPES[precision]).requires_grad_()
    shape = tuple(master.shape)
    return new_master_parameter(
        name, master, working, state, decays=master.dim() >= _MATRIX,
        matrix=state.law.updates_as_matrix(shape, hidden=hidden),
        factors=state.new_factors(shape, master),
    )  # fmt: skip


def _frozen_parameter(name: str, working: Tensor) -> ModelParameter:
    working = working.detach().contiguous()
    return ModelParameter(name=name, working=working, shape=working.shape, frozen=True)


def new_master_parameter(
    name: str,
    master: Tensor,
    working: Tensor,
    state: StateFormat,
    *,
    decays: bool,
    matrix: bool = False,
    offset: int = 0,
    factors: FactoredMoment | None = None,
) -> MasterParameter:
    """A parameter, or a shard of one, before its first update.

    Args:
        working: weights that layers compute with; may be the same tensor.
        factors: second moment of the full parameter by rows and columns; None if none is kept.
    """
    return MasterParameter(
        name=name,
        shape=master.shape,
        master=master,
        working=working,
        moments=state.new_moments(master, matrix=matrix),
        average=state.new_average(master),
        steps=torch.zeros((), device=master.device),
        decays=decays,
        matrix=matrix,
        factors=factors,
        offset=offset,
    )


def persistent_buffers(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """Full name -> buffer, for the buffers of a layer that belong in a checkpoint."""
    persistent = layer.state_dict().keys()
    return {f"{name}.{inner}": b for inner, b in layer.named_buffers() if inner in persistent}


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.detach().view(-1).split(CpuDevice.piece_elements)
