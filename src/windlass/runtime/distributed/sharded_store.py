"""Shared: the near weights and optimizer state of one device among several.

Between uses each device keeps its shard of every layer; `gather` makes a layer whole, `release`
lets all but the shard go, `reduce` leaves of its gradient what the device updates, `spread` puts
updated parts together. Where nothing is shared the shard is the whole, and an update sees whole
weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.models.layer_stack import Chain, materialise
from windlass.program.device_mesh import layers_of
from windlass.program.instruction import Kind, Program
from windlass.program.tied_weights import owners
from windlass.program.zero_sharding import parts
from windlass.runtime.adamw import Optimizer
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file, load_part
from windlass.runtime.distributed.flat_shard import Share, of_another_stage, writes
from windlass.runtime.distributed.process_groups import Pod
from windlass.runtime.interpreter import Handler
from windlass.runtime.param_store import Saved, save_tensors
from windlass.runtime.parameters import (
    DTYPES,
    LayerParameters,
    Parameter,
    Weight,
    saved_tensors,
    weight_of,
)
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """What stays of one layer between uses."""

    share: Share
    held: Tensor
    """The shard of the weights, in the run's precision."""
    part: Tensor
    """What of it the device updates."""
    own: tuple[Weight, ...]
    """The share's segments, with their state."""


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
        self._here = layers_of(plan, pod.place.stage)
        self._shares = plan.sharding.parameters > 1
        self._kept: dict[int, _Kept] = {}
        self.norms: dict[int, list[Tensor]] = {}
        self.layers: tuple[LayerParameters, ...] = tuple(self._laid_out())
        self._owners = owners(graph)
        for layer in chain.layers:
            layer.to_empty(device="meta")  # of a model that was built whole the share is kept

    # What is there at the start.

    def _laid_out(self) -> Iterator[LayerParameters]:
        known: dict[str, Parameter] = {}
        for index, name in enumerate(self._chain.names):
            if index not in self._here:
                yield of_another_stage(name)
                continue
            layer = materialise(self._chain, index, seed=self._seed, device=str(self._device))
            share = Share(self._plan, self._chain, index, layer, self._pod, self._device)
            self._kept[index] = self._keep(share, layer)
            yield share.with_ties(known, self._chain.ties)
            if not self._shares:
                share.place(self._kept[index].held)

    def _keep(self, share: Share, layer: nn.Module) -> _Kept:
        flat = share.flat(layer)
        held = flat[share.held_begin :][: share.held].to(DTYPES[self._plan.precision]).clone()
        part = held[share.begin - share.held_begin :][: share.part]
        same = part.dtype == flat.dtype
        master = part if same else flat[share.begin :][: share.part].clone()
        own: list[Weight] = []
        for segment in share.segments:
            working = part[segment.at].view(segment.shape)
            mine = working if same else master[segment.at].view(segment.shape)
            own.append(
                weight_of(
                    segment.name, mine, working, self._plan.moments,
                    decays=segment.decays, first=segment.first,
                )
            )  # fmt: skip
        return _Kept(share=share, held=held, part=part, own=tuple(own))

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Takes a checkpoint's state over.

        Raises:
            CheckpointError: it is of another model.
        """
        if checkpoint is None:
            return
        for index, kept in self._kept.items():
            load_part(checkpoint, index, kept.own, self.layers[index], kept.share.pieces)
            if self._parted(kept):
                self._pod.put_together(kept.held, kept.part)

    # What the program asks for.

    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of what brings weights and gradients together."""
        return {
            "unshard_weights": self._gather,
            "free_weights": self._release,
            "all_gather_params": self._spread,
            "reduce_grads": self._reduce,
        }

    def _gather(self, index: int, _: int) -> None:
        kept = self._kept[index]
        whole = torch.empty(kept.share.elements, dtype=kept.held.dtype, device=self._device)
        self._pod.gather(whole, kept.held)
        kept.share.place(whole)

    def _release(self, index: int, _: int) -> None:
        self._kept[index].share.release()

    def _spread(self, index: int, _: int) -> None:
        """Puts what this device has of a shard together with what the others have."""
        kept = self._kept[index]
        if self._parted(kept):
            self._pod.spread(kept.held, kept.part)

    def _parted(self, kept: _Kept) -> bool:
        """Whether others update parts of the shard that this device holds."""
        return kept.share.elements > 0 and parts(self._plan) > 1

    def _reduce(self, index: int, _: int) -> None:
        self._kept[index].share.reduce()

    def summed(self, layer: int) -> Sequence[Parameter]:
        """The gradients that the norm reads: of what all slices have, those of the first."""
        if layer not in self._kept:
            return ()
        kept = self._kept[layer]
        for weight, gradient in zip(kept.own, kept.share.summed(), strict=True):
            weight.gradient = weight.gradient if gradient is None else gradient
        return tuple(self._answered(kept))

    def _answered(self, kept: _Kept) -> Iterator[Weight]:
        """What this slice answers for."""
        for weight, segment in zip(kept.own, kept.share.segments, strict=True):
            if kept.share.answers_for(segment):
                yield weight

    @property
    def counts(self) -> bool:
        """Whether this replica's shards count in the norm: each shard is on several."""
        return self._pod.place.replica < self._plan.sharding.optimizer

    def begin(self, step: int) -> None:
        """Forgets gradients of a step that did not end."""
        del step
        for kept in self._kept.values():
            kept.share.forget()
            for weight in kept.own:
                weight.forget()

    def need(self, layer: int) -> None:
        """What the program gathered is there."""

    def ends_backward(self, divisor: Tensor | None) -> None:
        """Nothing waits elsewhere."""

    def update(self, layer: int, step: int, divisor: Tensor | None) -> None:
        """Updates the device's part of a layer."""
        self._before_update(layer)
        with torch.no_grad():
            self._optimizer.update(self._kept[layer].own, step, divisor)

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
            yield from sorted(at for at in needed if at in self._kept and self.layers[at].owned)

    def save(self, layer: int, to: Path) -> Saved | None:
        """Writes this device's share of a layer, if another device does not write the same."""
        if layer not in self._kept or not writes(layer, self._plan, self._pod):
            return None
        kept, buffers = self._kept[layer], self.layers[layer].saved_buffers
        if not kept.share.whole:
            to = to.with_name(layer_file(layer, part=kept.share.at))
            buffers = buffers if kept.share.first else {}
        tensors = saved_tensors(self._answered(kept), buffers, whole=kept.share.whole)
        return save_tensors(tensors, to)

    def close(self) -> None:
        """Nothing is under way."""
