"""Reference step: a plain pass over the layer stack with one layer in memory, to check a run.

It shares no code with what runs a plan: no templates, no offloading, no optimizer. Each layer is
initialised from its seed and called as a plain module; torch's autograd runs its backward pass.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.data import TrainingBatches
from windlass.errors import ModelError
from windlass.models import (
    IGNORE_INDEX,
    LayerStack,
    has_sentence_head,
    materialize_layer,
    set_balance_scale,
)
from windlass.runtime.verify.plain_loop.float8 import use_plain_float8
from windlass.schema import Batch, Precision

ReferenceProgress = Callable[[str, int, int | None], None]
"""Called with a label, the number of layers done, and their total."""

_DTYPES: Mapping[Precision, torch.dtype] = {
    "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "float8": torch.bfloat16,
}  # fmt: skip
_FLOAT16_SCALE = 1024.0
"""What the loss is multiplied by in float16, whose smallest normal number is 6e-5."""
_LABEL = "computing the reference step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """Expected results of the first step of a run."""

    loss: float
    """Mean over the targets of the step, in nats per token."""
    gradient_norm: float
    """2-norm over all gradients, before clipping."""
    gradients: Mapping[str, Tensor]
    """Full name -> float32 gradient, for the parameters that the first and last layer own."""


@dataclass(slots=True)
class _Gradients:
    """Gradients by name for the parameters in `wanted`, and the sum of squares of all others."""

    wanted: frozenset[str]
    kept: dict[str, Tensor] = field(default_factory=dict)
    squares: float = 0.0

    def add_layer(self, stack: LayerStack, index: int, sums: Mapping[str, Tensor]) -> None:
        """Adds the gradients of a layer, by parameter name inside the layer."""
        for name, total in sums.items():
            full = f"{stack.names[index]}.{name}"
            self._add(stack.tied_weights.get(full, full), total)

    def _add(self, name: str, gradient: Tensor) -> None:
        """Adds the full gradient of one use of a parameter."""
        if name not in self.wanted:
            self.squares += _square(gradient)
        elif name in self.kept:
            self.kept[name] += gradient
        else:
            self.kept[name] = gradient

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares + sum(map(_square, self.kept.values())))


def reference_step(
    stack: LayerStack,
    batches: TrainingBatches,
    *,
    seed: int,
    precision: Precision,
    batch: Batch,
    z_loss: float | None = None,
    progress: ReferenceProgress | None = None,
) -> ReferenceStep:
    """Loss and gradients of the first step, before any update.

    All micro-batches pass forward through a layer, without autograd, before the next is created.
    The backward pass runs each layer's forward pass again, from inputs that the first one kept.

    Args:
        stack: the model; it must not use dropout.
        precision: precision that layers compute in; gradients are accumulated in float32.
        z_loss: factor of the mean of `log^2 Z`, whose gradient is added; None adds none.

    Raises:
        ModelError: a layer uses dropout, whose mask this pass could not reproduce, or the last one
            has a sentence head.
    """
    if has_sentence_head(stack.layers[-1]):
        raise ModelError(
            f"`{stack.name}` has a sentence head, which no reference step computes; set "
            "`model.sentence_head=false`, or compare it by `windlass check`"
        )
    report = progress or (lambda *_: None)
    count = len(stack.layers)
    micro_batches = [
        batches.samples(1, index * batch.micro, batch.micro) for index in range(batch.accumulation)
    ]
    targets = [torch.as_tensor(target) for _, target in micro_batches]
    inputs: list[list[Tensor]] = [[torch.as_tensor(tokens) for tokens, _ in micro_batches]]
    for index in range(count - 1):
        report(_LABEL, index, 2 * count)
        inputs.append(_forward(_make_layer(stack, index, seed, precision), inputs[-1]))
    gradients = _Gradients(wanted=_wanted_names(stack))
    losses: list[float] = []
    output_gradients: list[Tensor] = []
    loss_scale = _FLOAT16_SCALE if precision == "float16" else 1.0
    total = sum(int((each != IGNORE_INDEX).sum()) for each in targets)
    scale = torch.tensor(loss_scale / total)
    for index in reversed(range(count)):
        report(_LABEL, 2 * count - 1 - index, 2 * count)
        layer = _make_layer(stack, index, seed, precision)
        set_balance_scale(layer, loss_scale / (batch.micro * batch.accumulation))
        sums: dict[str, Tensor] = {}
        input_gradients: list[Tensor] = []
        for micro, x in enumerate(inputs.pop()):
            output = layer(x.requires_grad_() if index else x)
            if index == count - 1:
                output = _loss(output, targets[micro], z_loss)
                losses.append(float(output.detach()))
            gradient = output_gradients[micro] if output_gradients else scale
            input_gradients += _backward(layer, x if index else None, output, gradient, sums)
        output_gradients = input_gradients
        gradients.add_layer(stack, index, {name: sums[name] / loss_scale for name in sums})
        del layer
    report(_LABEL, 2 * count, 2 * count)
    return ReferenceStep(
        loss=math.fsum(losses) / total,
        gradient_norm=gradients.norm,
        gradients=gradients.kept,
    )


def _wanted_names(stack: LayerStack) -> frozenset[str]:
    """Names of the parameters whose gradient is kept: first and last layer, and tied weights."""
    names = {
        f"{stack.names[index]}.{name}"
        for index in (0, len(stack.layers) - 1)
        for name, _ in stack.layers[index].named_parameters()
    }
    tied = stack.tied_weights
    return frozenset({tied.get(name, name) for name in names} | set(tied.values()))


def _make_layer(stack: LayerStack, index: int, seed: int, precision: Precision) -> nn.Module:
    """A layer with its initial weights in the working precision; buffers keep theirs."""
    layer = materialize_layer(stack, index, seed=seed, device="cpu")
    for module in layer.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"layer `{stack.names[index]}` has dropout {module.p:g}, so no reference step can "
                "be compared with it; set `model.dropout=0`"
            )
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(_DTYPES[precision])
    if precision == "float8" and 0 < index < len(stack.layers) - 1:
        use_plain_float8([layer])
    return layer


@torch.no_grad()
def _forward(layer: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    return [layer(x) for x in inputs]


def _loss(logits: Tensor, targets: Tensor, z_loss: float | None) -> Tensor:
    """Sum over all targets that count; `log^2 Z` has a gradient and no value."""
    rows, flat = logits.float().flatten(0, 1), targets.flatten()
    loss = functional.cross_entropy(rows, flat, ignore_index=IGNORE_INDEX, reduction="sum")
    if z_loss is None:
        return loss
    squares = z_loss * rows[flat != IGNORE_INDEX].logsumexp(-1).square().sum()
    return loss + squares - squares.detach()


def _backward(
    layer: nn.Module,
    x: Tensor | None,
    output: Tensor,
    gradient: Tensor,
    sums: dict[str, Tensor],
) -> list[Tensor]:
    """Adds the gradients of a layer's parameters to `sums`.

    Returns:
        The gradient of the input; none if there is no `x`.
    """
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    wanted = [*named.values(), *([] if x is None else [x])]
    if not wanted:
        return []
    gradients = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
    input_gradients = [] if x is None else [gradients.pop()]
    for name, part in zip(named, gradients, strict=True):
        if part is None:
            continue
        if name in sums:
            sums[name] += part
        else:
            sums[name] = part.float()
    return input_gradients


def _square(gradient: Tensor) -> float:
    # By rows, because float32 sums over many millions of elements lose digits.
    rows = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    return float(torch.linalg.vector_norm(rows, dim=1).double().square().sum())
