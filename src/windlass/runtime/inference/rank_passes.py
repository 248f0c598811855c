"""Forward passes of one rank outside of a step: all batches through one phase after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.program import chunks_of_stage
from windlass.runtime.distributed.p2p import P2PCommunicator
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPasses:
    """What passes of one rank need: its weights, its layers, and the other ranks."""

    context: RankContext
    """The rank's plan, device and settings."""
    store: ParamStore
    templates: tuple[LayerTemplate, ...]
    """One template per layer."""
    whole_templates: tuple[LayerTemplate, ...]
    """The same, or templates for whole sequences where those of training take a part of each."""
    dist: DistContext
    """The ranks of the run."""
    p2p: P2PCommunicator | None
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
