"""Held-out loss: the forward pass of the same templates, over text that is never trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.data.batches import Batches, Block
from windlass.models.loss import NO_TARGET
from windlass.runtime.distributed.p2p import Messages
from windlass.runtime.distributed.process_groups import World
from windlass.runtime.layer_templates import Template
from windlass.runtime.param_store import Residence


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
    world: World,
    messages: Messages | None,
    replicas: int,
    done: Callable[[], None],
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
        world: the devices; each replica takes its share of the sequences.
        messages: between stages; None on one device.
        replicas: that the sequences are divided among.
        done: told of each block that has passed through a phase.
    """
    values: list[Tensor] = []
    wanted: list[Tensor] = []
    counts: list[int] = []
    for at, block in enumerate(batches.held_out(sequences, micro)):
        if at % replicas == world.place.replica:
            inputs, targets = (torch.from_numpy(part).to(device) for part in _filled(block, micro))
            values.append(inputs)
            wanted.append(targets)
            counts.append(block[1].size)
    for first, last in phases:
        residence.visit(range(first, last))
        if messages:
            messages.lend_of((first, last))
            messages.before((first, last))
        for index in range(len(values)):
            x = values[index]
            if messages and messages.crosses(first - 1):
                x = messages.come(first - 1, index)
            x = _through(range(first, last), residence, templates, x, wanted[index], bare)
            if messages and messages.crosses(last - 1):
                messages.go(last - 1, index, x)
            values[index] = x
            done()
        residence.leave(range(first, last))
    if messages:
        messages.give_back()
    # All slices have the same loss, where the last layer is.
    ends = bool(phases) and phases[-1][1] == len(templates) and not world.place.slice
    lost = [float(x) * n for x, n in zip(values, counts, strict=True)] if ends else []
    loss, count = world.total((sum(lost), float(sum(counts) if ends else 0)))
    return HeldOut(loss=loss / count, bits_per_byte=batches.bits_per_byte(loss / count, sequences))


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
