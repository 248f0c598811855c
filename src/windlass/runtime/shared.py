"""Shared: the near weights and optimizer state of one device among several.

A layer's own weights are laid flat. Of replicas that share, each keeps its shard of the weights
between uses and updates its part of that; `gather` makes the layer whole, `release` lets all but
the shard go. Gradients are summed in one flat piece, of which `reduce` leaves what the device
updates. Where nothing is shared the shard is the whole and an update sees whole weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.models.chain import Chain, cuts_of, materialise
from windlass.models.pieces import Piece, pieces
from windlass.program.instruction import Kind, Program
from windlass.program.layout import layers_of
from windlass.program.shards import optimizer_shard, padded, parts
from windlass.program.ties import owners
from windlass.runtime.checkpoint import Checkpoint, layer_file, load_part
from windlass.runtime.interpret import Handler
from windlass.runtime.lane import Moved
from windlass.runtime.optimizer import Optimizer
from windlass.runtime.residence import Saved, save_tensors
from windlass.runtime.tensors import (
    DTYPES,
    LayerParameters,
    Parameter,
    Weight,
    master_dtype,
    saved_buffers,
    saved_tensors,
    sum_dtype,
    weight_of,
)
from windlass.runtime.world import Pod
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan

_AWAY = torch.empty(0)


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter(Parameter):
    """A parameter whose gradient is a part of its layer's flat one."""

    first: int
    """Element of the flat layer."""
    sums: "FlatSum"

    def _begin(self, gradient: Tensor) -> None:
        place = self.sums.made()[self.first : self.first + self.shape.numel()]
        self.gradient = place.view(self.shape)
        self.gradient.copy_(gradient)


class FlatSum:
    """The gradient of a layer in one piece, made when something is first added.

    Args:
        elements: padding included.
        dtype: of the sum.
        on: where it lies.
    """

    def __init__(self, elements: int, dtype: torch.dtype, on: torch.device) -> None:
        self._elements, self._dtype, self._on = elements, dtype, on
        self._flat: Tensor | None = None

    def made(self) -> Tensor:
        """The whole, zeros at first."""
        if self._flat is None:
            self._flat = torch.zeros(self._elements, dtype=self._dtype, device=self._on)
        return self._flat

    def taken(self) -> Tensor:
        """The whole, handed over."""
        flat, self._flat = self.made(), None
        return flat

    def forget(self) -> None:
        """Drops it."""
        self._flat = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Layer:
    """What the device has of one layer of its stage."""

    sums: FlatSum
    elements: int
    """Of the whole flat layer."""
    held: Tensor
    """The shard of the weights that stays, in the run's precision."""
    part: Tensor
    """What of it the device updates."""
    own: tuple[Weight, ...]
    """The weights, or shards of them, that `part` is made of."""
    starts: tuple[int, ...]
    """Of each of them in `part`."""
    pieces: Mapping[str, Piece]
    """Which part of each whole weight this slice has, by full name."""

    def common(self, name: str) -> bool:
        """Whether every slice has a weight whole, and a contribution to its gradient."""
        return self.pieces[name].dim is None


