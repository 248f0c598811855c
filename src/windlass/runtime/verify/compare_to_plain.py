"""Comparison of a run on one device with the same steps in plain PyTorch, which shares no code."""

import math
from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from windlass.data import (
    Batches,
    ConversationRows,
    ExampleBatches,
    MaskedRows,
    MlmMasking,
    RowBatches,
    SentencePairs,
)
from windlass.models import LayerStack, joined_matrices, materialize_layer
from windlass.runtime.optimizer_state.optimizer_state import DTYPES
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.verify.compare_runs import InstrumentedRun, checkpoint_layers
from windlass.runtime.verify.error_record import (
    ErrorRecord,
    least_scale,
    relative_error,
    tensor_error,
)
from windlass.runtime.verify.plain_loop.data_order import PlainMasking, read_plain_batches
from windlass.runtime.verify.plain_loop.examples import read_plain_examples
from windlass.runtime.verify.plain_loop.learned_rows import (
    PairTokens,
    RowForm,
    read_plain_answers,
    read_plain_masked_text,
    read_plain_pairs,
)
from windlass.runtime.verify.plain_loop.masks import plain_drop_share
from windlass.runtime.verify.plain_loop.rows import PlainRows
from windlass.runtime.verify.plain_loop.training import (
    PlainData,
    PlainRun,
    plain_learning_rate,
    train_plainly,
)
from windlass.schema import (
    EXAMPLES_FILE,
    ComparedQuantity,
    Plan,
    SparsityRequest,
    Step,
    TrainSettings,
    VerificationResult,
)
from windlass.sparsity import drop_share, updates_masks

_SCHEDULE_STEPS = 200
"""Steps of the schedules that are compared; the run itself has only a few."""


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
    masks: SparsityRequest | None = None,
) -> VerificationResult:
    """Compares tokens, learning rates, losses, norms and final weights with plain PyTorch.

    Args:
        stack: the model, on the meta device or with its initial weights, which are changed.
        schedule: settings whose warm-up and decay are compared over more steps than the run has.
        masks: what moves masks, whose schedule is compared likewise; None for a dense model.

    Raises:
        CheckpointError: the last checkpoint is damaged.
    """
    tolerance: dict[ComparedQuantity, float] = dict.fromkeys(get_args(ComparedQuantity), _TOLERANCE)
    errors = ErrorRecord(stack.names, tolerance)
    plain_batches = _plain_data(run, plan, batches)
    _compare_schedule(errors, schedule, masks)
    _compare_tokens(errors, batches, plain_batches, settings)
    layers = _real_layers(stack, settings.seed)
    plain = train_plainly(
        layers, plain_batches, settings,
        micro=plan.batch.micro, dtype=DTYPES[plan.precision], float8=plan.multiplies_float8,
        sparsity=None if plan.model is None else plan.model.sparsity,
        joined=joined_matrices(layers),
    )  # fmt: skip
    _compare_steps(errors, run, plain)
    _compare_weights(errors, run, stack, plain)
    return errors.result(len(run.steps))


def _plain_data(
    run: InstrumentedRun, plan: Plan, batches: Batches | ExampleBatches | RowBatches
) -> PlainData:
    """The data of a run, read by code of its own."""
    if isinstance(batches, ExampleBatches):
        return read_plain_examples(
            run.folder / EXAMPLES_FILE, batch=batches.batch, seed=batches.seed,
            dtype=DTYPES[plan.precision],
        )  # fmt: skip
    if isinstance(batches, RowBatches):
        return _plain_rows(batches)
    return read_plain_batches(
        batches.tokens.folder,
        sequence=batches.sequence,
        batch=batches.batch,
        seed=batches.seed,
        weights=batches.weights,
        masking=None if batches.masking is None else _plain_masking(batches.masking),
    )


