"""Held-out loss: the forward pass of the training templates, over text that is never trained on."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.data import TokenBatch, TrainingBatches
from windlass.models import IGNORE_INDEX
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The loss of a model on held-out text."""

    loss: float
    """Mean loss in nats per token."""
    bits_per_byte: float | None
    """The same loss in bits per byte of text; None without text."""


def with_averages(
    store: ParamStore, averaging: Averaging | None, evaluate_once: Callable[[], HeldOutLoss]
) -> tuple[HeldOutLoss, HeldOutLoss | None]:
    """The held-out loss of a run, and that of averages which it keeps beside its weights.

    Where averages are what an optimizer trains, theirs is the loss of the run.

    Args:
        store: the weights.
        averaging: what the run averages; None if nothing.
        evaluate_once: gives the loss of the weights that layers compute with.
    """
    if averaging is None:
        return evaluate_once(), None
    trained = evaluate_once() if averaging.is_kept else None
    with store.averaged(averaging):
        averaged = evaluate_once()
    return (averaged, None) if trained is None else (trained, averaged)


def evaluate(
    passes: RankPasses, batches: TrainingBatches, *, no_grad_layers: frozenset[int]
) -> HeldOutLoss:
    """The mean loss over held-out sequences, without dropout.

    Micro-batches are as large as in training, so that compiled code is reused. Each data-parallel
    rank takes its part of the sequences.

    Args:
        passes: the rank that computes.
        batches: provides the held-out sequences.
        no_grad_layers: layers whose forward pass runs without autograd in training. Each layer
            runs here as it does there, so that nothing is compiled for evaluation alone.
    """
    context, dist = passes.context, passes.dist
    values, all_targets, all_documents, counts = _held_out_batches(context, batches, dist)

    def output(layers: range, index: int, x: Tensor) -> Tensor:
        return _forward(layers, passes, x, all_targets[index], all_documents[index], no_grad_layers)

    is_last = passes.run(values, output)
    # All tensor-parallel ranks of the last layer have the same loss; the first one counts.
    has_loss = is_last and not dist.coord.tensor_rank
    losses = [float(x) * n for x, n in zip(values, counts, strict=True)] if has_loss else []
    loss, count = dist.all_reduce_sum((sum(losses), float(sum(counts) if has_loss else 0)))
    bits = batches.bits_per_byte(loss / count, context.settings.evaluate_sequences)
    return HeldOutLoss(loss=loss / count, bits_per_byte=bits)


def _held_out_batches(
    context: RankContext, batches: TrainingBatches, dist: DistContext
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], list[int]]:
    """Inputs, targets, documents and number of targets of each held-out micro-batch of this rank.

    Documents are None where a row is one document.
    """
    plan, micro = context.plan, context.plan.batch.micro
    own: list[tuple[Tensor, Tensor, Tensor | None, int]] = []
    spare: tuple[Tensor, Tensor, Tensor | None, int] | None = None
    rounds = 0
    sequences = context.settings.evaluate_sequences
    held_out = batches.held_out_batches(sequences, micro)
    documents = batches.held_out_documents(sequences, micro)
    for index, ((inputs, targets), ids) in enumerate(zip(held_out, documents, strict=False)):
        rounds = index // plan.parallel.data + 1
        count = int(np.count_nonzero(targets != IGNORE_INDEX))
        is_own = index % plan.parallel.data == dist.coord.data_rank
        if not count or not (is_own or spare is None):
            continue  # A mean over no target is no number.
        batch = (
            _padded(context, inputs, 0), _padded(context, targets, IGNORE_INDEX),
            None if ids is None else _padded(context, ids, 0),
        )  # fmt: skip
        spare = (*batch, 0) if spare is None else spare
        own += [(*batch, count)] if is_own else []
    if plan.parallel.expert and spare is not None:
        # Replicas that divide experts wait for each other in each pass.
        own += [spare] * (rounds - len(own))
    if not own:
        return [], [], [], []
    values, all_targets, all_documents, counts = map(list, zip(*own, strict=True))
    return values, all_targets, all_documents, counts


def _forward(
    layers: range,
    passes: RankPasses,
    x: Tensor,
    targets: Tensor,
    documents: Tensor | None,
    no_grad_layers: frozenset[int],
) -> Tensor:
    """The output of consecutive layers for one micro-batch; the loss if the last one is included.

    Args:
        layers: indices of the layers.
        passes: the rank that computes.
        x: `Int[b s]` for the first layer, else `Float[b s d]`.
        targets: `Int[b s]`.
        documents: the document of each token, `Int[b s]`; None if a row is one document.
        no_grad_layers: layers that run without autograd.
    """
    store, templates = passes.store, passes.templates
    for index in layers:
        store.wait_for_layer(index)
        layer, template = store.layers[index], templates[index]
        with_grad = index not in no_grad_layers
        x = x.detach().requires_grad_(with_grad and index > 0)
        last_targets = targets if index == len(templates) - 1 else None
        with torch.set_grad_enabled(with_grad):
            x = template.evaluate(layer.weights, layer.buffers, x, last_targets, documents)
    return x.detach()


def _padded(context: RankContext, rows: TokenBatch, value: int) -> Tensor:
    """`Int[b s]` on the device: rows padded to a micro-batch with rows of one value."""
    missing = context.plan.batch.micro - len(rows)
    padded = np.pad(rows, ((0, missing), (0, 0)), constant_values=value)
    return context.device.to_device(torch.from_numpy(padded))
