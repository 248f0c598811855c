"""What the layers of one rank take in a step beside the outputs of other layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.program import Program
from windlass.runtime import (
    OTHER_WORK_SLOT,
    DropoutKeys,
    HeartbeatSlots,
    LayerTemplate,
    RankContext,
    StepInputs,
    generator_seed,
    layer_key,
)


class StepData:
    """Tokens, targets, documents and dropout keys of a rank's micro-batches, step by step."""

    def __init__(
        self, context: RankContext, inputs: StepInputs, heartbeat: HeartbeatSlots | None
    ) -> None:
        self.inputs = inputs
        self._context, self._heartbeat = context, heartbeat
        self._places = _instruction_places(context.program)
        device = context.device.torch_device
        self._keys = [layer_key(name).to(device) for name in context.stack.names]
        self._active = torch.ones((), dtype=torch.int64, device=device)
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        """Losses of this step so far, by micro-batch; empty where the last layer is elsewhere."""

    def begin_step(self, step: int) -> None:
        """Forgets the step before."""
        self.inputs.begin_step(step, 1.0)
        self._tokens, self.losses = {}, {}

    def tokens(self, micro: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a micro-batch, read once."""
        if micro not in self._tokens:
            self._tokens[micro] = self.inputs.tokens(micro)
        return self._tokens[micro]

    def call(
        self,
        template: LayerTemplate,
        index: int,
        micro: int,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        x: Tensor,
        *,
        selective: bool,
    ) -> Tensor:
        """The output of a layer, or the loss of the last one, in training.

        Args:
            selective: whether only results of large matrix products are kept.
        """
        self.mark("forward", index, micro)
        context, inputs = self._context, self.inputs
        is_last = index == len(context.stack.layers) - 1
        keys = None
        if template.has_dropout:
            keys = DropoutKeys(
                samples=inputs.sample_keys(micro), layer=self._keys[index], active=self._active
            )
        seed = generator_seed(context.seed, inputs.step, index, inputs.micro_batch_start(micro))
        return template(
            weights, buffers, keys, x,
            self.tokens(micro)[1] if is_last else None,
            inputs.documents(micro) if template.takes_documents else None,
            inputs.balance if template.takes_balance else None,
            seed=seed, selective=selective,
        )  # fmt: skip

    def mark(self, kind: str, index: int, micro: int) -> None:
        """Says that the pass of a layer begins, for the message if nothing follows."""
        if self._heartbeat is not None:
            place = self._places.get((kind, index, micro))
            if place is not None:
                self._heartbeat[1] = place
            self._heartbeat[OTHER_WORK_SLOT] += 1

    def close(self) -> None:
        """Ends the thread that reads micro-batches."""
        self.inputs.close()


def _instruction_places(program: Program) -> dict[tuple[str, int, int], int]:
    """The place of each pass in the program that describes this rank, by kind, layer and micro."""
    return {
        (each.kind, each.layer, each.micro_batch): place
        for place, each in enumerate(program.instructions)
        if each.layer is not None and each.micro_batch is not None
    }
