"""Held-out loss: the forward pass of the training templates, over text that is never trained on."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from windlass.data import (
    ExampleArray,
    TokenBatch,
    TrainingBatches,
    target_counts,
    with_one_target,
)
from windlass.models import (
    HEAD_RESULTS,
    IGNORE_INDEX,
    gives_text_classes,
    has_sentence_head,
    layer_loss,
)
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.inference.rank_passes import PassStore, RankPasses
from windlass.runtime.inference.score_tasks import likelihoods_on_ranks
from windlass.runtime.optimizer_state.optimizer_state import DTYPES, Averaging
from windlass.runtime.rank_context import RankContext
from windlass.schema import SENTENCES_PER_ROW, Plan, TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The loss of a model on held-out text."""

    loss: float
    """Mean loss in nats per token; with a sentence head, that of its pairs is added."""
    bits_per_byte: float | None
    """The loss of tokens in bits per byte of text; None without text."""
    accuracy: float | None = None
    """Share of the examples, or pairs of sentences, whose class has the largest logit; None if they
    have no class."""
    sentence_loss: float | None = None
    """Mean loss of the pairs of sentences, in nats; None without a sentence head."""


def with_averages(
    store: PassStore, averaging: Averaging | None, evaluate_once: Callable[[], HeldOutLoss]
) -> tuple[HeldOutLoss, HeldOutLoss | None]:
    """The held-out loss of a run, and that of averages which it keeps beside its weights.

    Where averages are what an optimizer trains, theirs is the loss of the run.

    Args:
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
    last = context.stack.layers[-1]
    # Their last layer gives few numbers, so it can give them, not only the loss.
    has_classes = examples is not None and examples.numbers is None
    classifies = has_classes or gives_text_classes(last)
    has_sentences = has_sentence_head(last)
    values, all_targets, all_documents, counts = _held_out_batches(context, batches, dist)

    def output(layers: range, index: int, x: Tensor) -> Tensor:
        targets = None if classifies else all_targets[index]
        return _forward(layers, passes, x, targets, all_documents[index], no_grad_layers)

    is_last, correct = passes.run(values, output), 0
    # All tensor-parallel ranks of the last layer have the same loss; the first one counts.
    has_loss = is_last and not dist.coord.tensor_rank
    if has_loss and classifies:
        loss_of = layer_loss(passes.templates[-1].module)
        for index, targets in enumerate(all_targets):
            correct += int((values[index].argmax(dim=-1) == targets).sum())
            values[index] = loss_of(values[index], targets)
    results = HEAD_RESULTS if has_sentences else 1
    sums, totals = np.zeros(results), np.zeros(results)
    for value, count in zip(values, counts, strict=True) if has_loss else ():
        totals += count
        sums += value.cpu().double().numpy() * count
    local = (*sums.tolist(), *totals.tolist(), float(correct))
    *reduced, right = dist.all_reduce_sum(local)
    means = [total / n for total, n in zip(reduced[:results], reduced[results:], strict=True)]
    bits = batches.bits_per_byte(means[0], context.settings.evaluate_sequences)
    if has_sentences:
        loss, sentence_loss, share_right = means
        return HeldOutLoss(
            loss=loss + sentence_loss, bits_per_byte=bits, accuracy=share_right,
            sentence_loss=sentence_loss,
        )  # fmt: skip
    accuracy = right / reduced[results] if classifies else None
    return HeldOutLoss(loss=means[0], bits_per_byte=bits, accuracy=accuracy)


def _held_out_batches(
    context: RankContext, batches: TrainingBatches, dist: DistContext
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], list[TokenBatch]]:
    """Inputs, targets, documents and numbers of targets of each held-out micro-batch of this rank.

    Documents are None where a row is one document. There is a number of targets for each number
    that the last layer gives.
    """
    plan, micro, tokens = context.plan, context.plan.batch.micro, dist.context
    replica = dist.coord.data_rank // tokens.degree
    own: list[tuple[Tensor, Tensor, Tensor | None, TokenBatch]] = []
    spare: tuple[Tensor, Tensor, Tensor | None, TokenBatch] | None = None
    has_sentences = has_sentence_head(context.stack.layers[-1])
    rounds = 0
    sequences = context.settings.evaluate_sequences
    held_out = batches.held_out_batches(sequences, micro)
    documents = batches.held_out_documents(sequences, micro)
    for index, ((inputs, targets), ids) in enumerate(zip(held_out, documents, strict=False)):
        rounds = index // plan.parallel.data + 1
        is_own = index % plan.parallel.data == replica
        if not target_counts(targets).any() or not (is_own or spare is None):
            continue  # A mean over no target is no number.
        own_targets = tokens.own_tokens(targets)
        count = _counts(own_targets, has_sentences=has_sentences)
        if not count.any():
            # Other ranks have targets in their part, and wait for this one: its own count 0.
            own_targets = with_one_target(own_targets)
        batch = (
            _in_precision(_padded(context, tokens.own_tokens(inputs), 0), plan),
            _padded(context, own_targets, _no_target(targets)),
            None if ids is None else _padded(context, ids, 0),
        )  # fmt: skip
        spare = (*batch, np.zeros_like(count)) if spare is None else spare
        own += [(*batch, count)] if is_own else []
    if plan.parallel.expert and spare is not None:
        # Replicas that divide experts wait for each other in each pass.
        own += [spare] * (rounds - len(own))
    if not own:
        return [], [], [], []
    values, all_targets, all_documents, counts = map(list, zip(*own, strict=True))
    return values, all_targets, all_documents, counts


def _counts(targets: ExampleArray, *, has_sentences: bool) -> TokenBatch:
    """Number of targets that each result of the last layer is a mean over, `Int[result]`."""
    if not has_sentences:
        return np.array([target_counts(targets).sum()])
    parts = targets[:, :-SENTENCES_PER_ROW], targets[:, -SENTENCES_PER_ROW:]
    tokens, sentences = (int(target_counts(part).sum()) for part in parts)
    return np.array([tokens, sentences, sentences])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured after one step."""

    loss: float | None = None
    """Held-out loss in nats per token; None if it was not due."""
    bits_per_byte: float | None = None
    accuracy: float | None = None
    """Share of held-out examples, or pairs of sentences, whose class is predicted right; None
    without classes."""
    sentence_loss: float | None = None
    """Part of the loss that is of pairs of sentences; None without a sentence head."""
    loss_ema: float | None = None
    """The loss of averaged weights; None if the run keeps none."""
    task_scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Metrics by `TASK.METRIC`; empty if tasks were not due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The evaluations of one rank of a run."""

    passes: RankPasses
    batches: TrainingBatches
    averaging: Averaging | None
    """What the run averages; None if nothing."""
    no_grad_layers: frozenset[int]
    """Layers whose forward pass runs without autograd in training."""

    def is_due(self, step: int) -> bool:
        """Whether anything is measured after a step."""
        return self._loss_is_due(step) or self._tasks_are_due(step)

    def after(self, step: int) -> Evaluation:
        """Measures what is due after a step, on all ranks together."""
        held_out = averaged = None
        if self._loss_is_due(step):
            held_out, averaged = with_averages(self.passes.store, self.averaging, self._held_out)
        return Evaluation(
            loss=held_out.loss if held_out else None,
            bits_per_byte=held_out.bits_per_byte if held_out else None,
            accuracy=held_out.accuracy if held_out else None,
            sentence_loss=held_out.sentence_loss if held_out else None,
            loss_ema=averaged.loss if averaged else None,
            task_scores=self._task_scores() if self._tasks_are_due(step) else {},
        )

    def _held_out(self) -> HeldOutLoss:
        return evaluate(self.passes, self.batches, no_grad_layers=self.no_grad_layers)

    def _task_scores(self) -> Mapping[str, float]:
        """The scores of the weights that the run trains; averages count where they are trained."""
        averaging, store = self.averaging, self.passes.store
        trains_averages = averaging is not None and not averaging.is_kept
        with store.averaged(averaging) if averaging and trains_averages else nullcontext():
            tasks = self.passes.context.tasks
            return (
                {} if tasks is None else tasks.metrics(partial(likelihoods_on_ranks, self.passes))
            )

    def _loss_is_due(self, step: int) -> bool:
        settings = self._settings
        return settings.evaluate_sequences > 0 and self._is_due(step, settings.evaluate_every)

    def _tasks_are_due(self, step: int) -> bool:
        every = self._settings.evaluate_tasks_every or self._settings.evaluate_every
        return self.passes.context.tasks is not None and self._is_due(step, every)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._settings.steps or step % every == 0

    @property
    def _settings(self) -> TrainSettings:
        return self.passes.context.settings
