"""Share: what one device of several has of one layer.

Of each weight the device's slice has a piece. The pieces of what the layer owns are laid flat, and
of replicas that share, each keeps a shard of that between uses and updates a part of it. Gradients
are summed in one flat piece, of which the part that the device updates is left once replicas and
slices have summed it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.models.layer_stack import Chain, cuts_of
from windlass.models.tensor_parallel.shard_params import Piece, pieces
from windlass.program.zero_sharding import optimizer_shard, padded
from windlass.runtime.distributed.process_groups import AMONG, Coming, Pod
from windlass.runtime.parameters import (
    AWAY,
    SHARD_MARK,
    LayerParameters,
    Parameter,
    master_dtype,
    saved_buffers,
    sum_dtype,
)
from windlass.schema.plan import Plan


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter(Parameter):
    """A parameter whose gradient is a part of its layer's flat one."""

    first: int
    """Element of the flat layer."""
    sums: "FlatSum"

    def _begin(self, gradient: Tensor) -> None:
        self.gradient = self.sums.made()[self.at].view(self.shape)
        self.gradient.copy_(gradient)

    @property
    def at(self) -> slice:
        """Where it lies in the flat layer."""
        return slice(self.first, self.first + self.shape.numel())


class FlatSum:
    """The gradient of a layer in one piece, made when something is first added.

    Nothing clears it: what is first added to a place is copied there.

    Args:
        elements: padding included.
        dtype: of the sum.
        on: where it lies.
    """

    def __init__(self, elements: int, dtype: torch.dtype, on: torch.device) -> None:
        self._elements, self._dtype, self._on = elements, dtype, on
        self._flat: Tensor | None = None

    def made(self) -> Tensor:
        """The whole, with no value yet where nothing was added."""
        if self._flat is None:
            self._flat = torch.empty(self._elements, dtype=self._dtype, device=self._on)
        return self._flat

    def taken(self) -> Tensor:
        """The whole, handed over."""
        flat, self._flat = self.made(), None
        return flat

    def forget(self) -> None:
        """Drops it."""
        self._flat = None


class Segment(NamedTuple):
    """A weight, or a shard of one, in the part that the device updates."""

    name: str
    """Of the weight."""
    first: int
    """Element of the slice's piece of the weight."""
    start: int
    """Element of the part."""
    shape: torch.Size
    decays: bool

    @property
    def at(self) -> slice:
        """Where it lies in the part."""
        return slice(self.start, self.start + self.shape.numel())


