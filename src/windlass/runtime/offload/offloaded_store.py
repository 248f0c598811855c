"""Streaming: layers come into the near tier for their phase and go home again.

One lane moves everything in the order that the program begins it; whoever needs a layer waits for
it. A layer's update runs in that lane too, piece by piece, and leaves the layer near.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.atomic_files import storage_errors
from windlass.errors import RunBroken
from windlass.models.layer_stack import LayerStack, materialize_layer
from windlass.program.device_mesh import layers_of_stage
from windlass.program.instruction import InstructionKind, Program
from windlass.program.phases import gradients_reuse_weight_space
from windlass.runtime.adamw import AdamW
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.handler import Handler
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.direct_io import page_aligned_buffer
from windlass.runtime.offload.layer_state import OffloadedLayerState, StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferQueue, TransferStats, TransferHandle
from windlass.runtime.param_store import flush_sparse_gradients
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.parameters import (
    NOT_LOADED,
    DTYPES,
    LayerParameters,
    ModelParameter,
    persistent_buffers,
    grad_accum_dtype,
)
from windlass.schema.plan import Plan


class _Near(NamedTuple):
    """A layer that is in the near tier, or on its way there."""

    memory: Tensor
    there: TransferHandle


class _Stored(NamedTuple):
    """Gradients that wait at home for their update."""

    step: int
    has: tuple[bool, ...]
    """Which of the layer's weights have one."""


