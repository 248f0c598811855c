"""Residence: where a run's weights and optimizer state live, and how they are updated and saved.

`Near` holds all of them near all the time; `stream.Stream` brings them near for their phase.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from windlass.models.layer_stack import Chain
from windlass.program.instruction import Kind, Program
from windlass.runtime.adamw import Optimizer
from windlass.runtime.checkpoint.checkpoint import Checkpoint, load
from windlass.runtime.checkpoint.safetensors_io import write_tensors
from windlass.runtime.interpreter import Handler
from windlass.runtime.offload.backing_store import Proof
from windlass.runtime.parameters import LayerParameters, LayerTensors, Parameter, layer_tensors
from windlass.schema.graph import Precision
from windlass.schema.plan import Moments


class Saved(NamedTuple):
    """A file of a checkpoint that a layer, or a device's share of it, was written into."""

    path: Path
    proof: Proof


class Residence(Protocol):
    """What the handlers, the training loop and the saver ask of it."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """What layers compute with."""

    @property
    def norms(self) -> Mapping[int, list[Tensor]]:
        """Norms of the gradients of this step that are not near any more, by layer."""

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Makes the state of a new run, or takes that of a checkpoint over."""

    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of moves between tiers."""

    def begin(self, step: int) -> None:
        """A step begins."""

    def summed(self, layer: int) -> Sequence[Parameter]:
        """What has the layer's whole gradient, as the norm reads it: everything once."""

    @property
    def counts(self) -> bool:
        """Whether these gradients count in the norm over all devices."""

    def need(self, layer: int) -> None:
        """Returns when all weights that a layer computes with are near."""

    def ends_backward(self, divisor: Tensor | None) -> None:
        """All gradients are there; they are to be divided by this."""

    def update(self, layer: int, step: int, divisor: Tensor | None) -> None:
        """Updates a layer, or begins to."""

    def settle(self, program: Program) -> None:
        """Does updates that were put off."""

    def visit(self, layers: Sequence[int]) -> None:
        """Brings layers near for a forward pass outside of a step."""

    def leave(self, layers: Sequence[int]) -> None:
        """Frees what `visit` brought near."""

    def save(self, layer: int, to: Path) -> Saved | None:
        """Saves a layer's state; when it returns the layer may change.

        Args:
            layer: its index.
            to: the file for the whole layer; a device's share goes into one beside it.

        Returns:
            None if there is nothing that this device would write.
        """

    def close(self) -> None:
        """Ends what is under way."""


class Near:
    """All weights and all optimizer state in the near tier.

    Args:
        chain: the model.
        optimizer: applied at once.
        seed: of the initial weights.
        precision: what layers compute in.
        device: where everything lies.
        before_update: called with a layer's index before its state changes.
        moments: how the optimizer's are kept.
    """

    def __init__(
        self,
        chain: Chain,
        optimizer: Optimizer,
        *,
        seed: int,
        precision: Precision,
        device: torch.device,
        before_update: Callable[[int], None],
        moments: Moments = "float32",
    ) -> None:
        self._optimizer = optimizer
        self._before_update = before_update
        self.layers: tuple[LayerTensors, ...] = layer_tensors(
            chain, seed=seed, precision=precision, device=device, moments=moments
        )
        self.norms: dict[int, list[Tensor]] = {}

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Takes a checkpoint's state over."""
        if checkpoint is not None:
            load(checkpoint, self.layers)

    def handlers(self) -> Mapping[Kind, Handler]:
        """None: nothing moves."""
        return {}

    def begin(self, step: int) -> None:
        """Nothing is to be done."""

    def summed(self, layer: int) -> Sequence[Parameter]:
        """The weights themselves."""
        return completed(self.layers[layer])

    counts = True

    def need(self, layer: int) -> None:
        """Everything is near."""

    def ends_backward(self, divisor: Tensor | None) -> None:
        """Nothing waits elsewhere."""

    def update(self, layer: int, step: int, divisor: Tensor | None) -> None:
        """Updates a layer."""
        self._before_update(layer)
        with torch.no_grad():
            self._optimizer.update(self.layers[layer].owned, step, divisor)

    def settle(self, program: Program) -> None:
        """Nothing was put off."""

    def visit(self, layers: Sequence[int]) -> None:
        """Everything is near."""

    def leave(self, layers: Sequence[int]) -> None:
        """Everything stays."""

    def save(self, layer: int, to: Path) -> Saved | None:
        """Writes the tensors themselves, and copies none."""
        return save_layer(self.layers[layer], to)

    def close(self) -> None:
        """Nothing is under way."""


def completed(layer: LayerParameters) -> Sequence[Parameter]:
    """A layer's own weights, all that is to be added to their gradients added."""
    for weight in layer.owned:
        weight.complete()
    return layer.owned


def save_layer(layer: LayerTensors, to: Path) -> Saved | None:
    """Writes what a checkpoint holds of a layer; None if that is nothing."""
    return save_tensors(layer.saved(), to)


def save_tensors(named: Iterable[tuple[str, Tensor]], to: Path) -> Saved | None:
    """Writes tensors of a checkpoint; None if there are none."""
    tensors = dict(named)
    if not tensors:
        return None
    proof = write_tensors(to, tensors.items())
    return Saved(to, lambda: proof)
