"""A mixture of experts, which mirrors `models.experts` call by call."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from windlass.capture.analytic.autograd import attach, kept_outputs, new_node, only
from windlass.capture.analytic.modules.linears import Column, Row
from windlass.capture.analytic.modules.sparse_weights import BlockWeight, LinearName
from windlass.capture.analytic.ops.block_products import KeptBlocks, block_feed_forward
from windlass.capture.analytic.ops.collectives import all_gather, all_reduce, reduce_scatter
from windlass.capture.analytic.ops.elementwise import (
    add,
    compare,
    gelu,
    masked_fill,
    mul,
    sigmoid,
    silu,
)
from windlass.capture.analytic.ops.matrix_products import linear
from windlass.capture.analytic.ops.views import flatten, reshape, squeeze, unsqueeze
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor
from windlass.models import ExpertConfig, ShardingRule, TransformerConfig


class FeedForward:
    """The feed-forward branch, gated or not.

    Args:
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


_Saved = Sequence[Tensor]


class MixtureOfExperts:
    """Each token's k experts, weighted by its router, beside a shared expert if there is one."""

    def __init__(self, scope: Scope, experts: ExpertConfig) -> None:
        config, router, inner = scope.config, scope.inner("router"), scope.inner("experts")
        self.experts = experts
        count, d, f = experts.count, config.width, experts.ffn
        router.feature_paths.append(router.path)
        self.router = router.feature_parameter("weight", (count, d))
        has_bias = experts.balance_bias is not None
        self.bias = router.buffer((count,), "float32") if has_bias else None
        router.buffer((count,), "int64")
        if experts.capacity is not None:
            router.buffer((), "int64")
        self.activate = silu if config.activation == "swiglu" else gelu
        self.rank, degree = scope.rank, scope.rank.degree
        self.divides = f % degree == 0 == (experts.shared_ffn or 0) % degree
        self.ups = [
            _weight(inner.inner(name), "column", (count, f, d), self.divides)
            for name in (("gate", "up") if config.is_gated else ("up",))
        ]
        self.down = _weight(inner.inner("down"), "row", (count, d, f), self.divides)
        shared = _shared_scope(scope, experts)
        self.shared = None if shared is None else FeedForward(shared, self.divides)
        self.shared_gate = None
        if experts.shared_gate:
            gate = scope.inner("shared_gate")
            gate.feature_paths.append(gate.path)
            self.shared_gate = gate.feature_parameter("weight", (1, d))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to the same; the tokens are gathered, and scattered again."""
        full = all_gather(x, self.rank.token_group)
        y = self._forward(full)
        return reduce_scatter(y, self.rank.token_group)

    def _forward(self, x: Tensor) -> Tensor:
        experts, weights = self._route(x)
        order = _sort_by_expert(experts, self.experts.count)
        by_expert, by_token, counts = order
        rows = _rows_by_expert(flatten(x, 0, 1), by_expert, by_token)
        rows = self._feed_forward(rows, counts)
        y = reshape(_weighted_sum(rows, weights, by_expert, by_token), x.shape)
        return y if self.shared is None else add(y, self._gated(x, self.shared))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._scores(x, self.router)
        experts, weights = _choose(logits, self.bias, self.experts.per_token)
        if self.experts.capacity is not None:
            experts = _like("drop_late_tokens", experts)
            weights = masked_fill(weights, compare("eq", experts))
        return flatten(experts, 0, 1), flatten(weights, 0, 1)

    def _feed_forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        if len(self.ups) == 1:
            inner = self.activate(self._up(rows, self.ups[0], counts))
        else:
            gate = self.activate(self._up(rows, self.ups[0], counts))
            inner = mul(gate, self._up(rows, self.ups[1], counts))
        full = inner  # which stays alive beside what is gathered
        if self.rank.columns > 1 and self.divides:
            full = squeeze(all_gather(unsqueeze(inner, 0), self.rank.feature_group), 0)
        return grouped_linear(full, self.down, counts)

    def _up(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """`[n d/c]` to `[n f/t]`, or `[n f/r]` if each rank has all of its row."""
        y = grouped_linear(rows, weight, counts)
        if self.rank.columns == 1:
            return y
        reduce = reduce_scatter if self.divides else all_reduce
        return squeeze(reduce(unsqueeze(y, 0), self.rank.feature_group), 0)

    def _scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[b s d/c]` to `[b s o]`, which all ranks of a row have."""
        y = linear(x, weight, None)
        return y if self.rank.columns == 1 else all_reduce(y, self.rank.feature_group)

    def _gated(self, x: Tensor, shared: FeedForward) -> Tensor:
        y = shared.partial_sum(x)
        if self.shared_gate is None:
            return y
        return mul(y, sigmoid(self._scores(x, self.shared_gate)))


