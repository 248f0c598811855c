"""Forward passes of one rank outside of a step: all batches through one phase after the other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from windlass.program import chunks_of_stage
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.optimizer_state.optimizer_state import Averaging
from windlass.runtime.parameters import LayerParameters
from windlass.runtime.rank_context import RankContext


class PassStore(Protocol):
    """Where the weights of a rank live, as far as forward passes outside of a step ask."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """The parameters that each layer computes with."""

    def load_layers(self, layers: Sequence[int]) -> None:
        """Brings layers into device memory."""

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees what `load_layers` brought in."""

    def wait_for_layer(self, layer: int) -> None:
        """Blocks until all weights that a layer computes with are in device memory."""

    def averaged(self, averaging: Averaging) -> AbstractContextManager[None]:
        """Lets layers compute with averaged weights while it is open."""


class StageLinks(Protocol):
    """Messages between pipeline stages outside of a step."""

    def send_tied_weights(self, phase: tuple[int, int]) -> None:
        """Sends the tied weights that a phase owns."""

    def recv_tied_weights(self, phase: tuple[int, int]) -> None:
        """Receives the tied weights that a phase uses."""

    def free_tied_weights(self) -> None:
        """Frees the tied weights received from other stages."""

    def crosses_stages(self, layer: int) -> bool:
        """Whether a layer's output goes to or from this stage."""

    def receive_activation(self, layer: int, block: int, shape: torch.Size | None = None) -> Tensor:
        """The output of a layer of the previous stage."""

    def send_activation(self, layer: int, block: int, output: Tensor) -> None:
        """Sends the output of this stage's last layer to the next stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPasses:
    """What passes of one rank need: its weights, its layers, and the other ranks."""

    context: RankContext
    """The rank's plan, device and settings."""
    store: PassStore
    templates: tuple[LayerTemplate, ...]
    """One template per layer."""
    whole_templates: tuple[LayerTemplate, ...]
    """The same, or templates for whole sequences where those of training take a part of each."""
    dist: DistContext
    """The ranks of the run."""
    p2p: StageLinks | None
    """Sends and receives between pipeline stages; None on a single device."""
    on_progress: Callable[[], None]
    """Called whenever a batch has passed through a phase."""

    def run(
        self,
        values: list[Tensor],
        output: Callable[[range, int, Tensor], Tensor],
        shape: Callable[[int, int], torch.Size] | None = None,
    ) -> bool:
        """Passes all batches through this rank's layers, and says whether the last is among them.

        All batches pass through one phase before the next one is loaded.

        Args:
            values: the batches; each is replaced by what the last layers of this rank give.
            output: of consecutive layers, for the index of a batch and what enters them.
            shape: of a layer's output, for a batch; None means that of a micro-batch.
        """
        plan, store, p2p = self.context.plan, self.store, self.p2p
        chunks = chunks_of_stage(plan, self.dist.coord.stage)
        phases = [phase for chunk in chunks for phase in plan.stages[chunk].phases]
        for first, last in phases:
            store.load_layers(range(first, last))
            if p2p:
                p2p.send_tied_weights((first, last))
                p2p.recv_tied_weights((first, last))
            for index in range(len(values)):
                x = values[index]
                if p2p and p2p.crosses_stages(first - 1):
                    size = shape(first - 1, index) if shape is not None else None
                    x = p2p.receive_activation(first - 1, index, size)
                x = output(range(first, last), index, x)
                if p2p and p2p.crosses_stages(last - 1):
                    p2p.send_activation(last - 1, index, x)
                values[index] = x
                self.on_progress()
            store.free_layers(range(first, last))
        if p2p:
            p2p.free_tied_weights()
        return bool(phases) and phases[-1][1] == len(self.templates)
