"""Comparison of a run on one device with the same steps in plain PyTorch, which shares no code."""

import math
from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from windlass.data import Batches, ExampleBatches, RowBatches, SentencePairs
from windlass.models import LayerStack, materialize_layer
from windlass.runtime.optimizer_state.dtypes import DTYPES
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.verify.compare_runs import InstrumentedRun, checkpoint_layers
from windlass.runtime.verify.error_record import (
    ErrorRecord,
    least_scale,
    relative_error,
    tensor_error,
)
from windlass.runtime.verify.plain_loop.data_order import (
    PlainBatches,
    PlainMasking,
    read_plain_batches,
)
from windlass.runtime.verify.plain_loop.examples import PlainExamples, read_plain_examples
from windlass.runtime.verify.plain_loop.pairs import PlainPairs, read_plain_pairs
from windlass.runtime.verify.plain_loop.training import PlainRun, plain_learning_rate, train_plainly
from windlass.schema import (
    EXAMPLES_FILE,
    ComparedQuantity,
    Plan,
    Step,
    TrainSettings,
    VerificationResult,
)

_SCHEDULE_STEPS = 200
"""Steps of the learning-rate schedule that is compared; the run itself has only a few."""


_TOLERANCE = 1e-7
"""Relative tolerance in float64: torch's fused AdamW takes the divisor that clips in float32, whose
rounding of 2^-24 = 6e-8 reaches weights and all later losses."""


def compare_to_plain_pytorch(
    run: InstrumentedRun,
    plan: Plan,
    stack: LayerStack,
    batches: Batches | ExampleBatches | RowBatches,
    settings: TrainSettings,
    *,
    schedule: TrainSettings,
) -> VerificationResult:
    """Compares tokens, learning rates, losses, norms and final weights with plain PyTorch.

    Args:
        run: a run on one device without recompute, in float64, with float32 moments.
        plan: the plan of that run.
        stack: the model, on the meta device or with its initial weights, which are changed.
        batches: the batches of that run.
        settings: its training settings.
        schedule: settings whose warm-up and decay are compared over more steps than the run has.

    Raises:
        CheckpointError: the last checkpoint is damaged.
    """
    tolerance: dict[ComparedQuantity, float] = dict.fromkeys(get_args(ComparedQuantity), _TOLERANCE)
    errors = ErrorRecord(stack.names, tolerance)
    plain_batches: PlainBatches | PlainExamples | PlainPairs
    if isinstance(batches, ExampleBatches):
        plain_batches = read_plain_examples(
            run.folder / EXAMPLES_FILE, batch=batches.batch, seed=batches.seed,
            dtype=DTYPES[plan.precision],
        )  # fmt: skip
    elif isinstance(batches, RowBatches):
        plain_batches = _plain_pairs(batches)
    else:
        plain_batches = _plain_batches(batches)
    _compare_schedule(errors, schedule)
    _compare_tokens(errors, batches, plain_batches, settings.steps)
    plain = train_plainly(
        _real_layers(stack, settings.seed), plain_batches, settings,
        micro=plan.batch.micro, dtype=DTYPES[plan.precision], float8=plan.multiplies_float8,
    )  # fmt: skip
    _compare_steps(errors, run, plain)
    _compare_weights(errors, run, stack, plain)
    _compare_evaluation(errors, run.steps[-1], plain)
    return errors.result(len(run.steps))


def _plain_batches(batches: Batches) -> PlainBatches:
    masking = batches.masking
    return read_plain_batches(
        batches.tokens.folder,
        sequence=batches.sequence,
        batch=batches.batch,
        seed=batches.seed,
        weights=batches.weights,
        masking=None if masking is None else PlainMasking(masking.mask_token, masking.vocabulary),
    )


def _plain_pairs(batches: RowBatches) -> PlainPairs:
    rows = batches.writer
    if not isinstance(rows, SentencePairs):
        raise TypeError(f"rows of `{type(rows).__name__}` have no plain counterpart")
    return read_plain_pairs(
        batches.tokens.folder, sequence=batches.sequence, batch=batches.batch,
        seed=batches.order.seed, weights=batches.order.weights,
        masking=PlainMasking(rows.masking.mask_token, rows.masking.vocabulary),
        first=rows.special.first, vocabulary=rows.special.second_offset,
    )  # fmt: skip


