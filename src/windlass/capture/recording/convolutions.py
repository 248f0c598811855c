"""A convolution as matrix products: each output is a product of a window and a filter."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten


class ConvolutionProduct(NamedTuple):
    """One of the matrix products of a convolution or of its backward pass."""

    name: str
    sizes: tuple[int, int, int, int]
    """Batch, m, n, k, of which the batch is that of groups."""


def convolution_products(
    call: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]
) -> tuple[ConvolutionProduct, ...]:
    """The products of a convolution, as many FLOP as `torch.utils.flop_counter` counts.

    Forward is one, of all windows with all filters. Backward is one for the gradient of the input,
    if that is asked for, and one for that of the filters.

    Returns:
        Nothing for any other call.
    """
    packet = call.overloadpacket
    if packet is _aten.convolution:
        weight, groups, is_transposed = args[1], args[8], args[6]
        windows = args[0] if is_transposed else outputs[0]
        return (ConvolutionProduct("convolution", _sizes(windows, weight, groups)),)
    if packet is _aten.convolution_backward:
        return tuple(_backward_products(args))
    return ()


def _backward_products(args: Sequence[Any]) -> Iterator[ConvolutionProduct]:
    gradient, x, weight, is_transposed, groups, wanted = *args[:3], *(args[i] for i in (7, 9, 10))
    batch, m, n, k = _sizes(x if is_transposed else gradient, weight, groups)
    if wanted[0]:
        yield ConvolutionProduct("convolution_input_grad", (batch, m, k, n))
    if wanted[1]:
        yield ConvolutionProduct("convolution_weight_grad", (batch, n, k, m))


def _sizes(windows: Tensor, weight: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Groups; windows; filters of a group; numbers in a filter.

    Args:
        windows: has one element for each window and filter, `[b filters ...]`; of a transposed
            convolution its input.
        weight: `[filters numbers ...]`.
        groups: parts of the channels that do not mix.
    """
    count = windows.shape[0] * prod(windows.shape[2:])
    return groups, count, weight.shape[0] // groups, prod(weight.shape[1:])
