"""Layer norm and RMS norm over the last dimension."""

from collections.abc import Sequence

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.ops.elementwise import cast, mul, rsqrt, shift_, square
from windlass.capture.analytic.ops.reductions import mean_last
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor

_Saved = Sequence[Tensor]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * w + b` over the last dimension, with or without b."""
    inputs = [each for each in (x, weight, bias) if each is not None]
    node = new_node(tuple(inputs), _layer_norm_backward, inputs)
    out = Tensor(x.tape, x.shape, x.dtype)
    moments = [Tensor(x.tape, (*x.shape[:-1], 1), x.dtype) for _ in range(2)]
    x.tape.call("native_layer_norm", inputs, [out, *moments])
    if node is not None:
        node.save(moments, x.tape)
    return attach(node, out)


def _layer_norm_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    x, *state, mean, rstd = saved
    out = [Tensor(x.tape, like.shape, like.dtype) for like in (x, *state)]
    reads = [only(gradients), x, mean, rstd, *state]
    x.tape.call("native_layer_norm_backward", reads, out)
    return out


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`x / sqrt(avg(x^2) + eps) * w` over the last dimension, in float32."""
    # What is freed when is torch's: the inverse outlives the rest.
    result, _inverse = _rms_norm(cast(x, "float32"), weight)
    return cast(result, x.dtype)


def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    inverse = _inverse_root_mean_square(x)
    return mul(mul(x, inverse), weight), inverse


def _inverse_root_mean_square(x: Tensor) -> Tensor:
    # In C++ a temporary lives until the end of its statement.
    squared = square(x)
    mean = shift_(mean_last(squared))
    return rsqrt(mean)
