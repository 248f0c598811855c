"""Sums, means and variances."""

from collections.abc import Sequence
from functools import partial

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.ops.elementwise import add, divide, mul, scale, sub
from windlass.capture.analytic.ops.views import expand, reshape, unsqueeze
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import DataType, Gradients, Needs, Tensor

_Saved = Sequence[Tensor]


def _reduced(
    name: str, x: Tensor, dims: Sequence[int], *, keepdim: bool, dtype: DataType | None = None
) -> Tensor:
    """The result of a call that reduces some dimensions."""
    sizes = ((1 if dim in dims else size) for dim, size in enumerate(x.shape))
    shape = tuple(size for dim, size in enumerate(sizes) if keepdim or dim not in dims)
    out = Tensor(x.tape, shape, dtype or x.dtype)
    x.tape.call(name, [x], [out])
    return out


def sum_last(x: Tensor) -> Tensor:
    """The sum over the last dimension."""
    node = new_node((x,), partial(_sum_backward, x.shape, True))
    return attach(node, _reduced("sum", x, [len(x.shape) - 1], keepdim=False))


def sum_all(x: Tensor) -> Tensor:
    """The sum of all elements; truths are counted in int64."""
    node = new_node((x,), partial(_sum_backward, x.shape, False))
    dtype: DataType = "int64" if x.dtype == "bool" else x.dtype
    return attach(node, _reduced("sum", x, range(len(x.shape)), keepdim=False, dtype=dtype))


def _sum_backward(
    shape: Shape, last: bool, gradients: Gradients, _: _Saved, __: Needs
) -> list[Tensor]:
    gradient = only(gradients)
    return [expand(unsqueeze(gradient, len(shape) - 1) if last else gradient, shape)]


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """The sum over all dimensions in which a tensor of some shape was broadcast to this one."""
    if x.shape == shape:
        return x
    leading = len(x.shape) - len(shape)
    dims = [*range(leading)]
    dims += [
        leading + dim for dim, size in enumerate(shape) if size == 1 and x.shape[leading + dim] != 1
    ]
    total = _reduced("sum", x, dims, keepdim=True)
    return reshape(total, shape)


def mean_last(x: Tensor) -> Tensor:
    """The mean over the last dimension, which keeps size 1."""
    node = new_node((x,), partial(_mean_backward, x.shape))
    return attach(node, _reduced("mean", x, [len(x.shape) - 1], keepdim=True))


def _mean_backward(shape: Shape, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [divide(expand(only(gradients), shape))]


def amax_last(x: Tensor) -> Tensor:
    """The largest element of the last dimension, without a derivative."""
    return _reduced("amax", x, [len(x.shape) - 1], keepdim=False)


def var_mean_last(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean over the last dimension."""
    node = new_node((x,), _var_mean_backward, [x])
    var, mean = (Tensor(x.tape, x.shape[:-1], x.dtype) for _ in range(2))
    x.tape.call("var_mean", [x], [var, mean])
    attach(node, var, mean)
    return var, mean


def _var_mean_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    """Source: `var_mean_backward` in torch's FunctionsManual.cpp."""
    (x,), (by_var, by_mean) = saved, gradients
    if by_var is None or by_mean is None:
        raise RuntimeError("variance and mean are both used")
    first = _var_backward(x, by_var)
    second = divide(expand(unsqueeze(by_mean, len(x.shape) - 1), x.shape))
    return [add(first, second)]


def _var_backward(x: Tensor, gradient: Tensor) -> Tensor:
    last = len(x.shape) - 1
    mean = _reduced("mean", x, [last], keepdim=True)
    centered = sub(x, mean)
    factor = scale(unsqueeze(gradient, last))
    return mul(factor, centered)
