"""StepState: the tensors that one rank holds between the instructions of a step; its loss scale.

The previous stage waits only for the input gradient; the weight gradients are needed by the update.
torch.distributed.pipelining implements both passes: the first records the gradients that arrive at
the weights on the way to the input, the second continues from there.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from windlass.document import Document

DeferredWeightGrad = list[dict[str, Any]]
"""What the input-gradient pass leaves for the weight-gradient pass; `Any`, as torch defines it."""


def backward_input(
    x: Tensor, output: Tensor, gradient: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor | None, DeferredWeightGrad]:
    """The gradient of a layer's input, and what `backward_weight` needs.

    Args:
        x: input of the layer; a leaf of the autograd graph.
        output: output of the layer's forward pass; detached from its graph afterwards.
        weights: weights of the layer; leaves of the autograd graph.
    """
    # Its import takes a second, and few runs split their backward passes.
    from torch.distributed.pipelining._backward import stage_backward_input

    (input_gradient,), deferred = stage_backward_input([output], [gradient], [x], _leaves(weights))
    x.grad = None
    return input_gradient, deferred


def backward_weight(weights: Sequence[Tensor], deferred: DeferredWeightGrad) -> list[Tensor | None]:
    """The gradients of a layer's weights, from what `backward_input` left."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(_leaves(weights), deferred)
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return gradients


def _leaves(weights: Sequence[Tensor]) -> Iterator[nn.Parameter]:
    """The weights with the type that torch declares; any leaf tensor works."""
    return cast("Iterator[nn.Parameter]", iter(weights))


_Key = tuple[int, int]
"""Layer and micro-batch."""

_FIRST_SCALE = 2.0**16
_CLEAN_STEPS = 2000
"""Steps without an overflow after which an adaptive scale doubles."""


class LossScale(Document):
    """What a float16 run multiplies its losses by, so that small gradients do not round to 0.

    An adaptive scale halves where a gradient overflows and doubles after 2,000 steps without one.
    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the numbers are those of
    `torch.amp.GradScaler`.
    """

    scale: float = _FIRST_SCALE
    clean_steps: int = 0
    """Steps since the last overflow or doubling."""
    is_fixed: bool = False
    """Whether a request has set it."""

    @classmethod
    def of(cls, asked: float | None) -> Self:
        """The scale of a new run: the asked one for all steps, or an adaptive one."""
        return cls() if asked is None else cls(scale=asked, is_fixed=True)

    def resumed(self, saved: Self) -> Self:
        """The scale of a run that goes on: the saved one, unless the request fixes another."""
        return self if self.is_fixed or saved.is_fixed else saved

    def after_step(self, *, overflowed: bool) -> Self:
        """The scale of the step that follows one whose gradients overflowed, or did not."""
        if self.is_fixed:
            return self
        if overflowed:
            return self.model_copy(update={"scale": self.scale / 2, "clean_steps": 0})
        if self.clean_steps + 1 < _CLEAN_STEPS:
            return self.model_copy(update={"clean_steps": self.clean_steps + 1})
        return self.model_copy(update={"scale": 2 * self.scale, "clean_steps": 0})


@dataclass(slots=True)
class StepState:
    """Activations, gradients and losses of one step on one rank."""

    tokens: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Inputs and targets, by micro-batch."""
    outputs: dict[_Key, Tensor] = field(default_factory=dict)
    """Layer outputs, which the next layer takes as input."""
    autograd_graphs: dict[_Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output of a layer, connected by the autograd graph."""
    gradients: dict[_Key, Tensor] = field(default_factory=dict)
    """Gradients of layer outputs, as the next layer's backward pass leaves them."""
    deferred_weight_grads: dict[_Key, DeferredWeightGrad] = field(default_factory=dict)
    """Results of the input-gradient pass that the weight-gradient pass still needs."""
    block_scores: dict[int, list[Tensor]] = field(default_factory=dict)
    """Sums of scores of absent blocks over micro-batches, by layer; one for each sparse module."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses, by micro-batch."""
    norms: list[Tensor] = field(default_factory=list)
    """2-norm of each layer's gradients, taken with its update where a step does not clip."""
    measured: Tensor | None = None
    """`totals` of a step that clips, before its updates."""

    def totals(self, norms: Sequence[Tensor], weights: Tensor) -> Tensor:
        """`Float[3]`: sums of squared norms and weighted losses, and 1 for finite losses, else 0.

        Args:
            norms: 2-norms of gradients, `Float[]` each.
            weights: weight of each loss, `Float[micro_batch]`, or of each of its parts,
                `[micro_batch part]`, on the device that computes and in the precision of the sums.
        """
        dtype, device = weights.dtype, weights.device
        losses = stacked([self.losses[micro] for micro in sorted(self.losses)], dtype, device)
        square = stacked(norms, dtype, device).square().sum()
        loss = torch.dot(losses.flatten(), weights.flatten()) if self.losses else losses.sum()
        return torch.stack((square, loss, losses.isfinite().all().to(dtype)))

    def add_scores(self, layer: int, scores: Sequence[Tensor | None]) -> None:
        """Adds a micro-batch's scores of absent blocks of a layer.

        Args:
            scores: one tensor for each sparse module, in order.

        Raises:
            ValueError: a sparse module did not compute as a module of its own.
        """
        new = [score for score in scores if score is not None]
        if len(new) < len(scores):
            raise ValueError(f"{len(scores) - len(new)} sparse modules of layer {layer} ran unseen")
        sums = self.block_scores.setdefault(layer, new)
        for total, score in zip(sums, new, strict=True) if sums is not new else ():
            total.add_(score)


def stacked(numbers: Collection[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`Float[n ...]`: n numbers, or as many tensors, on a device, which may be none."""
    if not numbers:
        return torch.zeros(0, dtype=dtype, device=device)
    return torch.stack([number.detach().to(dtype) for number in numbers])