def _compare_schedule(errors: ErrorRecord, schedule: TrainSettings) -> None:
    schedule = schedule.model_copy(update={"steps": _SCHEDULE_STEPS})
    for step in range(1, _SCHEDULE_STEPS + 1):
        error = relative_error(learning_rate(schedule, step), plain_learning_rate(schedule, step))
        errors.add("learning rate", step, error)


def _compare_tokens(
    errors: ErrorRecord,
    batches: Batches | ExampleBatches | RowBatches,
    plain: PlainBatches | PlainExamples | PlainPairs,
    steps: int,
) -> None:
    for step in range(1, steps + 1):
        actual, expected = batches.samples(step), plain.samples(step)
        for sample in range(batches.batch):
            equal = all(
                _are_equal(torch.as_tensor(ours[sample]), theirs[sample])
                for ours, theirs in zip(actual, expected, strict=True)
            )
            errors.add("tokens", step, 0.0 if equal else math.inf, sample=sample)


def _are_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Whether tokens or numbers are equal, where numbers that are not known are equal too."""
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return torch.equal(ours.nan_to_num(), theirs.to(ours.dtype).nan_to_num())


def _compare_steps(errors: ErrorRecord, run: InstrumentedRun, plain: PlainRun) -> None:
    rows = zip(run.steps, plain.learning_rates, plain.losses, plain.gradient_norms, strict=True)
    for step, rate, loss, norm in rows:
        errors.add("learning rate", step.step, relative_error(step.learning_rate, rate))
        errors.add("loss", step.step, relative_error(step.loss, loss))
        errors.add("gradient norm", step.step, relative_error(step.gradient_norm, norm))


def _compare_evaluation(errors: ErrorRecord, last: Step, plain: PlainRun) -> None:
    loss, bits = plain.held_out_loss, plain.held_out_bits_per_byte
    if loss is not None:
        errors.add("held-out loss", last.step, relative_error(last.held_out_loss, loss))
    if plain.held_out_loss_ema is not None:
        averaged = relative_error(last.held_out_loss_ema, plain.held_out_loss_ema)
        errors.add("held-out loss", last.step, averaged)
    if bits is not None:
        error = relative_error(last.held_out_bits_per_byte, bits)
        errors.add("held-out bits per byte", last.step, error)
    if plain.held_out_accuracy is not None:
        right = last.held_out_accuracy
        error = abs((math.nan if right is None else right) - plain.held_out_accuracy)
        errors.add("held-out accuracy", last.step, error)


def _compare_weights(
    errors: ErrorRecord, run: InstrumentedRun, stack: LayerStack, plain: PlainRun
) -> None:
    step = run.steps[-1].step
    saved = checkpoint_layers(run, stack, step)
    for index, (name, layer) in enumerate(zip(stack.names, plain.model, strict=True)):
        weights = dict(_owned_weights(name, layer, stack.tied_weights))
        min_scale = least_scale(weights.values())
        for full, weight in weights.items():
            error = tensor_error(saved[index].get(f"weight/{full}"), weight, min_scale=min_scale)
            errors.add("weight", step, error, layer=index, weight=full)


def _owned_weights(
    name: str, layer: nn.Module, tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Full name and value of each weight of a layer that is not tied to an earlier one."""
    for inner, weight in layer.named_parameters():
        if f"{name}.{inner}" not in tied:
            yield f"{name}.{inner}", weight.detach()


def _real_layers(stack: LayerStack, seed: int) -> tuple[tuple[str, nn.Module], ...]:
    """Name and module of each layer with its initial weights; tied weights are one parameter."""
    layers = {
        name: materialize_layer(stack, index, seed=seed, device="cpu")
        for index, name in enumerate(stack.names)
    }
    for tied, owner in stack.tied_weights.items():
        (layer, path), (owner_layer, owner_path) = (
            next(
                (layers[name], full.removeprefix(f"{name}."))
                for name in stack.names
                if full.startswith(f"{name}.")
            )
            for full in (tied, owner)
        )
        parent, _, leaf = path.rpartition(".")
        weight = owner_layer.get_parameter(owner_path)
        setattr(layer.get_submodule(parent), leaf, weight)
    return tuple(layers.items())
