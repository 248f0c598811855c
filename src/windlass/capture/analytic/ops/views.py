"""Views, which touch no memory, and the copies of those that cannot be views."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import prod

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.strides import Shape, contiguous_strides, view_strides
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor

_Saved = Sequence[Tensor]


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """The same elements in another shape; copied if no strides give it."""
    strides = view_strides(x.shape, x.strides, shape)
    if strides is None:
        x = clone(x)
        strides = contiguous_strides(shape)
    node = new_node((x,), partial(_reshape_backward, x.shape))
    return attach(node, x.alias(shape, strides))


def _reshape_backward(shape: Shape, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [reshape(only(gradients), shape)]


def flatten(x: Tensor, first: int, last: int) -> Tensor:
    """Some dimensions, both ends included, as one."""
    shape = x.shape
    return reshape(x, (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]))


def clone(x: Tensor) -> Tensor:
    """A contiguous copy."""
    node = new_node((x,), _pass)
    copy = Tensor(x.tape, x.shape, x.dtype)
    x.tape.call("clone", [x], [copy])
    return attach(node, copy)


def contiguous(x: Tensor) -> Tensor:
    """The tensor itself, or a copy if it is not contiguous."""
    return x if x.is_contiguous else clone(x)


def _pass(gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [only(gradients)]


def transpose(x: Tensor, one: int, other: int) -> Tensor:
    """Two dimensions swapped."""
    order = list(range(len(x.shape)))
    order[one], order[other] = order[other], order[one]
    node = new_node((x,), partial(_transpose_backward, one, other))
    shape, strides = (tuple(sizes[dim] for dim in order) for sizes in (x.shape, x.strides))
    return attach(node, x.alias(shape, strides))


def _transpose_backward(
    one: int, other: int, gradients: Gradients, _: _Saved, __: Needs
) -> list[Tensor]:
    return [transpose(only(gradients), one, other)]


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A new dimension of size 1 at `dim`, counted from 0."""
    node = new_node((x,), partial(_unsqueeze_backward, dim))
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    step = x.shape[dim] * x.strides[dim] if dim < len(x.shape) else 1
    return attach(node, x.alias(shape, (*x.strides[:dim], step, *x.strides[dim:])))


def _unsqueeze_backward(dim: int, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [squeeze(only(gradients), dim)]


def squeeze(x: Tensor, dim: int) -> Tensor:
    """Without a dimension of size 1."""
    node = new_node((x,), partial(_squeeze_backward, dim))
    strides = (*x.strides[:dim], *x.strides[dim + 1 :])
    return attach(node, x.alias((*x.shape[:dim], *x.shape[dim + 1 :]), strides))


def _squeeze_backward(dim: int, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [unsqueeze(only(gradients), dim)]


def expand(x: Tensor, shape: Shape) -> Tensor:
    """Broadcast to a shape; it is only taken of gradients."""
    missing = len(shape) - len(x.shape)
    old = (*(1,) * missing, *x.shape)
    strides = (*(0,) * missing, *x.strides)
    new = (
        stride if size == wanted else 0
        for size, wanted, stride in zip(old, shape, strides, strict=True)
    )
    return x.alias(shape, tuple(new))


def narrow(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A range of one dimension."""
    node = new_node((x,), partial(_narrow_backward, x.shape))
    return attach(node, _range(x, dim, start, size))


def _range(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return x.alias(shape, x.strides, start * x.strides[dim])


def _narrow_backward(shape: Shape, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [_scattered("slice_backward", only(gradients), shape)]


def _scattered(name: str, gradient: Tensor, shape: Shape) -> Tensor:
    """A gradient among zeros."""
    full = Tensor(gradient.tape, shape, gradient.dtype)
    gradient.tape.call(name, [gradient], [full])
    return full


def select(x: Tensor, dim: int, index: int) -> Tensor:
    """One place of one dimension."""
    node = new_node((x,), partial(_select_backward, x.shape))
    return attach(node, _place(x, dim, index))


def _place(x: Tensor, dim: int, index: int) -> Tensor:
    shape, strides = ((*sizes[:dim], *sizes[dim + 1 :]) for sizes in (x.shape, x.strides))
    return x.alias(shape, strides, index * x.strides[dim])


def _select_backward(shape: Shape, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [_scattered("select_backward", only(gradients), shape)]


def split(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Consecutive ranges of one dimension."""
    starts = accumulate(sizes, initial=0)
    shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
    node = new_node((x,), partial(_split_backward, shapes, dim))
    parts = [_range(x, dim, start, size) for start, size in zip(starts, sizes, strict=False)]
    attach(node, *parts)
    return parts


def _split_backward(
    shapes: Sequence[Shape], dim: int, gradients: Gradients, _: _Saved, __: Needs
) -> list[Tensor]:
    if any(gradient is None for gradient in gradients):
        raise NotImplementedError(f"a part of {shapes} is not used")
    return [cat([each for each in gradients if each is not None], dim)]


def cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors one after another along a dimension."""
    first = tensors[0]
    sizes = [tensor.shape[dim] for tensor in tensors]
    node = new_node(tensors, partial(_cat_backward, sizes, dim))
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    joined = Tensor(first.tape, shape, first.dtype)
    first.tape.call("cat", tensors, [joined])
    return attach(node, joined)


def _cat_backward(
    sizes: Sequence[int], dim: int, gradients: Gradients, _: _Saved, __: Needs
) -> list[Tensor]:
    gradient = only(gradients)
    starts = accumulate(sizes, initial=0)
    return [_range(gradient, dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def unbind(x: Tensor, dim: int) -> list[Tensor]:
    """All places of one dimension."""
    node = new_node((x,), partial(_unbind_backward, dim))
    parts = [_place(x, dim, index) for index in range(x.shape[dim])]
    attach(node, *parts)
    return parts


def _unbind_backward(dim: int, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [stack([each for each in gradients if each is not None], dim)]


def stack(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors side by side in a new dimension."""
    first = tensors[0]
    node = new_node(tensors, partial(_stack_backward, dim))
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    joined = Tensor(first.tape, shape, first.dtype)
    first.tape.call("stack", tensors, [joined])
    return attach(node, joined)


def _stack_backward(dim: int, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    gradient = only(gradients)
    return [_place(gradient, dim, index) for index in range(gradient.shape[dim])]
