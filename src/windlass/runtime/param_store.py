"""ParamStore: where a rank's weights and optimizer state live, and how they are updated and saved.

`InMemoryStore` keeps all of them in device memory; `offload.offloaded_store.OffloadedStore` brings
the layers of a phase into device memory for that phase.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from windlass.program import Program
from windlass.runtime.block_scores import block_norms
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.host_staging import HostStaging, host_staging
from windlass.runtime.checkpoint.load_state import load_checkpoint
from windlass.runtime.checkpoint.safetensors_io import SavedFile, write_tensors
from windlass.runtime.interpreter import Handlers
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.optimizer_state.state_format import state_format
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import (
    LayerParameters,
    MasterParameter,
    ModelParameter,
    ResidentLayer,
    resident_layers,
)
from windlass.runtime.rank_context import RankContext


class ParamStore(Protocol):
    """A rank's weights and optimizer state, as handlers, training loop and saver see them."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """The parameters that each layer computes with."""

    @property
    def offloaded_grad_norms(self) -> Mapping[int, list[Tensor]]:
        """Norms of this step's gradients that have been offloaded, by layer."""

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint."""

    def handlers(self) -> Handlers:
        """The handlers of transfers and of collectives on weights and gradients."""

    def begin_step(self, step: int) -> None:
        """Prepares for a step, counted from 1."""

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """Parameters whose gradients this rank contributes to the norm, each element once."""

    @property
    def counts_in_norm(self) -> bool:
        """Whether these gradients count in the norm over all ranks."""

    def wait_for_layer(self, layer: int) -> None:
        """Blocks until all weights that a layer computes with are in device memory."""

    def drop_gradients(self) -> None:
        """Drops all gradients of this step, so that its updates change no weight."""

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Ends the backward pass: all gradients are there, to be divided by `clip_divisor`."""

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Updates a layer, or starts to."""

    def flush_deferred_updates(self, program: Program) -> None:
        """Applies the updates that were deferred to the next step."""

    def load_layers(self, layers: Sequence[int]) -> None:
        """Brings layers into device memory for a forward pass outside of a step."""

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees what `load_layers` brought in."""

    def averaged(self, averaging: Averaging) -> AbstractContextManager[None]:
        """Lets layers compute with averaged weights while it is open.

        Then they compute with the trained weights again, which stay as they are to the last bit.
        All ranks open it together, between steps and with no update deferred.
        """

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Saves a layer's state; the layer may change once this returns.

        Args:
            layer: index of the layer.
            to: the file for a full layer; a shard is written to a file beside it.

        Returns:
            Its files; none if this rank has nothing to write.
        """

    def close(self) -> None:
        """Ends all transfers and frees what they used."""


class InMemoryStore:
    """A store with all weights and all optimizer state in device memory, on a single device.

    Args:
        context: the rank's plan, model and device.
        optimizer: optimizer, applied at once.
        before_update: called with a layer's index before its state changes.
    """

    def __init__(
        self, context: RankContext, optimizer: Optimizer, *, before_update: Callable[[int], None]
    ) -> None:
        self._optimizer = optimizer
        self._before_update = before_update
        self._staging = host_staging(context.device)
        self.layers: tuple[ResidentLayer, ...] = resident_layers(
            context.stack,
            seed=context.seed,
            precision=context.plan.precision,
            device=context.device.torch_device,
            state=state_format(context.plan),
        )
        self.offloaded_grad_norms: dict[int, list[Tensor]] = {}

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Loads the state of a checkpoint."""
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.layers)

    def handlers(self) -> Handlers:
        """No handlers, as nothing is transferred."""
        return {}

    def begin_step(self, step: int) -> None:
        """Does nothing."""

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """The parameters that the layer owns."""
        return flush_sparse_gradients(self.layers[layer])

    counts_in_norm = True

    def wait_for_layer(self, layer: int) -> None:
        """Returns at once, as all weights are in device memory."""

    def drop_gradients(self) -> None:
        """Drops all gradients of this step."""
        for layer in self.layers:
            for weight in layer.owned:
                weight.clear_gradient()

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Does nothing, as no gradient is offloaded."""

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Updates a layer."""
        self._before_update(layer)
        with torch.no_grad():
            self._optimizer.update(self.layers[layer].owned, step, clip_divisor)

    def flush_deferred_updates(self, program: Program) -> None:
        """Does nothing, as no update is deferred."""

    def load_layers(self, layers: Sequence[int]) -> None:
        """Does nothing, as all layers are in device memory."""

    def free_layers(self, layers: Sequence[int]) -> None:
        """Does nothing, as all layers stay in device memory."""

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Lets layers compute with averaged weights while it is open."""
        trained = [(weight, weight.working) for layer in self.layers for weight in layer.owned]
        try:
            for weight, _ in trained:
                weight.working = weight.averaged(averaging)
            yield
        finally:
            for weight, working in trained:
                weight.working = working

    def block_norms(self, layer: int, name: str) -> Tensor:
        """`Float32[n]`: norm of each kept block of a sparse weight.

        Args:
            layer: index of the layer.
            name: full name of the values, `[n B B]`.
        """
        return block_norms(self._owned(layer, name).working)

    def reset_blocks(self, layer: int, name: str, slots: Tensor) -> None:
        """Zeroes kept blocks of a sparse weight and their optimizer state, between two steps.

        Args:
            layer: index of the layer.
            name: full name of the values, `[n B B]`.
            slots: positions of the blocks in the values, `Int64[m]`.
        """
        weight = self._owned(layer, name)
        size = weight.master[0].numel()
        for slot in slots.tolist():
            weight.reset_elements(slot * size, (slot + 1) * size)

    def _owned(self, layer: int, name: str) -> MasterParameter:
        return next(weight for weight in self.layers[layer].owned if weight.name == name)

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Writes the layer's tensors without copying more than two blocks of them."""
        return write_layer(self.layers[layer], to, self._staging)

    def close(self) -> None:
        """Frees what saves passed through."""
        if self._staging is not None:
            self._staging.close()


def flush_sparse_gradients(layer: LayerParameters) -> Sequence[ModelParameter]:
    """The parameters that a layer owns, with sparse gradients added to the dense ones."""
    for weight in layer.owned:
        weight.flush_sparse_gradient()
    return layer.owned


def write_layer(
    layer: ResidentLayer, to: Path, staging: HostStaging | None = None
) -> tuple[SavedFile, ...]:
    """Writes a layer's checkpoint file; none if the layer has nothing to save."""
    return write_checkpoint_file(layer.checkpoint_tensors(), to, staging)


def write_checkpoint_file(
    named: Iterable[tuple[str, Tensor]], to: Path, staging: HostStaging | None
) -> tuple[SavedFile, ...]:
    """Writes a checkpoint file from (key, tensor) pairs; none if there are none.

    Args:
        named: the pairs.
        to: the file.
        staging: what an accelerator's tensors pass through; None if they are in host memory.
    """
    tensors = dict(named)
    if not tensors:
        return ()
    checksum = write_tensors(to, tensors.items(), staging)
    return (SavedFile(to, lambda: checksum),)