class Share:
    """One device's share of one layer of its stage.

    Args:
        plan: of several devices.
        chain: the model.
        index: of the layer.
        layer: with real buffers.
        pod: the device among the others.
        on: where tensors lie.
    """

    def __init__(
        self, plan: Plan, chain: Chain, index: int, layer: nn.Module, pod: Pod, on: torch.device
    ) -> None:
        self._pod, self._name, self._layer, self._on = pod, chain.names[index], layer, on
        self._dtype = master_dtype(plan.precision)
        cut = pieces(layer, cuts_of(chain, index), pod.slice)
        self.shapes = {self._full(n): torch.Size(piece.shape) for n, piece in cut.items()}
        """Of all that the layer computes with, by full name."""
        owned = {self._full(n): p for n, p in cut.items() if self._full(n) not in chain.ties}
        self.pieces: Mapping[str, Piece] = owned
        """Which part of each weight of its own the slice has, by full name."""
        shapes = [self.shapes[full] for full in owned]
        firsts = list(accumulate((shape.numel() for shape in shapes), initial=0))
        self._weights = firsts[-1]
        """Elements of the flat layer before the padding."""
        self.elements = padded(firsts[-1], plan)
        """Of the flat layer, padding included."""
        self.part = self.elements // plan.sharding.optimizer
        """Elements that the device updates."""
        self.held = self.elements // plan.sharding.parameters
        """Elements of the shard that stays."""
        self.begin = optimizer_shard(pod.place.replica, plan) * self.part
        """Element of the flat layer at which the device's part begins."""
        self.held_begin = self.begin // self.held * self.held if self.held else 0
        self.at = (pod.slice.name, optimizer_shard(pod.place.replica, plan))
        """Which slice of the layer, and which shard of that, the device's part is."""
        self.first = pod.slice.index == 0 == self.at[1]
        """Whether that is the first shard of the first slice."""
        self.whole = plan.sharding.optimizer * pod.slice.degree == 1
        """Whether the part is the whole layer."""
        self._coming: tuple[Coming, set[str]] | None = None
        self.sums = FlatSum(self.elements, sum_dtype(plan), on)
        self.parameters = tuple(
            FlatParameter(name=full, working=AWAY, shape=shape, first=first, sums=self.sums)
            for full, shape, first in zip(owned, shapes, firsts, strict=False)
        )
        dims = {full: len(piece.full) for full, piece in owned.items()}
        self.segments = tuple(self._segments(dims))

    def _full(self, inner: str) -> str:
        return f"{self._name}.{inner}"

    def _segments(self, dims: Mapping[str, int]) -> Iterator[Segment]:
        end = self.begin + self.part
        for weight in self.parameters:
            count = weight.shape.numel()
            low, high = max(weight.first, self.begin), min(weight.first + count, end)
            if low < high:
                shape = weight.shape if high - low == count else torch.Size((high - low,))
                yield Segment(
                    weight.name, low - weight.first, low - self.begin, shape,
                    decays=dims[weight.name] >= 2,
                )  # fmt: skip

    def marked(self, segment: Segment) -> str:
        """The name of a segment in a checkpoint."""
        return segment.name if self.whole else f"{segment.name}{SHARD_MARK}{segment.first}"

    def flat(self, layer: nn.Module) -> Tensor:
        """`[elements]`: what the layer owns, of its slice, laid flat, zeros behind it.

        Args:
            layer: with real weights.
        """
        flat = torch.zeros(self.elements, dtype=self._dtype, device=self._on)
        named = {self._full(n): p.detach() for n, p in layer.named_parameters()}
        for weight in self.parameters:
            local = self.pieces[weight.name].of(named[weight.name])
            flat[weight.first : weight.first + local.numel()] = local.reshape(-1)
        return flat

    def with_ties(self, known: dict[str, Parameter], ties: Mapping[str, str]) -> LayerParameters:
        """What the layer computes with: its own weights, and tied ones.

        Args:
            known: by full name, of the layers before; its own are added, and what another stage is
                to lend.
            ties: full name of a weight to that of its owner.
        """
        known |= {weight.name: weight for weight in self.parameters}
        for full, shape in self.shapes.items():
            owner = ties.get(full, full)
            if owner not in known:
                known[owner] = Parameter(name=owner, working=AWAY, shape=shape)
        return LayerParameters(
            name=self._name,
            owned=self.parameters,
            used=tuple(known[ties.get(full, full)] for full in self.shapes),
            buffers=tuple(self._layer.buffers()),
            saved_buffers=saved_buffers(self._name, self._layer),
        )

    def place(self, whole: Tensor) -> None:
        """Lets the layer compute with its places in `[elements]`."""
        for weight in self.parameters:
            weight.working = whole[weight.at].view(weight.shape).requires_grad_()

    def release(self) -> None:
        """Lets go of the whole weights."""
        for weight in self.parameters:
            weight.working = AWAY

    def reduce(self) -> None:
        """Begins to sum the gradient over slices and replicas."""
        has = self._complete()
        if self.parameters:
            flat = self._taken(has)
            self._sum_common(flat)
            self._coming = self._pod.reduce(flat), has

    def summed(self) -> list[Tensor | None]:
        """Each segment's gradient, once all have summed it; handed over. None: it has none."""
        if self._coming is not None:
            (coming, has), self._coming = self._coming, None
            return self._of_segments(coming.come(), has)
        has = self._complete()  # nobody else has a contribution
        return self._of_segments(self._taken(has), has) if has else [None] * len(self.segments)

    def forget(self) -> None:
        """Drops gradients of a step that did not end."""
        self.sums.forget()
        self._coming = None

    def _complete(self) -> set[str]:
        """Adds what waits to be added; names the weights that have a gradient, and forgets it."""
        for weight in self.parameters:
            weight.complete()
        has = {weight.name for weight in self.parameters if weight.gradient is not None}
        for weight in self.parameters:
            weight.forget()
        return has

    def _taken(self, has: set[str]) -> Tensor:
        """`[elements]`: the gradient, handed over; zeros for weights that have none, and behind."""
        flat = self.sums.taken()
        for weight in self.parameters:
            if weight.name not in has:
                flat[weight.at].zero_()
        flat[self._weights :].zero_()
        return flat

    def _sum_common(self, flat: Tensor) -> None:
        """Sums over the slices the gradients of what they have in common."""
        for among in AMONG if self._pod.slice.degree > 1 else ():
            places = [
                flat[weight.at]
                for weight in self.parameters
                if self.pieces[weight.name].common == among
            ]
            if places:
                common = torch.cat(places)
                self._pod.sum_slices(common, among)
                for place, part in zip(places, common.split([len(p) for p in places]), strict=True):
                    place.copy_(part)

    def _of_segments(self, part: Tensor, has: set[str]) -> list[Tensor | None]:
        return [
            part[segment.at].view(segment.shape) if segment.name in has else None
            for segment in self.segments
        ]

    def answers_for(self, segment: Segment) -> bool:
        """Whether this slice counts and saves it: of those that have the same, the first does."""
        return self._pod.slice.answers_for(self.pieces[segment.name].common)


def of_another_stage(name: str) -> LayerParameters:
    """What this device has of a layer of another stage."""
    return LayerParameters(name=name, owned=(), used=(), buffers=(), saved_buffers={})


def writes(layer: int, plan: Plan, pod: Pod) -> bool:
    """Whether this device writes a layer's checkpoint: replicas that hold the same share layers."""
    copies = plan.parallel.data // plan.sharding.optimizer
    return pod.place.replica // plan.sharding.optimizer == layer % copies
