"""The store that keeps weights and optimizer state offloaded, and streams layers in by phase.

One queue runs all transfers in the order in which the program starts them; whoever needs a layer
waits for it. A layer's update runs in that queue too, part by part, and leaves the updated weights
in device memory.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.errors import RunBroken
from windlass.program import Program
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.interpreter import Handlers
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.direct_io import page_aligned_buffer
from windlass.runtime.offload.frozen_weights import FrozenWeights, places_of_base
from windlass.runtime.offload.initial_state import offloaded_layers
from windlass.runtime.offload.layer_state import OffloadedLayerState
from windlass.runtime.offload.layer_weights import (
    LoadedLayer,
    grad_layers,
    owners_between_steps,
    owners_of_weights,
    present,
    set_weights_aside,
    shapes_of,
    take_gradients,
    unloaded_layer,
    with_buffers,
)
from windlass.runtime.offload.offloaded_gradients import OffloadedGradients, WaitingGradients
from windlass.runtime.offload.staging_buffers import LayerUpdate, StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue, TransferStats
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import flush_sparse_gradients
from windlass.runtime.parameters import NOT_LOADED, LayerParameters, ModelParameter
from windlass.runtime.rank_context import RankContext


class OffloadedStore:
    """The weights and optimizer state of one rank, in offload tiers between uses.

    Args:
        context: what this rank runs; its program says which gradients are offloaded.
        optimizer: optimizer, applied in the transfer queue.
        queue: the queue of all transfers.
        before_update: called with a layer's index before its state changes.
        staging: buffers that state passes through; None for new ones.
    """

    def __init__(
        self,
        context: RankContext,
        optimizer: Optimizer,
        queue: TransferQueue,
        *,
        before_update: Callable[[int], None],
        staging: StagingBuffers | None = None,
    ) -> None:
        self._context, self._plan, self._stack = context, context.plan, context.stack
        self._device = context.device
        self._optimizer, self._queue, self._before_update = optimizer, queue, before_update
        self._step = 0
        self._stores = BackingStores(self._folder, self._device)
        self._staging = staging or StagingBuffers(self._device, context.plan)
        self._loaded: dict[int, LoadedLayer] = {}
        self._gradients = OffloadedGradients()
        self._averaging: Averaging | None = None
        """What layers compute with in place of the trained weights, during an evaluation."""
        self._states: dict[int, OffloadedLayerState] = {}
        self._frozen: dict[int, FrozenWeights] = {}
        """Frozen weights of the layers that have any."""
        self._grad_layers = grad_layers(context.program)
        self.layers: tuple[LayerParameters, ...] = tuple(self._create_layers())
        self._weight_layers = owners_of_weights(self.layers)
        """For each layer, the layers of this stage that own the weights it computes with."""
        self._resident = owners_between_steps(self._plan, self._stage, self._weight_layers)
        """The layers whose weights are in device memory between steps."""

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
            StorageError: the disk is full, or cannot be written to.
        """
        self.create_states(checkpoint)
        self.load_first_layers()

    def create_states(self, checkpoint: Checkpoint | None) -> None:
        """The first half of `initialize`: all state in its tiers, none of it in device memory."""
        with storage_errors(self._folder):
            self._stores.allocate_host_memory()
            if checkpoint is None:
                self._create_states()
            else:
                self._load_states(checkpoint)

    def load_first_layers(self) -> None:
        """The second half: the layers that stay in device memory between steps are there."""
        for layer in self._stack.layers:
            layer.to_empty(device="meta")  # frees a model built in full: it is offloaded now
        self._load_resident()

    def _load_resident(self) -> None:
        """Brings in the layers that stay in device memory between steps."""
        for owner in sorted(self._resident):
            self.prefetch_weights(owner, 0)
        self.wait()

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Lets layers compute with averaged weights while it is open."""
        self.wait()
        trained = self._take_resident()
        self._averaging = averaging
        try:
            self._load_resident()
            yield
        finally:
            self.wait()
            self._averaging = None
            trained()

    def _take_resident(self) -> Callable[[], None]:
        """Sets the weights in device memory aside; returns what brings them back."""
        loaded, self._loaded = self._loaded, {}
        bring_weights_back = set_weights_aside(self.layers)

        def bring_back() -> None:
            self._loaded = loaded
            bring_weights_back()

        return bring_back

    @property
    def _stage(self) -> int:
        return 0

    @property
    def _folder(self) -> Path:
        return self._context.state_folder

    def _create_states(self) -> None:
        places = places_of_base(self._stack, self._plan)
        for layer in offloaded_layers(self.layers, self._states, self._frozen):
            layer.create(self._stack, places, self._context.seed, self._staging)

    def _load_states(self, checkpoint: Checkpoint) -> None:
        for layer in offloaded_layers(self.layers, self._states, self._frozen):
            layer.load(checkpoint, self._staging)

    # Instructions.

    def handlers(self) -> Handlers:
        """The handlers of transfers."""
        return {
            "prefetch_weights": self.prefetch_weights,
            "free_weights": self.free_weights,
            "offload_grads": self.offload_grads,
        }

    def prefetch_weights(self, layer: int, _: int) -> None:
        """Starts to bring a layer's weights into device memory."""
        memory, views = self._new_weights(layer)
        read_frozen, averaging = self._use_frozen(layer), self._averaging

        def read_weights(stats: TransferStats) -> None:
            if memory.numel() and averaging is not None:
                self._states[layer].read_averages(memory, averaging, self._staging, stats)
            elif memory.numel():
                self._states[layer].read_weights(memory, stats)
            read_frozen(stats)

        self._loaded[layer] = LoadedLayer(memory, self._submit(read_weights))
        self._use_weights(layer, views)

    def _use_frozen(self, layer: int) -> Callable[[TransferStats], None]:
        """Gives a layer new memory for its frozen weights; returns what reads them into it."""
        frozen = self._frozen.get(layer)
        if frozen is None:
            return lambda _: None
        memory = page_aligned_buffer(frozen.region.nbytes, self._device)
        self._use_frozen_views(layer, frozen.region.views(memory))
        return partial(frozen.read, memory)

    def _use_frozen_views(self, layer: int, views: Sequence[Tensor]) -> None:
        """Lets a layer compute with these frozen weights."""
        for weight, view in zip(self.layers[layer].frozen, views, strict=True):
            weight.working = view

    def free_weights(self, layer: int, _: int) -> None:
        """Frees the copy of a layer's weights in device memory."""
        self._loaded.pop(layer).transfer.wait()
        for weight in (*self.layers[layer].owned, *self.layers[layer].frozen):
            weight.working = NOT_LOADED

    def wait_for_layer(self, layer: int) -> None:
        """Returns when all weights that a layer computes with are in device memory.

        Raises:
            StorageError: they cannot be read.
        """
        for owner in self._weight_layers[layer]:
            loaded = self._loaded.get(owner)
            if loaded is None:
                raise RunBroken(f"layer {layer} needs layer {owner}, which was not prefetched")
            loaded.transfer.wait()

    def begin_step(self, step: int) -> None:
        """Prepares for a step: gradients offloaded from now on belong to it."""
        self._step = step

    def load_layers(self, layers: Sequence[int]) -> None:
        """Brings layers into device memory for a forward pass outside of a step."""
        for layer in layers:
            for owner in self._weight_layers[layer]:
                if owner not in self._loaded:
                    self.prefetch_weights(owner, 0)

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees layers, except those that stay in device memory between steps."""
        for layer in layers:
            for owner in self._weight_layers[layer]:
                if owner not in self._resident and owner in self._loaded:
                    self.free_weights(owner, 0)

    @property
    def offloaded_grad_norms(self) -> Mapping[int, list[Tensor]]:
        """Norms of the gradients offloaded in this step, by layer."""
        return self._gradients.norms

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """The weights that the layer owns."""
        return flush_sparse_gradients(self.layers[layer])

    @property
    def counts_in_norm(self) -> bool:
        """Whether these gradients count in the norm over all ranks."""
        return True

    def offload_grads(self, layer: int, _: int) -> None:
        """Computes the norms of a layer's accumulated gradients, and starts to offload them."""
        self._gradients.wait()
        norms = self._optimizer.gradient_norms(self.grads_for_norm(layer))
        self._gradients.norms[layer] = norms
        gradients, has_gradient = self._take_gradients(layer)
        state = self._states[layer]
        transfer = self._submit(
            lambda stats: state.write_grads(gradients, self._staging, stats), *present(gradients)
        )
        self._gradients.put(layer, WaitingGradients(self._step, has_gradient), transfer)

    def drop_gradients(self) -> None:
        """Drops all gradients of this step, those in device memory and offloaded ones."""
        for layer in self.layers:
            for weight in layer.owned:
                weight.clear_gradient()
        self._gradients.drop()

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Keeps the divisor for the offloaded gradients of this step."""
        self._gradients.finish_backward(clip_divisor)

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Starts to update a layer, by gradients in device memory or offloaded ones.

        A layer without gradients is only prefetched.
        """
        offloaded = self._gradients.take(layer)
        gradients: list[Tensor | None] | None
        if offloaded is not None:
            gradients, clip_divisor = None, self._gradients.clip_divisor
            step, has_gradient = offloaded
        else:
            self._gradients.wait()
            gradients, has_gradient = self._take_gradients(layer)
        # Offloaded gradients, even dropped ones, may have overwritten the working weights, which an
        # update writes again.
        if offloaded is None and not any(has_gradient):
            if layer not in self._loaded:
                self.prefetch_weights(layer, 0)
            return
        self._before_update(layer)
        loaded, read_frozen = self._loaded.get(layer), None
        if loaded is None:
            memory, views = self._new_weights(layer)
            self._use_weights(layer, views)
            read_frozen = self._use_frozen(layer)
        else:
            memory = loaded.memory
        request = LayerUpdate(
            passes=self._optimizer.part_passes(step=step, clip_divisor=clip_divisor),
            reads_gradient=self._optimizer.reads_gradient,
            weights=self._updated_weights(layer),
            gradients=gradients,
            has_gradient=has_gradient,
            working_memory=memory if self._plan.is_offloaded("parameters") else None,
        )
        state = self._states[layer]

        def update(stats: TransferStats) -> None:
            state.update(request, self._staging, self._queue, stats)
            if read_frozen is not None:
                read_frozen(stats)

        transfer = self._submit(update, *present(gradients or ()), *present((clip_divisor,)))
        self._loaded[layer] = LoadedLayer(memory, transfer)
        if gradients is not None:
            self._gradients.read_by(transfer)

    def flush_deferred_updates(self, program: Program) -> None:
        """Applies the updates that were deferred, so that the offloaded state is up to date."""
        for kind, layer, _ in program.flush_deferred_updates:
            if layer is None or layer not in self._states:
                continue
            if kind == "update":
                self.update(layer, 0, None)
            elif kind in ("free_weights", "free_shard"):
                self._free_local_weights(layer)
        self.wait()

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Saves a layer's state; what is in files is hard-linked."""
        parameters = self.layers[layer]
        if not (parameters.owned or parameters.frozen or parameters.persistent_buffers):
            return ()
        saved = SavedFile(to, self._states[layer].save(to))
        return (saved, self._frozen[layer].save(to)) if layer in self._frozen else (saved,)

    def wait(self) -> None:
        """Returns when all transfers have ended.

        Raises:
            StorageError: a transfer failed.
        """
        for loaded in self._loaded.values():
            loaded.transfer.wait()
        self._queue.wait()

    def close(self) -> None:
        """Frees the host memory and removes the state's files; the queue must have ended.

        What must persist is in checkpoints.
        """
        self._stores.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _submit(self, transfer: Callable[[TransferStats], None], *uses: Tensor) -> TransferHandle:
        return self._queue.submit(storage_errors(self._folder)(transfer), *uses)

    def _take_gradients(self, layer: int) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """A layer's gradients, handed over, and whether each weight has one."""
        gradients = take_gradients(self.layers[layer].owned)
        return gradients, tuple(gradient is not None for gradient in gradients)

    def _updated_weights(self, layer: int) -> list[Tensor]:
        """The weights in device memory that an update overwrites."""
        return [weight.working.detach() for weight in self.layers[layer].owned]

    def _free_local_weights(self, layer: int) -> None:
        """Frees what this rank itself has loaded of a layer."""
        self.free_weights(layer, 0)

    def _new_weights(self, layer: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A new buffer for a layer's weights, `UInt8[n]`, and the weights as views into it."""
        region = self._states[layer].working
        memory = page_aligned_buffer(region.nbytes, self._device)
        return memory, region.views(memory)

    def _use_weights(self, layer: int, views: Sequence[Tensor]) -> None:
        """Lets a layer compute with these weights."""
        for weight, view in zip(self.layers[layer].owned, views, strict=True):
            weight.working = view.detach().requires_grad_()

    def _create_layers(self) -> Iterator[LayerParameters]:
        """The layers without their weights; creates their states on the way."""
        by_name: dict[str, ModelParameter] = {}
        for index in range(len(self._stack.layers)):
            real = with_buffers(self._context, index)
            layer = unloaded_layer(self._stack, index, real, by_name)
            if layer.frozen:
                shapes = shapes_of(layer.frozen)
                self._frozen[index] = FrozenWeights(self._stores, index, self._plan, shapes)
            self._states[index] = OffloadedLayerState(
                self._stores, index, self._plan, shapes_of(layer.owned), layer.persistent_buffers,
                grad_layers=self._grad_layers,
            )  # fmt: skip
            yield layer