class Shared:
    """Weights and optimizer state of one device among several, all near.

    Args:
        plan: of more than one device.
        graph: that it cuts.
        chain: the model.
        optimizer: applied at once.
        pod: the device among the others.
        seed: of the initial weights.
        device: where everything lies.
        before_update: called with a layer's index before its state changes.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        chain: Chain,
        optimizer: Optimizer,
        pod: Pod,
        *,
        seed: int,
        device: torch.device,
        before_update: Callable[[int], None],
    ) -> None:
        self._plan, self._chain, self._pod, self._device = plan, chain, pod, device
        self._optimizer, self._seed = optimizer, seed
        self._before_update = before_update
        self._shard = optimizer_shard(pod.place.replica, plan)
        self._here = layers_of(plan, pod.place.stage)
        self._shares = plan.sharding.weights > 1
        self._layers: dict[int, _Layer] = {}
        self.norms: dict[int, list[Tensor]] = {}
        self.layers: tuple[LayerParameters, ...] = self._laid_out()
        self._owners = owners(graph)

    # What is there at the start.

    def _laid_out(self) -> tuple[LayerParameters, ...]:
        chain = self._chain
        known: dict[str, Parameter] = {}
        layers: list[LayerParameters] = []
        for index, name in enumerate(chain.names):
            if index not in self._here:
                layers.append(_of_another_stage(name))
                continue
            layer = materialise(chain, index, seed=self._seed, device=str(self._device))
            cut = pieces(layer, cuts_of(chain, index), self._pod.slice)
            shapes = {f"{name}.{n}": torch.Size(piece.shape) for n, piece in cut.items()}
            owned = self._own(index, name, layer, cut)
            known |= {weight.name: weight for weight in owned}
            for full, shape in shapes.items():  # what another stage lends
                owner = chain.ties.get(full, full)
                if owner not in known:
                    known[owner] = Parameter(name=owner, working=_AWAY, shape=shape)
            layers.append(
                LayerParameters(
                    name=name,
                    owned=owned,
                    used=tuple(known[chain.ties.get(full, full)] for full in shapes),
                    buffers=tuple(layer.buffers()),
                    saved_buffers=saved_buffers(name, layer),
                )
            )
        return tuple(layers)

    def _own(
        self, index: int, name: str, layer: nn.Module, cut: Mapping[str, Piece]
    ) -> tuple[FlatParameter, ...]:
        """Lays a layer's own weights flat and keeps the device's share of them."""
        plan = self._plan
        named = {
            f"{name}.{inner}": cut[inner].of(parameter.detach())
            for inner, parameter in layer.named_parameters()
            if f"{name}.{inner}" not in self._chain.ties
        }
        counts = [tensor.numel() for tensor in named.values()]
        elements = padded(sum(counts), plan)
        firsts = list(accumulate(counts, initial=0))
        flat = torch.zeros(elements, dtype=master_dtype(plan.precision), device=self._device)
        for tensor, first in zip(named.values(), firsts, strict=False):
            flat[first : first + tensor.numel()] = tensor.reshape(-1)
        sums = FlatSum(elements, sum_dtype(plan), self._device)
        size = elements // plan.sharding.optimizer
        begin = self._shard * size
        held_size = elements // plan.sharding.weights
        within = begin % held_size
        held = flat.to(DTYPES[plan.precision])[begin - within :][:held_size].clone()
        part = held[within : within + size]
        master = part if part.dtype == flat.dtype else flat[begin : begin + size].clone()
        own: list[Weight] = []
        starts: list[int] = []
        for (full, tensor), first in zip(named.items(), firsts, strict=False):
            low, high = max(first, begin), min(first + tensor.numel(), begin + size)
            if low >= high:
                continue
            at = slice(low - begin, high - begin)
            shape = tensor.shape if high - low == tensor.numel() else (high - low,)
            working = part[at].view(shape)
            mine = working if master is part else master[at].view(shape)
            own.append(
                weight_of(
                    full, mine, working, plan.moments, decays=tensor.dim() >= 2, first=low - first
                )
            )
            starts.append(low - begin)
        self._layers[index] = _Layer(
            sums=sums, elements=elements, held=held, part=part, own=tuple(own),
            starts=tuple(starts),
            pieces={full: cut[full.removeprefix(f"{name}.")] for full in named},
        )  # fmt: skip
        owned = tuple(
            FlatParameter(
                name=full,
                working=_AWAY,
                shape=tensor.shape,
                first=first,
                sums=sums,
            )
            for (full, tensor), first in zip(named.items(), firsts, strict=False)
        )
        if not self._shares:
            _place(owned, held)
        return owned

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Takes a checkpoint's state over.

        Raises:
            CheckpointError: it is of another model.
        """
        if checkpoint is None:
            return
        for index in self._here:
            layer = self._layers[index]
            load_part(checkpoint, index, layer.own, self.layers[index], layer.pieces)
            self._make_whole(index)

    def _make_whole(self, index: int) -> None:
        """Tells the other replicas what this one has of the weights."""
        layer = self._layers[index]
        if layer.elements and parts(self._plan) > 1:
            self._pod.spread(layer.held, layer.part)

    # What the program asks for.

    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of what brings weights and gradients together."""
        return {
            "gather": self._gather,
            "release": self._release,
            "spread": lambda layer, _: self._make_whole(layer),
            "reduce": self._reduce,
        }

    def _gather(self, index: int, _: int) -> None:
        layer = self._layers[index]
        whole = torch.empty(layer.elements, dtype=layer.held.dtype, device=self._device)
        self._pod.gather(whole, layer.held)
        _place(self.layers[index].owned, whole)

    def _release(self, index: int, _: int) -> None:
        for weight in self.layers[index].owned:
            weight.working = _AWAY

    def _reduce(self, index: int, _: int) -> None:
        layer, weights = self._layers[index], self.layers[index].owned
        for weight in weights:
            weight.complete()
        has = {weight.name for weight in weights if weight.gradient is not None}
        if not weights:
            return
        flat = layer.sums.taken()
        self._sum_common(index, flat)
        shard = self._pod.reduce(flat)
        for weight in weights:
            weight.forget()
        self._give(layer, shard, has)

    def _sum_common(self, index: int, flat: Tensor) -> None:
        """Sums over the slices the gradients of what all of them have whole."""
        layer = self._layers[index]
        places = [
            flat[weight.first : weight.first + weight.shape.numel()]
            for weight in self.layers[index].owned
            if isinstance(weight, FlatParameter) and layer.common(weight.name)
        ]
        if self._pod.slice.degree == 1 or not places:
            return
        common = torch.cat(places)
        self._pod.sum_slices(common)
        for place, part in zip(places, common.split([len(p) for p in places]), strict=True):
            place.copy_(part)

    def _give(self, layer: _Layer, shard: Tensor, has: set[str]) -> None:
        """Hands each weight, or shard of one, its gradient."""
        for weight, start in zip(layer.own, layer.starts, strict=True):
            if weight.name in has:
                piece = shard[start : start + weight.shape.numel()]
                weight.gradient = piece.view(weight.shape)

    def summed(self, layer: int) -> Sequence[Parameter]:
        """The gradients that the norm reads: of what all slices have, those of the first."""
        if layer not in self._layers:
            return ()
        self._take_own(layer)
        return tuple(self._once(layer))

    def _once(self, layer: int) -> Iterator[Weight]:
        """What this slice answers for: what all slices have whole, the first does."""
        here = self._layers[layer]
        for weight in here.own:
            if not (here.common(weight.name) and self._pod.slice.index):
                yield weight

    def _take_own(self, index: int) -> None:
        """Where nothing was reduced, for want of other replicas, the sum is the gradient."""
        layer, weights = self._layers[index], self.layers[index].owned
        for weight in weights:
            weight.complete()
        has = {weight.name for weight in weights if weight.gradient is not None}
        if has:
            self._give(layer, layer.sums.taken(), has)
        for weight in weights:
            weight.forget()

    @property
    def counts(self) -> bool:
        """Whether this replica's shards count in the norm: each shard is on several."""
        return self._pod.place.replica < self._plan.sharding.optimizer

    def begin(self, step: int) -> None:
        """Forgets gradients of a step that did not end."""
        del step
        for layer in self._layers.values():
            layer.sums.forget()
            for weight in layer.own:
                weight.forget()

    def need(self, layer: int) -> None:
        """What the program gathered is there."""

    def ends_backward(self, divisor: Tensor | None) -> None:
        """Nothing waits elsewhere."""

    def update(self, layer: int, step: int, divisor: Tensor | None) -> None:
        """Updates the device's part of a layer."""
        self._before_update(layer)
        with torch.no_grad():
            self._optimizer.update(self._layers[layer].own, step, divisor)

    def settle(self, program: Program) -> None:
        """Nothing was put off."""

    def visit(self, layers: Sequence[int]) -> None:
        """Makes layers of this stage whole."""
        for layer in self._shared_with(layers):
            self._gather(layer, 0)

    def leave(self, layers: Sequence[int]) -> None:
        """Lets all but the shards of layers go."""
        for layer in self._shared_with(layers):
            self._release(layer, 0)

    def _shared_with(self, layers: Sequence[int]) -> Iterator[int]:
        """The layers whose shards have to come together for a pass through some layers."""
        if self._shares:
            needed = {at for layer in layers for at in (layer, *self._owners[layer])}
            yield from sorted(at for at in needed if at in self._layers and self.layers[at].owned)

    def save(self, layer: int, to: Path) -> Saved | None:
        """Writes this device's share of a layer, if another device does not write the same."""
        if layer not in self._layers or not self._writes(layer):
            return None
        own, buffers = self._layers[layer].own, self.layers[layer].saved_buffers
        whole = self._plan.sharding.optimizer * self._pod.slice.degree == 1
        if not whole:
            at = self._pod.slice.index
            to = to.with_name(layer_file(layer, part=(at, self._shard)))
            own = tuple(self._once(layer))
            buffers = {} if at or self._shard else buffers
        return save_tensors(saved_tensors(own, buffers, whole=whole), to)

    def _writes(self, layer: int) -> bool:
        """Of replicas that hold the same, the layers are divided among all."""
        replica, shards = self._pod.place.replica, self._plan.sharding.optimizer
        copies = self._plan.cut.replicas // shards
        return replica // shards == layer % copies

    def moved(self) -> Moved:
        """Nothing moves between tiers."""
        return Moved()

    def close(self) -> None:
        """Nothing is under way."""


def _place(weights: Sequence[FlatParameter | Parameter], whole: Tensor) -> None:
    """Lets layers compute with their places in a flat piece."""
    first = 0
    for weight in weights:
        count = weight.shape.numel()
        weight.working = whole[first : first + count].view(weight.shape).requires_grad_()
        first += count


def _of_another_stage(name: str) -> LayerParameters:
    return LayerParameters(name=name, owned=(), used=(), buffers=(), saved_buffers={})
