"""Column-parallel and row-parallel linear layers, and one outside of regions."""

from collections.abc import Sequence

from windlass.capture.analytic.modules.sparse_weights import LinearName, Weight, new_weight
from windlass.capture.analytic.ops.collectives import all_gather, all_reduce, reduce_scatter
from windlass.capture.analytic.ops.elementwise import add, scale
from windlass.capture.analytic.ops.matrix_products import linear
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Tensor
from windlass.models import ShardingRule


class Column:
    """A column-parallel linear.

    Args:
        parts: features of all ranks, by part that is shared by itself.
        unit: features that stay together.
        divides: whether all ranks of a grid share its outputs, or only the rows do.
    """

    def __init__(
        self, scope: Scope, name: LinearName, parts: Sequence[int], unit: int, *, bias: bool,
        divides: bool,
    ) -> None:  # fmt: skip
        self.rank, self.divides = scope.rank, divides
        rows, degree = scope.rank.rows, scope.rank.degree
        outputs = sum(parts)
        rule = ShardingRule(style="column", parts=tuple(parts), unit=unit)
        scope.share(rule, outputs, degree if divides else rows)
        scope.feature_paths.append(scope.path)
        self.weight = new_weight(scope, name, rule, (outputs, scope.config.width))
        self.bias = None
        if bias:
            self.bias = scope.parameter(
                "bias",
                (outputs // (degree if divides else rows),),
                sharded=0,
                replicated_over=None if divides else "features",
            )

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d/c]` to `[b s f/t]`, or `[b s f/r]` if each rank has all of its row."""
        if self.rank.columns == 1:
            return self.weight.product(x, self.bias)
        reduce = reduce_scatter if self.divides else all_reduce
        y = reduce(self.weight.product(x, None), self.rank.feature_group)
        return y if self.bias is None else add(y, self.bias)


class Row:
    """A row-parallel linear back to d; its arguments are those of `Column`, with its inputs."""

    def __init__(
        self, scope: Scope, name: LinearName, inputs: int, unit: int, *, bias: bool, divides: bool
    ) -> None:
        self.rank, self.divides = scope.rank, divides
        rule = ShardingRule(style="row", unit=unit)
        scope.share(rule, inputs, scope.rank.degree if divides else scope.rank.rows)
        scope.feature_paths.append(scope.path)
        width = scope.config.width
        self.weight = new_weight(scope, name, rule, (width, inputs))
        self.bias = scope.feature_parameter("bias", (width,)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s f/t]` to a partial sum of `[b s d/c]`."""
        if self.rank.degree == 1 or not isinstance(self.weight, Weight):
            return self.weight.product(x, self.bias)
        bias = None if self.bias is None else scale(self.bias)
        gathers = self.rank.columns > 1 and self.divides
        full = all_gather(x, self.rank.feature_group) if gathers else x
        return self.weight.product(full, bias)


class FeatureLinear:
    """A linear from d to d outside of regions, as in BERT's head."""

    def __init__(self, scope: Scope, *, bias: bool) -> None:
        self.rank, width = scope.rank, scope.config.width
        scope.feature_paths.append(scope.path)
        self.weight = scope.feature_parameter("weight", (width, width))
        self.bias = scope.feature_parameter("bias", (width,)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to `[b s/r d/c]`."""
        if self.rank.columns == 1:
            return linear(x, self.weight, self.bias)
        y = reduce_scatter(linear(x, self.weight, None), self.rank.feature_group)
        return y if self.bias is None else add(y, self.bias)
