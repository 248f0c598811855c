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

from torch import Tensor, nn

from windlass.atomic_files import storage_errors
from windlass.errors import RunBroken
from windlass.models import materialize_layer
from windlass.program import Program, layers_of_stage
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.safetensors_io import SavedFile, read_tensor, read_tensors
from windlass.runtime.interpreter import Handlers
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.direct_io import page_aligned_buffer
from windlass.runtime.offload.frozen_weights import FrozenWeights
from windlass.runtime.offload.layer_state import OffloadedLayerState
from windlass.runtime.offload.layer_update import LayerUpdate
from windlass.runtime.offload.loaded_layer import LoadedLayer, OffloadedGrads
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue, TransferStats
from windlass.runtime.offload.unloaded_layer import unloaded_layer
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import flush_sparse_gradients
from windlass.runtime.parameters import (
    NOT_LOADED,
    LayerParameters,
    ModelParameter,
)
from windlass.runtime.rank_context import RankContext


class OffloadedStore:
    """The weights and optimizer state of one rank, in offload tiers between uses.

    Args:
        context: what this rank runs; its program says which gradients are offloaded.
        optimizer: optimizer, applied in the transfer queue.
        queue: the queue of all transfers.
        before_update: called with a layer's index before its state changes.
    """

    def __init__(
        self,
        context: RankContext,
        optimizer: Optimizer,
        queue: TransferQueue,
        *,
        before_update: Callable[[int], None],
    ) -> None:
        self._context, self._plan, self._stack = context, context.plan, context.stack
        self._folder, self._device = context.state_folder, context.device
        self._optimizer, self._queue, self._before_update = optimizer, queue, before_update
        self._step = 0
        self._stores = BackingStores(self._folder, self._device)
        self._staging = StagingBuffers(self._device, context.plan)
        self._loaded: dict[int, LoadedLayer] = {}
        self._offloaded_grads: dict[int, OffloadedGrads] = {}
        self._gradient_transfer: TransferHandle | None = None
        """The last transfer that reads gradients in device memory."""
        self._clip_divisor: Tensor | None = None
        self._averaging: Averaging | None = None
        """What layers compute with in place of the trained weights, during an evaluation."""
        self.offloaded_grad_norms: dict[int, list[Tensor]] = {}
        """Norms of the gradients offloaded in this step, by layer."""
        self._states: dict[int, OffloadedLayerState] = {}
        self._frozen: dict[int, FrozenWeights] = {}
        """Frozen weights of the layers that have any."""
        instructions = context.program.instructions
        self._grad_layers = frozenset(i.layer for i in instructions if i.kind == "offload_grads")
        """The layers whose gradients are offloaded until their update."""
        self.layers: tuple[LayerParameters, ...] = tuple(self._create_layers())
        owner = {
            weight.name: index
            for index, layer in enumerate(self.layers)
            for weight in (*layer.owned, *layer.frozen)
        }
        self._weight_layers = tuple(
            sorted({owner[weight.name] for weight in layer.used if weight.name in owner})
            for layer in self.layers
        )
        """For each layer, the layers of this stage that own the weights it computes with."""
        self._resident = frozenset(
            owner for layer in self._layers_between_steps() for owner in self._weight_layers[layer]
        )
        """The layers whose weights are in device memory between steps."""

    # The state at the start.

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
            StorageError: the disk is full, or cannot be written to.
        """
        with storage_errors(self._folder):
            self._stores.allocate_host_memory()
        if checkpoint is None:
            self._create_states()
        else:
            self._load_states(checkpoint)
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
        layers = [weight for layer in self.layers for weight in (*layer.owned, *layer.frozen)]
        working = [weight.working for weight in layers]

        def bring_back() -> None:
            self._loaded = loaded
            for weight, values in zip(layers, working, strict=True):
                weight.working = values

        return bring_back

    def _layers_between_steps(self) -> Sequence[int]:
        """The layers of this stage in device memory between steps: all, or its first phase."""
        if not self._plan.is_offloaded("parameters"):
            return layers_of_stage(self._plan, self._stage)
        return range(*self._plan.stages[self._stage].phases[0])

    @property
    def _stage(self) -> int:
        return 0

    def _create_states(self) -> None:
        with storage_errors(self._folder):
            for index, state in self._states.items():
                layer = materialize_layer(
                    self._stack, index, seed=self._context.seed, device="cpu", tied=False
                )
                name = self._stack.names[index]
                named = {f"{name}.{n}": p.detach() for n, p in layer.named_parameters()}
                masters = [named[weight.name].float() for weight in self.layers[index].owned]
                state.create(masters, self._staging)
                if index in self._frozen:
                    self._frozen[index].create(named.__getitem__)

    def _load_states(self, checkpoint: Checkpoint) -> None:
        with storage_errors(self._folder):
            for index, state in self._states.items():
                layer = self.layers[index]
                if layer.owned or layer.frozen or layer.persistent_buffers:
                    file = checkpoint.path / layer_file(index)
                    manifest = checkpoint.manifest
                    buffers = layer.persistent_buffers.items()
                    read_tensors(file, {f"buffer/{name}": buffer for name, buffer in buffers})
                    state.adopt_checkpoint(file, manifest.step, self._staging, seed=manifest.seed)
                if index in self._frozen:
                    file = checkpoint.path / layer_file(index)
                    self._frozen[index].create(partial(_saved_weight, file))

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
        for weight, view in zip(
            self.layers[layer].frozen, frozen.region.views(memory), strict=True
        ):
            weight.working = view
        return partial(frozen.read, memory)

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

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """The weights that the layer owns."""
        return flush_sparse_gradients(self.layers[layer])

    @property
    def counts_in_norm(self) -> bool:
        """Whether these gradients count in the norm over all ranks."""
        return True

    def offload_grads(self, layer: int, _: int) -> None:
        """Computes the norms of a layer's accumulated gradients, and starts to offload them."""
        if self._gradient_transfer is not None:
            self._gradient_transfer.wait()
        norms = self._optimizer.gradient_norms(self.grads_for_norm(layer))
        self.offloaded_grad_norms[layer] = norms
        gradients, has_gradient = self._take_gradients(layer)
        self._offloaded_grads[layer] = OffloadedGrads(self._step, has_gradient)
        state = self._states[layer]
        self._gradient_transfer = self._submit(
            lambda stats: state.write_grads(gradients, self._staging, stats), *_present(gradients)
        )

    def drop_gradients(self) -> None:
        """Drops all gradients of this step, those in device memory and offloaded ones."""
        for layer in self.layers:
            for weight in layer.owned:
                weight.clear_gradient()
        for index, (step, present) in self._offloaded_grads.items():
            self._offloaded_grads[index] = OffloadedGrads(step, (False,) * len(present))

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Keeps the divisor for the offloaded gradients of this step."""
        if self._gradient_transfer is not None:
            self._gradient_transfer.wait()
            self._gradient_transfer = None
        self._clip_divisor = clip_divisor
        self.offloaded_grad_norms.clear()

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Starts to update a layer, by gradients in device memory or offloaded ones.

        A layer without gradients is only prefetched.
        """
        offloaded = self._offloaded_grads.pop(layer, None)
        gradients: list[Tensor | None] | None
        if offloaded is not None:
            gradients, clip_divisor = None, self._clip_divisor
            step, has_gradient = offloaded
        else:
            if self._gradient_transfer is not None:
                self._gradient_transfer.wait()  # only one layer's gradients are in transfer
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

        transfer = self._submit(update, *_present(gradients or ()), *_present((clip_divisor,)))
        self._loaded[layer] = LoadedLayer(memory, transfer)
        if gradients is not None:
            self._gradient_transfer = transfer

    def flush_deferred_updates(self, program: Program) -> None:
        """Applies the updates that were deferred, so that the offloaded state is up to date."""
        for kind, layer, _ in program.flush_deferred_updates:
            if kind == "update" and layer is not None:
                self.update(layer, 0, None)
            elif kind in ("free_weights", "free_shard") and layer is not None:
                self._free_local_weights(layer)
        self.wait()

    def save_layer(self, layer: int, to: Path) -> SavedFile | None:
        """Saves a layer's state; a state in a file is hard-linked."""
        if layer in self._frozen:
            return self._save_with_frozen(layer, to)
        if not (self.layers[layer].owned or self.layers[layer].persistent_buffers):
            return None
        return SavedFile(to, self._states[layer].save(to))

    def _save_with_frozen(self, layer: int, to: Path) -> SavedFile:
        """Copies a layer's state and its frozen weights into one file."""
        trained = to.with_name(f".{to.name}.trained")
        self._states[layer].save(trained)()
        checksum = self._frozen[layer].save_with(trained, to)
        trained.unlink()
        return SavedFile(to, lambda: checksum)

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
        def run(stats: TransferStats) -> None:
            with storage_errors(self._folder):
                transfer(stats)

        return self._queue.submit(run, *uses)

    def _take_gradients(self, layer: int) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """A layer's gradients, handed over, and whether each weight has one."""
        gradients = [weight.gradient for weight in self.layers[layer].owned]
        for weight in self.layers[layer].owned:
            weight.clear_gradient()
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
            real = self._with_buffers(index)
            layer = unloaded_layer(self._stack, index, real, by_name)
            if layer.frozen:
                shapes = _shapes(layer.frozen)
                self._frozen[index] = FrozenWeights(self._stores, index, self._plan, shapes)
            owned = _shapes(layer.owned)
            self._states[index] = self._new_state(index, owned, layer.persistent_buffers)
            yield layer

    def _with_buffers(self, index: int) -> nn.Module:
        """A layer with real buffers, which are small and stay in device memory."""
        layer = self._stack.layers[index]
        if not any(True for _ in layer.buffers()):
            return layer
        seed, device = self._context.seed, str(self._device.torch_device)
        return materialize_layer(self._stack, index, seed=seed, device=device)

    def _new_state(
        self,
        index: int,
        weights: Mapping[str, tuple[int, ...]],
        buffers: Mapping[str, Tensor],
        *,
        decays: Sequence[bool] | None = None,
    ) -> OffloadedLayerState:
        return OffloadedLayerState(
            self._stores, index, self._plan, weights, tuple(buffers.items()),
            offloads_grads=index in self._grad_layers, decays=decays,
        )  # fmt: skip


def _shapes(weights: Sequence[ModelParameter]) -> dict[str, tuple[int, ...]]:
    return {weight.name: tuple(weight.shape) for weight in weights}


def _saved_weight(file: Path, name: str) -> Tensor:
    """A weight of a checkpoint's file by its full name."""
    return read_tensor(file, f"weight/{name}")


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