def _plain_rows(batches: RowBatches) -> PlainRows:
    """The rows of a run, by what is learned of them."""
    rows, folder = batches.writer, batches.tokens.folder
    form = RowForm(
        sequence=batches.sequence, batch=batches.batch, seed=batches.order.seed,
        weights=batches.order.weights, packing=batches.is_packed,
    )  # fmt: skip
    match rows:
        case ConversationRows():
            return read_plain_answers(folder, form, drop_long=rows.drop_long)
        case MaskedRows():
            return read_plain_masked_text(folder, form, _plain_masking(rows.masking))
        case SentencePairs():
            tokens = PairTokens(rows.special.first, rows.special.second_offset)
            form = form._replace(packing=rows.packing)
            return read_plain_pairs(folder, form, _plain_masking(rows.masking), tokens)
        case _:
            raise TypeError(f"rows of `{type(rows).__name__}` have no plain counterpart")


def _plain_masking(masking: MlmMasking) -> PlainMasking:
    return PlainMasking(masking.mask_token, masking.vocabulary)


def _compare_schedule(
    errors: ErrorRecord, schedule: TrainSettings, masks: SparsityRequest | None
) -> None:
    steps = _SCHEDULE_STEPS
    schedule = schedule.model_copy(update={"steps": steps})
    for step in range(1, steps + 1):
        error = relative_error(learning_rate(schedule, step), plain_learning_rate(schedule, step))
        errors.add("learning rate", step, error)
    if masks is None or not masks.changes_masks:
        return
    # So often that the schedule has some updates in these steps.
    masks = masks.model_copy(update={"every": min(masks.every, steps // 10)})
    for step in range(1, steps + 1):
        moves = updates_masks(masks, step, steps)
        share = drop_share(masks, step, steps) if moves else 0.0
        errors.add("mask update", step, abs(share - plain_drop_share(masks, step, steps)))


def _compare_tokens(
    errors: ErrorRecord,
    batches: Batches | ExampleBatches | RowBatches,
    plain: PlainData,
    settings: TrainSettings,
) -> None:
    for step in range(1, settings.steps + 1):
        actual, expected = batches.samples(step), plain.samples(step)
        for sample in range(batches.batch):
            equal = all(
                _are_equal(torch.as_tensor(ours[sample]), theirs[sample])
                for ours, theirs in zip(actual, expected, strict=True)
            )
            errors.add("tokens", step, 0.0 if equal else math.inf, sample=sample)
        documents, apart = batches.document_ids(step, 0, batches.batch), plain.documents(step)
        if documents is not None or apart is not None:
            known = documents is not None and apart is not None
            equal = known and torch.equal(torch.as_tensor(documents), torch.as_tensor(apart))
            errors.add("documents", step, 0.0 if equal else math.inf)


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
        _compare_evaluation(errors, step, plain)


def _compare_evaluation(errors: ErrorRecord, step: Step, plain: PlainRun) -> None:
    expected = plain.evaluations.get(step.step)
    if expected is None:
        errors.add("evaluations", step.step, 0.0 if step.held_out_loss is None else math.inf)
        return
    pairs: tuple[tuple[ComparedQuantity, float | None, float | None], ...] = (
        ("held-out loss", step.held_out_loss, expected.loss),
        ("averaged held-out loss", step.held_out_loss_ema, expected.loss_ema),
        ("held-out bits per byte", step.held_out_bits_per_byte, expected.bits_per_byte),
    )
    for quantity, actual, value in pairs:
        if value is not None:
            errors.add(quantity, step.step, relative_error(actual, value))
    if expected.accuracy is not None:
        right = step.held_out_accuracy
        error = abs((math.nan if right is None else right) - expected.accuracy)
        errors.add("held-out accuracy", step.step, error)


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
        for inner, buffer in layer.named_buffers():
            if (value := saved[index].get(f"buffer/{name}.{inner}")) is not None:
                error = tensor_error(value, buffer)
                errors.add("buffer", step, error, layer=index, weight=f"{name}.{inner}")


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
