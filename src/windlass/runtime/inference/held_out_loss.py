"""Held-out loss: the forward pass of the training templates, over text that is never trained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.data import ExampleArray, TrainingBatches, target_counts
from windlass.models import IGNORE_INDEX, layer_loss
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.param_store import ParamStore
from windlass.runtime.parameters import DTYPES
from windlass.runtime.rank_context import RankContext
from windlass.schema import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The loss of a model on held-out text."""

    loss: float
    """Mean loss in nats per token."""
    bits_per_byte: float | None
    """The same loss in bits per byte of text; None without text."""
    accuracy: float | None = None
    """Share of the examples whose class has the largest logit; None if they have no class."""


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
    examples = context.stack.examples
    # Their last layer gives few numbers, so it can give them, not only the loss.
    classifies = examples is not None and examples.numbers is None
    values, all_targets, all_documents, counts = _held_out_batches(context, batches, dist)

    def output(layers: range, index: int, x: Tensor) -> Tensor:
        targets = None if classifies else all_targets[index]
        return _forward(layers, passes, x, targets, all_documents[index], no_grad_layers)

    is_last, correct = passes.run(values, output), 0
    if is_last and classifies:
        loss_of = layer_loss(passes.templates[-1].module)
        for index, targets in enumerate(all_targets):
            correct += int((values[index].argmax(dim=-1) == targets).sum())
            values[index] = loss_of(values[index], targets)
    # All tensor-parallel ranks of the last layer have the same loss; the first one counts.
    has_loss = is_last and not dist.coord.tensor_rank
    losses = [float(x) * n for x, n in zip(values, counts, strict=True)] if has_loss else []
    local = (sum(losses), float(sum(counts) if has_loss else 0), float(correct))
    loss, count, right = dist.all_reduce_sum(local)
    bits = batches.bits_per_byte(loss / count, context.settings.evaluate_sequences)
    accuracy = right / count if classifies else None
    return HeldOutLoss(loss=loss / count, bits_per_byte=bits, accuracy=accuracy)


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
        count = int(target_counts(targets).sum())
        is_own = index % plan.parallel.data == dist.coord.data_rank
        if not count or not (is_own or spare is None):
            continue  # A mean over no target is no number.
        batch = (
            _in_precision(_padded(context, inputs, 0), plan),
            _padded(context, targets, _no_target(targets)),
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
    targets: Tensor | None,
    documents: Tensor | None,
    no_grad_layers: frozenset[int],
) -> Tensor:
    """The output of consecutive layers for one micro-batch; the loss if the last one is included.

    Args:
        layers: indices of the layers.
        passes: the rank that computes.
        x: what the data give for the first layer, else the output of the layer before.
        targets: what the loss compares the last output with; None gives that output.
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


def _padded(context: RankContext, rows: ExampleArray, value: float) -> Tensor:
    """`[b ...]` on the device: rows padded to a micro-batch with rows of one value."""
    missing = context.plan.batch.micro - len(rows)
    padded = np.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1)), constant_values=value)
    return context.device.to_device(torch.from_numpy(padded))


def _in_precision(inputs: Tensor, plan: Plan) -> Tensor:
    """Token ids, or numbers in the type that layers compute with."""
    return inputs.to(DTYPES[plan.precision]) if inputs.is_floating_point() else inputs


def _no_target(targets: ExampleArray) -> float:
    """The target that does not count in the loss."""
    return math.nan if targets.dtype.kind == "f" else IGNORE_INDEX