class OffloadedStore:
    """The moves of one device.

    Args:
        plan: whose weights and optimizer state have their home beyond the near tier.
        chain: the model.
        folder: of what lives in files; made if need be.
        optimizer: applied in the lane.
        lane: of all moves.
        device: that computes, and whose near tier layers come to.
        program: that will run; says whose gradients wait at home.
        seed: of the initial weights.
        before_update: called with a layer's index before its state changes.
    """

    def __init__(
        self,
        plan: Plan,
        chain: LayerStack,
        folder: Path,
        optimizer: AdamW,
        lane: TransferQueue,
        device: torch.device,
        *,
        program: Program,
        seed: int,
        before_update: Callable[[int], None],
    ) -> None:
        self._plan, self._chain, self._folder = plan, chain, folder
        self._optimizer, self._seed = optimizer, seed
        self._before_update = before_update
        self._step = 0
        self._lane, self._device = lane, device
        self._shelves = BackingStores(folder, device)
        self._staging = StagingBuffers(device)
        self._near: dict[int, _Near] = {}
        self._stored: dict[int, _Stored] = {}
        self._leaving: TransferHandle | None = None
        self._divisor: Tensor | None = None
        self.offloaded_grad_norms: dict[int, list[Tensor]] = {}
        """Of the gradients that went home in this step, by layer."""
        self.layers: tuple[LayerParameters, ...]
        self._homes: dict[int, OffloadedLayerState] = {}
        waiting = {each.layer for each in program.instructions if each.kind == "offload_grads"}
        self.layers = tuple(self._laid_out(frozenset(waiting)))
        owner = {w.name: index for index, layer in enumerate(self.layers) for w in layer.owned}
        self._needs = tuple(
            sorted({owner[weight.name] for weight in layer.used if weight.name in owner})
            for layer in self.layers
        )
        """Of each layer the layers of this stage whose weights it computes with."""
        between = self._between_steps()
        self._resident = frozenset(owner for layer in between for owner in self._needs[layer])
        """The layers whose weights are near between steps."""

    # What is there at the start.

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Makes the state of a new run, or takes that of a checkpoint over.

        Raises:
            CheckpointError: it is of another model.
            StorageError: the disk is full, or does not take files.
        """
        with storage_errors(self._folder):
            self._shelves.take()
        if checkpoint is None:
            self._create()
        else:
            self._adopt(checkpoint)
        for layer in self._chain.layers:
            layer.to_empty(device="meta")  # a model that was built whole is at home now
        for owner in sorted(self._resident):
            self.fetch(owner, 0)
        self.wait()

    def _between_steps(self) -> Sequence[int]:
        """The layers of this stage that are near between steps: where weights go, a phase."""
        if not self._plan.is_offloaded("parameters"):
            return layers_of_stage(self._plan, self._stage)
        return range(*self._plan.stages[self._stage].phases[0])

    @property
    def _stage(self) -> int:
        return 0

    def _create(self) -> None:
        with storage_errors(self._folder):
            for index, home in self._homes.items():
                layer = materialize_layer(self._chain, index, seed=self._seed, device="cpu")
                named = dict(layer.named_parameters())
                prefix = f"{self._chain.names[index]}."
                owned = self.layers[index].owned
                masters = [named[w.name.removeprefix(prefix)].detach().float() for w in owned]
                home.create(masters, self._staging)

    def _adopt(self, checkpoint: Checkpoint) -> None:
        with storage_errors(self._folder):
            for index, home in self._homes.items():
                layer = self.layers[index]
                if layer.owned or layer.persistent_buffers:
                    file = checkpoint.path / layer_file(index)
                    manifest = checkpoint.manifest
                    home.adopt(file, manifest.step, self._staging, seed=manifest.seed)

    # What the program asks for.

    def handlers(self) -> Mapping[InstructionKind, Handler]:
        """The handlers of moves."""
        return {
            "prefetch_weights": self.fetch,
            "free_weights": self.release,
            "offload_grads": self.store,
        }

    def fetch(self, layer: int, _: int) -> None:
        """Begins to bring a layer's weights near."""
        memory, views = self._room(layer)
        home = self._homes[layer]
        self._near[layer] = _Near(memory, self._begin(partial(home.fetch, memory)))
        self._place(layer, views)

    def release(self, layer: int, _: int) -> None:
        """Frees the near copy of a layer's weights."""
        near = self._near.pop(layer)
        near.there.wait()
        for weight in self.layers[layer].owned:
            weight.working = NOT_LOADED

    def wait_for_layer(self, layer: int) -> None:
        """Returns when all weights that a layer computes with are near.

        Raises:
            StorageError: they cannot be read.
        """
        for owner in self._needs[layer]:
            near = self._near.get(owner)
            if near is None:
                raise RunBroken(f"layer {layer} needs layer {owner}, which was not fetched")
            near.there.wait()

    def begin_step(self, step: int) -> None:
        """A step begins: gradients that go home are of it."""
        self._step = step

    def load_layers(self, layers: Sequence[int]) -> None:
        """Brings layers near that are not, for a forward pass outside of a step."""
        for layer in layers:
            for owner in self._needs[layer]:
                if owner not in self._near:
                    self.fetch(owner, 0)

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees layers, except those that are near between steps."""
        for layer in layers:
            for owner in self._needs[layer]:
                if owner not in self._resident and owner in self._near:
                    self.release(owner, 0)

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """The weights themselves."""
        return flush_sparse_gradients(self.layers[layer])

    @property
    def counts_in_norm(self) -> bool:
        """Whether they count in the norm."""
        return True

    def store(self, layer: int, _: int) -> None:
        """Begins to bring a layer's summed gradients home, and takes their norms before."""
        if self._leaving is not None:
            self._leaving.wait()
        self.offloaded_grad_norms[layer] = self._optimizer.gradient_norms(self.grads_for_norm(layer))
        gradients, has = self._taken(layer)
        self._stored[layer] = _Stored(self._step, has)
        home = self._homes[layer]
        self._leaving = self._begin(
            lambda moved: home.store(gradients, self._staging, moved), *_some(gradients)
        )

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Takes note of what the gradients that went home are to be divided by."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        self._divisor = clip_divisor
        self.offloaded_grad_norms.clear()

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Begins a layer's update, by near gradients or by those at home; else only fetches it."""
        stored = self._stored.pop(layer, None)
        gradients: list[Tensor | None] | None
        if stored is not None:
            step, has, clip_divisor, gradients = stored.step, stored.has, self._divisor, None
        else:
            if self._leaving is not None:
                self._leaving.wait()  # one layer's gradients at a time are on their way
            gradients, has = self._taken(layer)
        if not any(has):
            if layer not in self._near:
                self.fetch(layer, 0)
            return
        self._before_update(layer)
        near = self._near.get(layer)
        memory, views = self._room(layer) if near is None else (near.memory, None)
        if views is not None:
            self._place(layer, views)
        weights = self._held(layer)
        apply = partial(self._optimizer.update_part, step=step, clip_divisor=clip_divisor)
        home, goes = self._homes[layer], self._plan.is_offloaded("parameters")
        there = self._begin(
            lambda moved: home.update(
                apply, weights, gradients, has, memory=memory if goes else None,
                staging=self._staging, lane=self._lane, moved=moved,
            ),
            *_some(gradients or ()), *_some((clip_divisor,)),
        )  # fmt: skip
        self._near[layer] = _Near(memory, there)
        if gradients is not None:
            self._leaving = there

    def flush_deferred_updates(self, program: Program) -> None:
        """Does the updates that were put off, so that the state at home is that of this step."""
        for kind, layer, _ in program.flush_deferred_updates:
            if kind == "update" and layer is not None:
                self.update(layer, 0, None)
            elif kind in ("free_weights", "free_shard") and layer is not None:
                self._drop(layer)
        self.wait()

    def save_layer(self, layer: int, to: Path) -> SavedFile | None:
        """Saves a layer's state; where it is a file, that gets a second name."""
        if not (self.layers[layer].owned or self.layers[layer].persistent_buffers):
            return None
        proof = self._homes[layer].save(to)
        return None if proof is None else SavedFile(to, proof)

    def wait(self) -> None:
        """Returns when nothing is under way.

        Raises:
            StorageError: something failed.
        """
        for near in self._near.values():
            near.there.wait()
        self._lane.wait()

    def close(self) -> None:
        """Gives the host's memory back and removes the state's files, once the lane has ended.

        What counts of them is in checkpoints.
        """
        self._shelves.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # How.

    def _begin(self, move: Callable[[TransferStats], None], *uses: Tensor) -> TransferHandle:
        def told(moved: TransferStats) -> None:
            with storage_errors(self._folder):
                move(moved)

        return self._lane.begin(told, *uses)

    def _taken(self, layer: int) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """A layer's gradients, handed over."""
        gradients = [weight.gradient for weight in self.layers[layer].owned]
        for weight in self.layers[layer].owned:
            weight.clear_gradient()
        return gradients, tuple(gradient is not None for gradient in gradients)

    def _held(self, layer: int) -> list[Tensor]:
        """The near copies of what an update makes anew."""
        return [weight.working.detach() for weight in self.layers[layer].owned]

    def _drop(self, layer: int) -> None:
        """Frees a layer that is not in use."""
        self.release(layer, 0)

    def _room(self, layer: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        memory = page_aligned_buffer(self._homes[layer].working.nbytes, self._device)
        return memory, self._homes[layer].working.views(memory)

    def _place(self, layer: int, views: Sequence[Tensor]) -> None:
        for weight, view in zip(self.layers[layer].owned, views, strict=True):
            weight.working = view.detach().requires_grad_()

    def _laid_out(self, waiting: frozenset[int | None]) -> Iterator[LayerParameters]:
        """The layers without their weights; where those are at home is noted meanwhile.

        Args:
            waiting: layers whose gradients wait at home.
        """
        chain = self._chain
        known: dict[str, ModelParameter] = {}
        for index, (name, layer) in enumerate(zip(chain.names, chain.layers, strict=True)):
            shapes = {f"{name}.{n}": tuple(p.shape) for n, p in layer.named_parameters()}
            owned = {full: shape for full, shape in shapes.items() if full not in chain.tied_weights}
            known |= {
                full: ModelParameter(name=full, working=NOT_LOADED, shape=torch.Size(shape))
                for full, shape in owned.items()
            }
            real = self._with_buffers(index)
            buffers = persistent_buffers(name, real)
            self._homes[index] = self._home(index, owned, buffers, waits=index in waiting)
            yield LayerParameters(
                name=name,
                owned=tuple(known[full] for full in owned),
                used=tuple(known[chain.tied_weights.get(full, full)] for full in shapes),
                buffers=tuple(real.buffers()),
                persistent_buffers=buffers,
            )

    def _with_buffers(self, index: int) -> nn.Module:
        """A layer whose buffers are real: small as they are, they come with it and stay near."""
        layer = self._chain.layers[index]
        if not any(True for _ in layer.buffers()):
            return layer
        return materialize_layer(self._chain, index, seed=self._seed, device=str(self._device))

    def _home(
        self,
        index: int,
        owned: Mapping[str, tuple[int, ...]],
        buffers: Mapping[str, Tensor],
        *,
        waits: bool,
        decays: Sequence[bool] | None = None,
    ) -> OffloadedLayerState:
        plan = self._plan
        return OffloadedLayerState(
            self._shelves, index, plan.offload, owned, tuple(buffers.items()),
            working=DTYPES[plan.precision], gradients=grad_accum_dtype(plan) if waits else None,
            moments=plan.moments, shares=gradients_reuse_weight_space(plan), decays=decays,
        )  # fmt: skip


def _some(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
