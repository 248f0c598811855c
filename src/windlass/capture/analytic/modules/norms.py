"""The norm that a configuration asks for, of a rank's features or of all."""

from collections.abc import Sequence

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.ops.collectives import Rank, all_reduce
from windlass.capture.analytic.ops.elementwise import (
    add,
    cast,
    divide,
    mul,
    rsqrt,
    shift,
    shift_,
    square,
    sub,
)
from windlass.capture.analytic.ops.reductions import mean_last, var_mean_last
from windlass.capture.analytic.ops.views import stack, unbind, unsqueeze
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor


class Norm:
    """The normalisation over d that the configuration asks for.

    Args:
        full: whether each rank has all features, as in the first layer.
    """

    def __init__(self, scope: Scope, *, full: bool = False) -> None:
        make = scope.parameter if full else scope.feature_parameter
        self.rank = Rank() if full else scope.rank
        if not full:
            scope.feature_paths.append(scope.path)
        width = (scope.config.width,)
        self.weight = make("weight", width)
        self.is_layer_norm = scope.config.norm == "layer"
        has_bias = self.is_layer_norm and scope.config.norm_bias
        self.bias = make("bias", width) if has_bias else None
        self.is_centered = scope.config.norm == "zero_centered_rms"

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `[b s d]`."""
        if self.rank.columns > 1:
            return self._sharded(x) if self.is_layer_norm else self._sharded_rms(x)
        if not self.is_layer_norm:
            return rms_norm(x, self.weight, is_centered=self.is_centered)
        return layer_norm(x, self.weight, self.bias)

    def _sharded(self, x: Tensor) -> Tensor:
        wide = cast(x, "float32")
        var, mean = var_mean_last(wide)
        moments = stack((var, mean, square(mean)), 2)
        var, mean, squared = unbind(divide(all_reduce(moments, self.rank.feature_group)), 2)
        var = sub(add(var, squared), square(mean))
        normed = mul(sub(wide, unsqueeze(mean, 2)), unsqueeze(rsqrt(shift(var)), 2))
        return self._shifted(cast(normed, x.dtype))

    def _shifted(self, x: Tensor) -> Tensor:
        x = mul(x, self.weight)
        return x if self.bias is None else add(x, self.bias)

    def _sharded_rms(self, x: Tensor) -> Tensor:
        if self.is_centered:
            return cast(mul(self._normed(x), shift(cast(self.weight, "float32"))), x.dtype)
        return mul(cast(self._normed(x), x.dtype), self.weight)

    def _normed(self, x: Tensor) -> Tensor:
        wide = cast(x, "float32")
        local = mean_last(square(wide))
        squared = divide(all_reduce(local, self.rank.feature_group))
        return mul(wide, rsqrt(shift(squared)))


def rms_norm(x: Tensor, weight: Tensor, *, is_centered: bool) -> Tensor:
    """The RMS norm over the last dimension, whose weight may be stored less 1."""
    if not is_centered:
        return fused_rms_norm(x, weight)
    weight = shift(cast(weight, "float32"))
    normed = fused_rms_norm(cast(x, "float32"), weight)
    return cast(normed, x.dtype)


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


def fused_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
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
