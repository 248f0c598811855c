"""Element-wise operations, with the derivatives of torch's `derivatives.yaml`.

A formula's temporaries live until its end, as in C++, so they have names here.
"""

from collections.abc import Callable, Sequence
from functools import partial

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.strides import Shape, elementwise_strides
from windlass.capture.analytic.tensor import DataType, Gradients, Needs, Tape, Tensor

_Saved = Sequence[Tensor]


def _emit(name: str, *operands: Tensor, dtype: DataType | None = None) -> Tensor:
    """The result of a call on all operands, which broadcast."""
    shape, wide = operands[0].shape, operands[0].dtype
    for operand in operands[1:]:
        shape = _broadcast(shape, operand.shape)
        if operand.dtype == "float32" and operand.shape:
            wide = "float32"
    strides = elementwise_strides(shape, [(one.shape, one.strides) for one in operands])
    out = Tensor(operands[0].tape, shape, dtype or wide, strides)
    out.tape.call(name, operands, [out])
    return out


def _broadcast(one: Shape, other: Shape) -> Shape:
    if one == other:
        return one
    length = max(len(one), len(other))
    pairs = (((1,) * (length - len(shape)) + shape) for shape in (one, other))
    return tuple(a if b == 1 else b for a, b in zip(*pairs, strict=True))


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`."""
    node = new_node((x, y), _add_backward)
    return attach(node, _emit("add", x, y))


def _add_backward(gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor | None]:
    gradient = only(gradients)
    return [gradient, gradient]


def sub(x: Tensor, y: Tensor) -> Tensor:
    """`x - y`."""
    node = new_node((x, y), _sub_backward)
    return attach(node, _emit("sub", x, y))


def _sub_backward(gradients: Gradients, _: _Saved, needs: Needs) -> list[Tensor | None]:
    gradient = only(gradients)
    return [gradient, neg(gradient) if needs[1] else None]


def mul(x: Tensor, y: Tensor) -> Tensor:
    """`x * y`."""
    save = [*([x] if y.node else ()), *([y] if x.node else ())]
    node = new_node((x, y), _mul_backward, save)
    return attach(node, _emit("mul", x, y))


def _mul_backward(gradients: Gradients, saved: _Saved, needs: Needs) -> list[Tensor | None]:
    gradient = only(gradients)
    by_second = mul(gradient, saved[0]) if needs[1] else None
    by_first = mul(gradient, saved[-1]) if needs[0] else None
    return [by_first, by_second]


def div(x: Tensor, y: Tensor) -> Tensor:
    """`x / y`, of which `y` needs no gradient."""
    node = new_node((x,), _div_backward, [y])
    return attach(node, _emit("div", x, y))


def _div_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor | None]:
    return [_emit("div", only(gradients), saved[0])]


def scale(x: Tensor) -> Tensor:
    """`x` times a number."""
    node = new_node((x,), partial(_linear_backward, "mul"))
    return attach(node, _emit("mul", x))


def divide(x: Tensor) -> Tensor:
    """`x` divided by a number."""
    node = new_node((x,), partial(_linear_backward, "div"))
    return attach(node, _emit("div", x))


def neg(x: Tensor) -> Tensor:
    """`-x`."""
    node = new_node((x,), partial(_linear_backward, "neg"))
    return attach(node, _emit("neg", x))


def _linear_backward(name: str, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [_emit(name, only(gradients))]


def shift(x: Tensor) -> Tensor:
    """`x` plus a number."""
    node = new_node((x,), _pass_backward)
    return attach(node, _emit("add", x))


def shift_(x: Tensor) -> Tensor:
    """`x` plus a number, in place."""
    node = new_node((x,), _pass_backward)
    x.tape.call("add_", [x], [x])
    return attach(node, x)


def _pass_backward(gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [only(gradients)]


def square(x: Tensor) -> Tensor:
    """`x^2`."""
    node = new_node((x,), _square_backward, [x])
    return attach(node, _emit("pow", x))


def _square_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    power = _emit("pow", saved[0])
    factor = _emit("mul", power)
    return [_emit("mul", only(gradients), factor)]


def rsqrt(x: Tensor) -> Tensor:
    """`1 / sqrt(x)`."""
    return _by_result("rsqrt", x, _rsqrt_backward)


def _rsqrt_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    power = _emit("pow", saved[0])
    factor = _emit("mul", only(gradients))
    return [_emit("mul", factor, power)]


def exp(x: Tensor) -> Tensor:
    """`e^x`."""
    return _by_result("exp", x, _exp_backward)


def _exp_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    return [_emit("mul", only(gradients), saved[0])]


def _by_result(name: str, x: Tensor, backward: Callable[..., Sequence[Tensor]]) -> Tensor:
    """An operation whose derivative is a function of its result."""
    node = new_node((x,), backward)
    out = _emit(name, x)
    if node is not None:
        node.save([out], x.tape)
    return attach(node, out)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return _by_result("tanh", x, _tanh_backward)


def _tanh_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    return [_emit("tanh_backward", only(gradients), saved[0])]


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function."""
    return _by_result("sigmoid", x, _sigmoid_backward)


def _sigmoid_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    return [_emit("sigmoid_backward", only(gradients), saved[0])]


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    node = new_node((x,), _div_backward, [x])
    return attach(node, _emit("log", x))


def gelu(x: Tensor) -> Tensor:
    """GELU, exact or by tanh."""
    node = new_node((x,), partial(_activation_backward, "gelu_backward"), [x])
    return attach(node, _emit("gelu", x))


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    node = new_node((x,), partial(_activation_backward, "silu_backward"), [x])
    return attach(node, _emit("silu", x))


def _activation_backward(name: str, gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    return [_emit(name, only(gradients), saved[0])]


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with a number wherever the mask is set."""
    node = new_node((x,), _masked_fill_backward, [mask])
    return attach(node, _emit("masked_fill", x, mask))


def _masked_fill_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    return [_emit("masked_fill", only(gradients), saved[0])]


def cast(x: Tensor, dtype: DataType) -> Tensor:
    """`x` in another data type; itself if it has that."""
    if x.dtype == dtype:
        return x
    node = new_node((x,), partial(_cast_backward, x.dtype))
    return attach(node, _emit("_to_copy", x, dtype=dtype))


def _cast_backward(dtype: DataType, gradients: Gradients, _: _Saved, __: Needs) -> list[Tensor]:
    return [cast(only(gradients), dtype)]


def dropout(x: Tensor, probability: float) -> Tensor:
    """`x` with values dropped, in training."""
    if probability == 0:
        return x
    noise = Tensor(x.tape, x.shape, x.dtype)
    _ = noise.buffer
    x.tape.call("bernoulli_", [noise], [noise], random=True)
    x.tape.call("div_", [noise], [noise])
    return mul(x, noise)


# Without derivatives.


def compare(name: str, x: Tensor) -> Tensor:
    """Whether each element compares with a number."""
    return _emit(name, x, dtype="bool")


def bitwise_or(x: Tensor, y: Tensor) -> Tensor:
    """Whether one of both is set."""
    return _emit("bitwise_or", x, y)


def bitwise_not(x: Tensor) -> Tensor:
    """Whether it is not set."""
    return _emit("bitwise_not", x)


def unary(name: str, x: Tensor) -> Tensor:
    """A function of each element that is never differentiated."""
    return _emit(name, x)


def arange(tape: Tape, size: int) -> Tensor:
    """Consecutive numbers in float32."""
    out = Tensor(tape, (size,), "float32")
    tape.call("arange", [], [out])
    return out
