"""Held-out loss: the forward pass of the same templates, over text that is never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.data.batches import Batches, Block
from windlass.models.loss import NO_TARGET
from windlass.runtime.layers import Template
from windlass.runtime.residence import Residence


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a model loses on held-out text."""

    loss: float
    """Nats a token."""
    bits_per_byte: float


def evaluate(
    residence: Residence,
    templates: tuple[Template, ...],
    batches: Batches,
    *,
    phases: Sequence[tuple[int, int]],
    sequences: int,
    micro: int,
    bare: frozenset[int],
    device: torch.device,
) -> HeldOut:
    """The mean loss over held-out sequences, nothing dropped.

    Args:
        residence: of the weights.
        templates: one for each layer.
        batches: gives the held-out sequences.
        phases: half-open ranges of layers that are near together; all sequences pass through one
            before the next.
        sequences: how many; all of them if there are fewer.
        micro: sequences at a time, as in training, so that compiled code fits.
        bare: layers whose forward pass keeps nothing in training. Each layer runs here as it
            does there, so that nothing is compiled for evaluation alone.
        device: where the weights are.
    """
    values: list[Tensor] = []
    wanted: list[Tensor] = []
    counts: list[int] = []
    for block in batches.held_out(sequences, micro):
        inputs, targets = (torch.from_numpy(part).to(device) for part in _filled(block, micro))
        values.append(inputs)
        wanted.append(targets)
        counts.append(block[1].size)
    for first, last in phases:
        residence.visit(range(first, last))
        for index, x in enumerate(values):
            values[index] = _through(
                range(first, last), residence, templates, x, wanted[index], bare
            )
        residence.leave(range(first, last))
    losses = (float(loss) * count for loss, count in zip(values, counts, strict=True))
    loss_per_token = sum(losses) / sum(counts)
    return HeldOut(
        loss=loss_per_token, bits_per_byte=batches.bits_per_byte(loss_per_token, sequences)
    )


def _through(
    layers: range,
    residence: Residence,
    templates: tuple[Template, ...],
    x: Tensor,
    targets: Tensor,
    bare: frozenset[int],
) -> Tensor:
    """What layers make of one block; the loss if the last is among them."""
    for index in layers:
        residence.need(index)
        layer, template = residence.layers[index], templates[index]
        keeps = index not in bare
        x = x.detach().requires_grad_(keeps and index > 0)
        last = targets if index == len(templates) - 1 else None
        with torch.set_grad_enabled(keeps):
            x = template.evaluated(layer.weights, layer.buffers, x, last)
    return x.detach()


def _filled(block: tuple[Block, Block], micro: int) -> tuple[Block, Block]:
    """A block of `micro` rows; rows that were not there have no target."""
    inputs, targets = block
    missing = micro - len(inputs)
    if not missing:
        return inputs, targets
    return (
        np.concatenate([inputs, np.zeros_like(inputs, shape=(missing, inputs.shape[1]))]),
        np.concatenate(
            [targets, np.full_like(targets, NO_TARGET, shape=(missing, inputs.shape[1]))]
        ),
    )
