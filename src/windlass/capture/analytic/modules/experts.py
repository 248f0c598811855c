"""A mixture of experts, which mirrors `models.experts` call by call."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from windlass.capture.analytic.autograd import attach, kept_outputs, new_node, only
from windlass.capture.analytic.modules.feed_forward import FeedForward
from windlass.capture.analytic.ops.collectives import all_gather, reduce_scatter
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
from windlass.capture.analytic.ops.views import flatten, reshape
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor
from windlass.models import ExpertConfig, ShardingRule, TransformerConfig

_Saved = Sequence[Tensor]


class MixtureOfExperts:
    """Each token's k experts, weighted by its router, beside a shared expert if there is one."""

    def __init__(self, scope: Scope, experts: ExpertConfig) -> None:
        config, router, inner = scope.config, scope.inner("router"), scope.inner("experts")
        self.experts = experts
        count, d, f = experts.count, config.width, experts.ffn
        self.router = router.parameter("weight", (count, d))
        has_bias = experts.balance_bias is not None
        self.bias = router.buffer((count,), "float32") if has_bias else None
        router.buffer((count,), "int64")
        if experts.capacity is not None:
            router.buffer((), "int64")
        self.activate = silu if config.activation == "swiglu" else gelu
        self.rank = scope.rank
        self.ups = [
            _weight(inner.inner(name), "column", (count, f, d))
            for name in (("gate", "up") if config.is_gated else ("up",))
        ]
        self.down = _weight(inner.inner("down"), "row", (count, d, f))
        shared = _shared_scope(scope, experts)
        self.shared = None if shared is None else FeedForward(shared)
        gate = scope.inner("shared_gate")
        self.shared_gate = gate.parameter("weight", (1, d)) if experts.shared_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/t d]` to the same; the tokens are gathered, and scattered again."""
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
        logits = linear(x, self.router, None)
        experts, weights = _choose(logits, self.bias, self.experts.per_token)
        if self.experts.capacity is not None:
            experts = _like("drop_late_tokens", experts)
            weights = masked_fill(weights, compare("eq", experts))
        return flatten(experts, 0, 1), flatten(weights, 0, 1)

    def _feed_forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        if len(self.ups) == 1:
            inner = self.activate(grouped_linear(rows, self.ups[0], counts))
        else:
            gate = self.activate(grouped_linear(rows, self.ups[0], counts))
            inner = mul(gate, grouped_linear(rows, self.ups[1], counts))
        return grouped_linear(inner, self.down, counts)

    def _gated(self, x: Tensor, shared: FeedForward) -> Tensor:
        y = shared.partial_sum(x)
        if self.shared_gate is None:
            return y
        return mul(y, sigmoid(linear(x, self.shared_gate, None)))


def _weight(scope: Scope, style: Literal["column", "row"], shape: Shape) -> Tensor:
    """A rank's part of the weight of all experts, `[E o i]`, which shares outputs or inputs."""
    dim, degree = 1 if style == "column" else 2, scope.rank.degree
    scope.share(ShardingRule(style=style), shape[dim], degree)
    local = tuple(n // degree if index == dim else n for index, n in enumerate(shape))
    return scope.parameter("weight", local, sharded=dim, replicated_over=None)


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
