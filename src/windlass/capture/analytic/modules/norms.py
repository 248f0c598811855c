"""The norm that a configuration asks for, of a rank's features or of all."""

from windlass.capture.analytic.ops.collectives import Rank, all_reduce
from windlass.capture.analytic.ops.elementwise import (
    add,
    cast,
    divide,
    mul,
    rsqrt,
    shift,
    square,
    sub,
)
from windlass.capture.analytic.ops.normalization import layer_norm, rms_norm as fused_rms_norm
from windlass.capture.analytic.ops.reductions import mean_last, var_mean_last
from windlass.capture.analytic.ops.views import stack, unbind, unsqueeze
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Tensor


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