def _weight(
    scope: Scope, style: Literal["column", "row"], sizes: tuple[int, int, int], divides: bool
) -> Tensor:
    """A rank's part of the weight of all experts, `[E o i]`, which shares outputs or inputs."""
    count, outputs, inputs = sizes
    rows, columns, dim = scope.rank.rows, scope.rank.columns, 1 if style == "column" else 2
    scope.share(ShardingRule(style=style), sizes[dim], scope.rank.degree if divides else rows)
    scope.feature_paths.append(scope.path)
    by_output, by_input = (rows, columns) if style == "column" else (columns, rows)
    return scope.parameter(
        "weight", (count, outputs // by_output, inputs // by_input),
        sharded=dim if columns == 1 else None, replicated_over=None,
    )  # fmt: skip


def feed_forward(scope: Scope) -> MixtureOfExperts | FeedForward:
    """The feed-forward branch of a block, with experts or without."""
    experts = scope.config.experts
    return FeedForward(scope) if experts is None else MixtureOfExperts(scope, experts)


def _shared_scope(scope: Scope, experts: ExpertConfig) -> Scope | None:
    if experts.shared_ffn is None:
        return None
    config: TransformerConfig = replace(scope.config, ffn=experts.shared_ffn)
    return replace(scope.inner("shared"), config=config)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows `[n i]` sorted by expert, each with its expert's weight of `[E o i]`."""
    node = new_node((x, weight), _grouped_backward)
    outputs, inputs = weight.shape[1:]
    (out,) = kept_outputs(
        x, lambda: (_product("grouped_linear", [x, weight, counts], outputs, inputs),)
    )
    if node is not None:
        node.save([x, weight, counts], x.tape)
    return attach(node, out)


def _product(name: str, reads: list[Tensor], outputs: int, inputs: int) -> Tensor:
    rows = reads[0].shape[0]
    out = Tensor(reads[0].tape, (rows, outputs), reads[0].dtype)
    out.tape.call(
        name, reads, [out], kind="matmul", flop=2 * rows * outputs * inputs,
        matmul_sizes=(1, rows, outputs, inputs),
    )  # fmt: skip
    return out


def _grouped_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    gradient, (x, weight, counts) = only(gradients), saved
    outputs, inputs = weight.shape[1:]
    by_x = _product("grouped_linear_input_grad", [gradient, weight, counts], inputs, outputs)
    by_weight = Tensor(x.tape, weight.shape, x.dtype)
    rows = x.shape[0]
    x.tape.call(
        "grouped_linear_weight_grad", [gradient, x, counts], [by_weight], kind="matmul",
        flop=2 * rows * outputs * inputs, matmul_sizes=(1, outputs, inputs, rows),
    )  # fmt: skip
    return [by_x, by_weight]


def _choose(logits: Tensor, bias: Tensor | None, per_token: int) -> tuple[Tensor, Tensor]:
    node = new_node((logits,), _choose_backward)
    shape = (*logits.shape[:-1], per_token)
    experts = Tensor(logits.tape, shape, "int64")
    weights = Tensor(logits.tape, shape, logits.dtype)
    reads = [logits] if bias is None else [logits, bias]
    logits.tape.call("choose_experts", reads, [experts, weights])
    if node is not None:
        node.save([logits, experts], logits.tape)
    return experts, attach(node, weights)


def _choose_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    logits, experts = saved
    out = Tensor(logits.tape, logits.shape, logits.dtype)
    out.tape.call("choose_experts_grad", [only(gradients), logits, experts], [out])
    return [out]


def _like(name: str, x: Tensor) -> Tensor:
    """The result of a call that has the shape of its only operand, and no gradient."""
    out = Tensor(x.tape, x.shape, x.dtype)
    x.tape.call(name, [x], [out])
    return out


def _sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    tape, (tokens, per_token) = experts.tape, experts.shape
    rows = (tokens * per_token,)
    outputs = (
        Tensor(tape, rows, "int64"),
        Tensor(tape, rows, "int64"),
        Tensor(tape, (count,), "int64"),
    )
    tape.call("sort_by_expert", [experts], list(outputs))
    return outputs


def _rows_by_expert(x: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:
    node = new_node((x,), partial(_rows_backward, x.shape))
    out = Tensor(x.tape, (by_expert.shape[0], x.shape[1]), x.dtype)
    x.tape.call("rows_by_expert", [x, by_expert, by_token], [out])
    if node is not None:
        node.save([by_token], x.tape)
    return attach(node, out)


def _rows_backward(shape: Shape, gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    gradient, (by_token,) = only(gradients), saved
    out = Tensor(gradient.tape, shape, gradient.dtype)
    out.tape.call("rows_by_expert_grad", [gradient, by_token], [out])
    return [out]


def _weighted_sum(rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:
    operands = [rows, weights, by_expert, by_token]
    node = new_node((rows, weights), _sum_backward)
    out = Tensor(rows.tape, (weights.shape[0], rows.shape[1]), rows.dtype)
    rows.tape.call("weighted_sum", operands, [out])
    if node is not None:
        node.save(operands, rows.tape)
    return attach(node, out)


def _sum_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    rows, weights, *_places = saved
    out = [Tensor(like.tape, like.shape, like.dtype) for like in (rows, weights)]
    rows.tape.call("weighted_sum_grads", [only(gradients), *saved], out)
    return out
