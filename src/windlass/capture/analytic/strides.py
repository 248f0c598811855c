"""Strides of tensors and their views, as PyTorch gives them."""

from collections.abc import Sequence

Shape = tuple[int, ...]


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
