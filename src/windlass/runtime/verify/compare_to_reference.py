"""Comparison of a run's first step with the reference step, by the checkpoint that it left.

After one step from zero moments the first moment is a known share of `g / divisor`, `1 - beta1` for
Adam, so the gradient `g` can be recovered from it, however the step was run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import layer_file
from windlass.runtime.checkpoint.convert_moments import read_moments
from windlass.runtime.checkpoint.layer_tensors import read_tensors
from windlass.runtime.verify.reference_model import ReferenceStep
from windlass.schema import (
    MOMENT_TOLERANCE,
    MomentFormat,
    Precision,
    ReferenceCheck,
    ReferenceComparison,
    Step,
    TrainSettings,
    optimizer_law,
)
from windlass.torch_ext import MomentCodec

TOLERANCE: Mapping[Precision, float] = {
    "float32": 1e-4, "tf32": 4e-3, "float16": 4e-3, "bfloat16": 3e-2,
    "float8": 0.125,
}  # fmt: skip
"""Relative tolerance of gradients. Summing in another order leaves about 1e-6 in float32; bfloat16
has 8 bits of precision, so it leaves 2^-9 per layer, which propagates through all of them; float16
and TF32 have 11, which is an eighth of that."""

_LOSS_TOLERANCE: Mapping[Precision, float] = {
    "float32": 1e-5, "tf32": 1.25e-3, "float16": 1.25e-3, "bfloat16": 1e-2,
    "float8": 2e-2,
}  # fmt: skip
"""Relative tolerance of the loss."""


def compare_to_reference(
    reference: ReferenceStep,
    checkpoint: Path,
    stack: LayerStack,
    step: Step,
    settings: TrainSettings,
    *,
    precision: Precision,
    moments: MomentFormat = "float32",
) -> ReferenceComparison:
    """Compares the first step of a run with the reference step.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or its weights have not had
            exactly one update.
    """
    norm = step.gradient_norm
    divisor = 1.0 if settings.clip is None else max(1.0, (norm + 1e-6) / settings.clip)
    tolerance = TOLERANCE[precision] + MOMENT_TOLERANCE[moments]
    checks = [
        ReferenceCheck(
            name="loss", error=_relative_error(step.loss, reference.loss),
            tolerance=_LOSS_TOLERANCE[precision],
        ),
        ReferenceCheck(
            name="gradient norm", error=_relative_error(norm, reference.gradient_norm),
            tolerance=TOLERANCE[precision],
        ),
    ]  # fmt: skip
    share = optimizer_law(settings.optimizer).first_moment(settings.betas)
    # Where no moment tells the gradient, its norm does.
    compared = () if share is None else dict.fromkeys((0, len(stack.layers) - 1))
    scale = divisor / (share or 1.0)
    for index in compared:
        names = [n for n in reference.gradients if n.startswith(f"{stack.names[index]}.")]
        if names:
            first_moments = _first_moments(
                checkpoint / layer_file(index), names, reference.gradients
            )
            pairs = ((scale * moment, reference.gradients[name]) for name, moment in first_moments)
            label = f"gradient of layer {index}, `{stack.names[index]}`"
            error = _gradient_error(pairs)
            checks.append(ReferenceCheck(name=label, error=error, tolerance=tolerance))
    return ReferenceComparison(
        loss=step.loss,
        reference_loss=reference.loss,
        gradient_norm=norm,
        reference_norm=reference.gradient_norm,
        comparisons=tuple(checks),
    )


def _first_moments(
    file: Path, names: Sequence[str], gradients: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Name and float32 first moment of weights that have had one update."""
    codec = MomentCodec(torch.device("cpu"))
    for name in names:
        steps = torch.empty(())
        read_tensors(file, {f"steps/{name}": steps})
        if steps != 1:
            raise CheckpointError(
                f"`{file}` has `{name}` after {int(steps)} updates; its gradient can be recovered "
                "only after the first one"
            )
        shape = tuple(gradients[name].shape)
        moment, *_ = read_moments(file, name, shape, "float32", codec, seed=0, step=1)
        yield name, moment.values


def _gradient_error(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    """2-norm of the difference relative to that of the expected gradients of a layer."""
    difference = norm = 0.0
    for actual, expected in pairs:
        difference += float((actual - expected).double().square().sum())
        norm += float(expected.double().square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def _relative_error(actual: float, expected: float) -> float:
    return abs(actual - expected) / abs(expected) if expected else abs(actual)
