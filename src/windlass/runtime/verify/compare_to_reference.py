"""A run's first step against the reference, by what the step left in its checkpoint.

After one step of Adam from moments of zero the first moment is `(1 - beta1) g / divisor`, so the
gradient `g` can be had back from it, whichever way the step was run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.models.layer_stack import LayerStack
from windlass.runtime.checkpoint.checkpoint import layer_file
from windlass.runtime.checkpoint.convert_moments import read_moments
from windlass.runtime.checkpoint.safetensors_io import read_tensors
from windlass.runtime.verify.reference_model import ReferenceStep
from windlass.schema.graph import Precision
from windlass.schema.largest_model import ReferenceCheck, ReferenceComparison
from windlass.schema.plan import MomentFormat
from windlass.schema.request import TrainRequest
from windlass.schema.run_record import Step
from windlass.torch_ext.quantized_moments import MomentCodec

TOLERANCE: Mapping[Precision, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Of gradients. Sums in another order leave some 1e-6 in float32; in bfloat16, whose numbers have
8 bits, they leave 2^-9 a layer, which walks through all of them."""

MOMENT_TOLERANCE: Mapping[MomentFormat, float] = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.032}
"""What the format of the moments adds. bfloat16: half a unit of its 8 bits. int8: the root of each
element, over that of the largest in its block of n = 256, is off by half of 1/127; so an element m
is off by `sqrt(m s) / 127`, and a block by at most `n^(1/4) / 127 = 0.0315` of its norm."""

_LOSS_TOLERANCE: Mapping[Precision, float] = {"float32": 1e-5, "bfloat16": 1e-2}


def compare_to_reference(
    reference: ReferenceStep,
    checkpoint: Path,
    stack: LayerStack,
    step: Step,
    settings: TrainRequest,
    *,
    precision: Precision,
    moments: MomentFormat = "float32",
) -> ReferenceComparison:
    """Holds the first step of a run against the reference.

    Args:
        reference: of the same model, seed and batch.
        checkpoint: folder of the one that was saved after the first step.
        chain: the model.
        step: the first one, as it was measured.
        settings: of the optimizer.
        precision: that layers computed in.
        moments: the format that the checkpoint keeps them in.

    Raises:
        CheckpointError: it is of another model, or its weights had not one update.
    """
    beta1, _ = settings.betas
    norm = step.gradient_norm
    divisor = 1.0 if settings.clip is None else max(1.0, (norm + 1e-6) / settings.clip)
    tolerance = TOLERANCE[precision] + MOMENT_TOLERANCE[moments]
    agreements = [
        ReferenceCheck(
            name="loss",
            error=_apart(step.loss, reference.loss),
            tolerance=_LOSS_TOLERANCE[precision],
        ),
        ReferenceCheck(
            name="gradient norm",
            error=_apart(norm, reference.gradient_norm),
            tolerance=TOLERANCE[precision],
        ),
    ]
    ends = dict.fromkeys((0, len(stack.layers) - 1))
    for index in ends:
        names = [name for name in reference.gradients if _owned(stack, index, name)]
        if names:
            file = checkpoint / layer_file(index)
            found = (
                (divisor / (1 - beta1) * moment, reference.gradients[name])
                for name, moment in _moments(file, names, reference.gradients)
            )
            agreements.append(
                ReferenceCheck(
                    name=f"gradient of layer {index}, `{stack.names[index]}`",
                    error=_error(found),
                    tolerance=tolerance,
                )
            )
    return ReferenceComparison(
        loss=step.loss,
        reference_loss=reference.loss,
        gradient_norm=norm,
        reference_norm=reference.gradient_norm,
        comparisons=tuple(agreements),
    )


def _owned(chain: LayerStack, index: int, name: str) -> bool:
    return name.startswith(f"{chain.names[index]}.")


def _moments(
    file: Path, names: Sequence[str], like: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The first moments of weights after one update, in float32, one after the other."""
    codec = MomentCodec(torch.device("cpu"))
    for name in names:
        steps = torch.empty(())
        read_tensors(file, {f"steps/{name}": steps})
        if steps != 1:
            raise CheckpointError(
                f"`{file}` has `{name}` after {int(steps)} updates; its gradient can be had back "
                "only after the first one"
            )
        shape = tuple(like[name].shape)
        moment, _ = read_moments(file, name, shape, "float32", codec, seed=0, step=1)
        yield name, moment.values


def _error(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Relative 2-norm of the difference over all tensors of a layer together."""
    apart = whole = 0.0
    for found, wanted in pairs:
        apart += float((found - wanted).double().square().sum())
        whole += float(wanted.double().square().sum())
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other) if other else abs(one)
