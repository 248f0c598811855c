"""The feed-forward branch without experts."""

from windlass.capture.analytic.modules.linears import Column, Row
from windlass.capture.analytic.modules.sparse_weights import BlockWeight, LinearName
from windlass.capture.analytic.ops.block_products import KeptBlocks, block_feed_forward
from windlass.capture.analytic.ops.collectives import all_gather, reduce_scatter
from windlass.capture.analytic.ops.elementwise import gelu, mul, silu
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Tensor


class FeedForward:
    """The feed-forward branch, gated or not.

    Args:
        scope: of the branch.
        divides: whether all ranks of a grid share its inner features, or only the rows do; None if
            that depends on it alone.
    """

    def __init__(self, scope: Scope, divides: bool | None = None) -> None:
        config = scope.config
        self.rank, self.ffn = scope.rank, config.ffn
        self.activate = silu if config.activation == "swiglu" else gelu
        divides = config.ffn % scope.rank.degree == 0 if divides is None else divides
        linears: dict[str, LinearName] = {"input": "up"}
        if config.is_gated:
            linears = {"gate": "gate", **linears}
        ffn, bias = config.ffn, config.ffn_bias
        self.inputs = [
            Column(scope.inner(path), name, (ffn,), 1, bias=bias, divides=divides)
            for path, name in linears.items()
        ]
        self.output = Row(scope.inner("output"), "down", ffn, 1, bias=bias, divides=divides)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to the same; the tokens are gathered, and scattered again."""
        full = all_gather(x, self.rank.token_group)
        y = self.partial_sum(full)
        return reduce_scatter(y, self.rank.token_group)

    def partial_sum(self, x: Tensor) -> Tensor:
        """The rank's term of the outputs of all tokens `[b s d/c]`; their sum is over the ranks."""
        if len(self.inputs) == 1:
            (up,), down = self.inputs, self.output
            one, two, is_whole = up.weight, down.weight, self.rank.degree == 1
            if is_whole and isinstance(one, BlockWeight) and isinstance(two, BlockWeight):
                first = KeptBlocks(one.values, one.blocks, up.bias)
                second = KeptBlocks(two.values, two.blocks, down.bias)
                return block_feed_forward(x, first, second, self.ffn)
            return down(gelu(up(x)))
        gate, up = self.inputs
        return self.output(mul(self.activate(gate(x)), up(x)))
