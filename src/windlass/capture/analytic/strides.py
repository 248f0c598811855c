"""Strides of tensors and their views, as PyTorch gives them."""

from collections.abc import Sequence
from functools import lru_cache

Shape = tuple[int, ...]


@lru_cache(maxsize=1024)
def contiguous_strides(shape: Shape) -> Shape:
    """Strides of a tensor whose last dimension is innermost."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def permuted_strides(shape: Shape, order: Sequence[int]) -> Shape:
    """Strides of a dense tensor with its dimensions in memory in an order, outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def dense_strides(shape: Shape, strides: Shape) -> Shape:
    """Strides of a dense tensor whose dimensions follow each other as in another tensor."""
    return permuted_strides(shape, sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def elementwise_strides(shape: Shape, operands: Sequence[tuple[Shape, Shape]]) -> Shape:
    """Strides of a new tensor that an element-wise operation writes.

    Its dimensions follow each other in memory as those of the first operand that tells.
    Source: `TensorIteratorBase::reorder_dimensions` in ATen/TensorIterator.cpp.

    Args:
        operands: shape and strides of each operand; shorter ones broadcast.
    """
    plain = contiguous_strides(shape)
    first_shape, first_strides = operands[0]
    if first_shape == shape and first_strides == plain:
        return plain
    strides = [_broadcast_strides(shape, *operand) for operand in operands]
    order = list(reversed(range(len(shape))))
    for position in range(1, len(order)):
        moved = position
        for place in reversed(range(position)):
            compared = _compared(order[place], order[moved], shape, strides)
            if compared < 0:
                break
            if compared > 0:
                order[place], order[moved] = order[moved], order[place]
                moved = place
    return permuted_strides(shape, order[::-1])


def _broadcast_strides(shape: Shape, operand: Shape, strides: Shape) -> Shape:
    missing = len(shape) - len(operand)
    own = (
        0 if size == 1 and wanted != 1 else stride
        for size, wanted, stride in zip(operand, shape[missing:], strides, strict=True)
    )
    return (*(0,) * missing, *own)


def _compared(inner: int, outer: int, shape: Shape, strides: Sequence[Shape]) -> int:
    """1 if two dimensions change places in memory, -1 if they stay, 0 if no operand tells."""
    for own in strides:
        if not (own[inner] and own[outer]):
            continue
        if own[inner] != own[outer]:
            return 1 if own[inner] > own[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def view_strides(old: Shape, strides: Shape, shape: Shape) -> Shape | None:
    """Strides of a view of another shape; None if the elements must be copied.

    Source: `computeStride_impl` in ATen/TensorUtils.cpp.
    """
    new: list[int] = [0] * len(shape)
    place, step = len(shape) - 1, strides[-1] if strides else 1
    size = view_size = 1
    for dim in range(len(old) - 1, -1, -1):
        size *= old[dim]
        if dim and (old[dim - 1] == 1 or strides[dim - 1] == size * step):
            continue
        while place >= 0 and (view_size < size or shape[place] == 1):
            new[place] = view_size * step
            view_size *= shape[place]
            place -= 1
        if view_size != size:
            return None
        if dim:
            step, size, view_size = strides[dim - 1], 1, 1
    return tuple(new) if place == -1 else None
