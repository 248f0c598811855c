"""Split backward pass: the input gradient first, the weight gradients later (zero bubble).

The previous stage waits only for the input gradient; the weight gradients are needed by the update.
torch.distributed.pipelining implements both passes: the first records the gradients that arrive at
the weights on the way to the input, the second continues from there.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

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
