"""The reference: a plain walk over the chain with one layer in memory, to hold a run against.

Nothing of what runs a plan has a part in it: no templates, no streams, no optimizer. Each layer is
made from its seed and called as the module that it is; torch's own autograd takes its backward.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.data.batches import Batches
from windlass.errors import ModelError
from windlass.models.layer_stack import LayerStack, materialize_layer
from windlass.schema.graph import Precision
from windlass.schema.plan import Batch

ReferenceProgress = Callable[[str, int, int | None], None]
"""Told a label, how many layers are done, and of how many."""

_DTYPES: Mapping[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LABEL = "walking the reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """What the first step of a run should find."""

    loss: float
    """Mean over the micro-batches, in nats a token."""
    gradient_norm: float
    """2-norm over all gradients."""
    gradients: Mapping[str, Tensor]
    """Full name -> float32 gradient, of what the first and the last layer own."""


@dataclass(slots=True)
class _Gradients:
    """Gradients of the walk: those that are asked for, and the squares of all others."""

    wanted: frozenset[str]
    kept: dict[str, Tensor] = field(default_factory=dict)
    squares: float = 0.0

    def add(self, name: str, gradient: Tensor) -> None:
        """Takes the whole gradient of one use of a parameter."""
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
    batches: Batches,
    *,
    seed: int,
    precision: Precision,
    batch: Batch,
    progress: ReferenceProgress | None = None,
) -> ReferenceStep:
    """Loss and gradients of the first step, before any update.

    Forward without gradients, layer by layer, all micro-batches through one before the next is
    made; then each layer again, last first, with its backward. The inputs of all layers are kept.

    Args:
        chain: the model; draws nothing.
        batches: gives the first step's tokens.
        seed: of the initial weights.
        precision: what layers compute in; gradients are summed in float32.
        batch: micro-batches of one step.
        progress: told how far it is.

    Raises:
        ModelError: a layer drops something, which no other walk could draw the same.
    """
    tell = progress or (lambda *_: None)
    count = len(stack.layers)
    micros = [batches.samples(1, at * batch.micro, batch.micro) for at in range(batch.accumulation)]
    values = [torch.as_tensor(tokens) for tokens, _ in micros]
    targets = [torch.as_tensor(target) for _, target in micros]
    inputs: list[list[Tensor]] = [values]
    for index in range(count - 1):
        tell(_LABEL, index, 2 * count)
        layer = _layer(stack, index, seed, precision)
        with torch.no_grad():
            inputs.append([layer(x) for x in inputs[-1]])
        del layer
    gradients = _Gradients(wanted=_wanted(stack))
    losses: list[float] = []
    arriving: list[Tensor] = []
    for index in reversed(range(count)):
        tell(_LABEL, 2 * count - 1 - index, 2 * count)
        layer = _layer(stack, index, seed, precision)
        sums: dict[str, Tensor] = {}
        leaving: list[Tensor] = []
        for micro, x in enumerate(inputs.pop()):
            output = layer(x.requires_grad_() if index else x)
            if index == count - 1:
                output = _loss(output, targets[micro])
                losses.append(float(output.detach()))
            gradient = arriving[micro] if arriving else torch.tensor(1 / batch.accumulation)
            passed = _backward(layer, x if index else None, output, gradient, sums)
            leaving += [] if passed is None else [passed]
        arriving = leaving
        for name, total in sums.items():
            full = f"{stack.names[index]}.{name}"
            gradients.add(stack.tied_weights.get(full, full), total)
        del layer
    tell(_LABEL, 2 * count, 2 * count)
    return ReferenceStep(
        loss=math.fsum(losses) / len(losses),
        gradient_norm=gradients.norm,
        gradients=gradients.kept,
    )


def _wanted(chain: LayerStack) -> frozenset[str]:
    """Parameters whose gradient is kept: of the two ends, and wherever several uses add up."""
    names = {
        f"{chain.names[index]}.{name}"
        for index in (0, len(chain.layers) - 1)
        for name, _ in chain.layers[index].named_parameters()
    }
    return frozenset({chain.tied_weights.get(name, name) for name in names} | set(chain.tied_weights.values()))


def _layer(chain: LayerStack, index: int, seed: int, precision: Precision) -> nn.Module:
    """A layer with its initial weights in the working precision; buffers stay as they are."""
    layer = materialize_layer(chain, index, seed=seed, device="cpu")
    for module in layer.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"layer `{chain.names[index]}` drops {module.p:g} of its values, so no reference "
                "can be held against it; set `model.dropout=0`"
            )
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(_DTYPES[precision])
    return layer


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _backward(
    layer: nn.Module,
    x: Tensor | None,
    output: Tensor,
    gradient: Tensor,
    sums: dict[str, Tensor],
) -> Tensor | None:
    """Adds the gradients of a layer's parameters to `sums`; gives that of its input."""
    named = dict(layer.named_parameters())
    wanted = [*named.values(), *([] if x is None else [x])]
    found = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
    passed = None if x is None else found.pop()
    for name, part in zip(named, found, strict=True):
        if part is None:
            continue
        if name in sums:
            sums[name] += part
        else:
            sums[name] = part.float()
    return passed


def _square(gradient: Tensor) -> float:
    # By rows, as float32 sums over many millions in one piece lose digits.
    rows = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    return float(torch.linalg.vector_norm(rows, dim=1).double().square().sum())
