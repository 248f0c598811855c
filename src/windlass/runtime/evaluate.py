"""Held-out loss: the forward pass of the same templates, over text that is never trained on."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.data.batches import Batches, Block
from windlass.runtime.layers import NO_TARGET, Template
from windlass.runtime.tensors import LayerTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a model loses on held-out text."""

    loss: float
    """Nats a token."""
    bits_per_byte: float


def evaluate(
    layers: tuple[LayerTensors, ...],
    templates: tuple[Template, ...],
    batches: Batches,
    *,
    sequences: int,
    micro: int,
    again: frozenset[int],
    device: torch.device,
) -> HeldOut:
    """The mean loss over held-out sequences, nothing dropped.

    Args:
        layers: weights.
        templates: one for each layer.
        batches: gives the held-out sequences.
        sequences: how many; all of them if there are fewer.
        micro: sequences at a time, as in training, so that compiled code fits.
        again: layers whose forward pass keeps nothing in training. Each layer runs here as it
            does there, so that nothing is compiled for evaluation alone.
        device: where the weights are.
    """
    total, targets = 0.0, 0
    for block in batches.held_out(sequences, micro):
        inputs, wanted = (torch.from_numpy(part).to(device) for part in _filled(block, micro))
        count = block[1].size
        loss = _loss(layers, templates, inputs, wanted, again)
        total, targets = total + float(loss) * count, targets + count
    loss_per_token = total / targets
    return HeldOut(
        loss=loss_per_token, bits_per_byte=batches.bits_per_byte(loss_per_token, sequences)
    )


def _loss(
    layers: tuple[LayerTensors, ...],
    templates: tuple[Template, ...],
    inputs: Tensor,
    targets: Tensor,
    again: frozenset[int],
) -> Tensor:
    x = inputs
    for index, (layer, template) in enumerate(zip(layers, templates, strict=True)):
        keeps = index not in again
        x = x.detach().requires_grad_(keeps and index > 0)
        last = targets if index == len(layers) - 1 else None
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
