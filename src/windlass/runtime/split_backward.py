"""Parted backward passes: first what the stage before waits for, later what the update needs.

torch.distributed.pipelining has the machinery: the first part notes the gradients that arrive where
weights hang on the way to the input, the second goes on from there.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

Inner = list[dict[str, Any]]
"""What the first part leaves for the second: torch's own, so `Any`."""


def input_gradient(
    x: Tensor, output: Tensor, gradient: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor | None, Inner]:
    """The gradient of a layer's input, and what the weights' part needs.

    Args:
        x: the layer's input, a leaf.
        output: of its forward pass; ends as a plain tensor.
        gradient: of the output.
        weights: leaves.
    """
    (found,), inner = stage_backward_input([output], [gradient], [x], _leaves(weights))
    x.grad = None
    return found, inner


def weight_gradients(weights: Sequence[Tensor], inner: Inner) -> list[Tensor | None]:
    """The gradients of a layer's weights, from what the input's part left."""
    stage_backward_weight(_leaves(weights), inner)
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


def _leaves(weights: Sequence[Tensor]) -> Iterator[nn.Parameter]:
    """As torch wants them typed; any leaf does."""
    return cast("Iterator[nn.Parameter]", iter(weights))
