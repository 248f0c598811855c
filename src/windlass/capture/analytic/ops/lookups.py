"""Elements that an index picks: rows of a table, or of the last dimension."""

from collections.abc import Sequence
from functools import partial

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor

_Saved = Sequence[Tensor]


def embedding(table: Tensor, index: Tensor) -> Tensor:
    """The rows of a table that an index picks."""
    node = new_node((table,), partial(_embedding_backward, table.shape), [index])
    out = Tensor(table.tape, (*index.shape, table.shape[1]), table.dtype)
    table.tape.call("embedding", [(table, out.touched_bytes), index], [out])
    return attach(node, out)


def _embedding_backward(
    shape: Shape, gradients: Gradients, saved: _Saved, _: Needs
) -> list[Tensor]:
    gradient = only(gradients)
    table = Tensor(gradient.tape, shape, gradient.dtype)
    gradient.tape.call("embedding_dense_backward", [gradient, saved[0]], [table])
    return [table]


def gather_last(x: Tensor, index: Tensor) -> Tensor:
    """The elements of the last dimension that an index picks."""
    node = new_node((x,), _gather_backward, [x, index])
    out = Tensor(x.tape, index.shape, x.dtype)
    x.tape.call("gather", [(x, out.touched_bytes), index], [out])
    return attach(node, out)


def _gather_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    (x, index), gradient = saved, only(gradients)
    full = Tensor(gradient.tape, x.shape, gradient.dtype)
    gradient.tape.call("new_zeros", [gradient], [full])
    gradient.tape.call("scatter_add", [full, index, gradient], [full])
    return [full]
