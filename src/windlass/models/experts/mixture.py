"""A feed-forward branch of experts, of which each token takes a few (plain PyTorch).

Shape letters: b micro-batch, s sequence, n = b s tokens, d width, E experts, k experts of a token,
f inner width of an expert.

torch's backward of an index adds rows in any order on an accelerator, and needs the sum of all k
rows of a token in memory of its own. These gather rows, and add a token's in the order of its
choices. Shape letters: n tokens, k experts of a token, d width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

from windlass.models.config import ExpertConfig, TransformerConfig
from windlass.models.experts.expert_linear import ExpertLinear
from windlass.models.experts.routing import Router
from windlass.models.experts.routing_ops import RowOrder, sort_by_expert
from windlass.models.modules import (
    INIT_STD,
    Projection,
    activated_gate,
    build_dense_feed_forward,
    residual_std,
)
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable


class Exchange(Protocol):
    """Brings rows to the ranks of their experts, and the results back."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: "Experts") -> Tensor:
        """The results of rows that are sorted by expert, `[n k d]` to `[n k d]`.

        Args:
            rows: `Float[n*k d]`, sorted by expert; those without an expert come last.
            counts: rows of each of all E experts, `Int[E]`.
        """


@dataclass(frozen=True, slots=True)
class LocalExchange:
    """Every expert is on this rank."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: "Experts") -> Tensor:
        """The experts' results of the rows."""
        y: Tensor = experts(rows, counts)
        return y


class Experts(nn.Module):
    """The feed-forward branches of E experts, with a gate if the configuration has one."""

    def __init__(self, config: TransformerConfig, experts: ExpertConfig) -> None:
        super().__init__()
        self.activation = config.activation
        count, d, f = experts.count, config.width, experts.ffn
        self.gate = ExpertLinear(count, d, f, std=INIT_STD) if config.is_gated else None
        self.up = ExpertLinear(count, d, f, std=INIT_STD)
        self.down = ExpertLinear(count, f, d, std=residual_std(config))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Maps `[rows d]`, sorted by expert, to `[rows d]`.

        Args:
            rows: tokens; those behind the last expert's give no usable number.
            counts: rows of each expert, `Int[E]`.
        """
        if self.gate is None:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            inner = functional.gelu(self.up(rows, counts), approximate=approximate)
        else:
            gate = activated_gate(self.gate(rows, counts), self.activation)
            inner = gate * self.up(rows, counts)
        y: Tensor = self.down(inner, counts)
        return y


class MixtureOfExperts(nn.Module, TensorShardable):
    """Each token's k experts, weighted by its router, beside a shared expert if there is one.

    Source: Shazeer et al. 2017, arXiv:1701.06538; dropless products as in Gale et al. 2022,
    arXiv:2211.15841. In plain PyTorch the balance loss joins by itself: the gradient of a batch's
    loss is then that of the loss plus `balance_loss` times the mean over its sequences.

    Args:
        config: a configuration with `experts`.
    """

    def __init__(self, config: TransformerConfig, experts: ExpertConfig) -> None:
        super().__init__()
        self.router = Router(config.width, experts, std=INIT_STD)
        self.experts = Experts(config, experts)
        shared = experts.shared_ffn
        self.shared = (
            None if shared is None else build_dense_feed_forward(replace(config, ffn=shared))
        )
        self.shared_gate = Projection(config.width, 1, bias=False) if experts.shared_gate else None
        self.exchange: Exchange = LocalExchange()

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        routing = self.router(x)
        order = sort_by_expert(routing.experts, self.router.config.count)
        rows = rows_by_expert(x.flatten(0, 1), order)
        rows = self.exchange(rows, order.counts, self.experts)
        y = weighted_sum(rows, routing.weights, order).view_as(x)
        return y if self.shared is None else y + self._shared(x, self.shared)

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the f inner features of every expert, and routes all tokens.

        What it gives is a partial sum, weighted as the whole is, so that the gradient of a router
        is the sum over the ranks, as that of any weight that all have. The balance loss, which all
        ranks compute alike, counts by `balance_scale`, of which each is given its share.
        In a grid each has its own features of a token, and what routes is summed over its row.
        """
        column, row = ShardingRule(style="column"), ShardingRule(style="row")
        inward = {} if self.experts.gate is None else {"experts.gate": column}
        scores = ShardingRule(style="scores")
        gate = {} if self.shared_gate is None else {"shared_gate": scores}
        return {
            "": ShardingRule(style="region"), "router": scores, **gate, **inward,
            "experts.up": column, "experts.down": row,
        }  # fmt: skip

    def _shared(self, x: Tensor, shared: nn.Module) -> Tensor:
        """What all tokens take, `[b s d]`."""
        y: Tensor = shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()


def build_feed_forward(config: TransformerConfig) -> nn.Module:
    """The feed-forward branch that the configuration asks for."""
    if config.experts is None:
        return build_dense_feed_forward(config)
    return MixtureOfExperts(config, config.experts)


def rows_by_expert(x: Tensor, order: RowOrder) -> Tensor:
    """The row of each token `[n d]` at the place of each of its experts, `[n*k d]`."""
    rows: Tensor = _gather_op(x, order.by_expert, order.by_token)
    return rows


def weighted_sum(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """The sum of the rows of each token's experts `[n*k d]` by their weights `[n k]`, `[n d]`."""
    y: Tensor = _sum_op(rows, weights, order.by_expert, order.by_token)
    return y


@custom_op("windlass::rows_by_expert", mutates_args=())
def _gather_op(x: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    return x.index_select(0, by_expert // (len(by_expert) // len(x)))


@custom_op("windlass::rows_by_expert_grad", mutates_args=())
def _gather_grad_op(gradient: Tensor, by_token: Tensor, tokens: int) -> Tensor:
    return gradient.index_select(0, by_token).unflatten(0, (tokens, -1)).sum(1)


@custom_op("windlass::weighted_sum", mutates_args=())
def _sum_op(rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    picked = rows.index_select(0, by_token).unflatten(0, weights.shape)
    return picked.mul_(weights.unsqueeze(-1)).sum(1)


@custom_op("windlass::weighted_sum_grads", mutates_args=())
def _sum_grads_op(
    gradient: Tensor, rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor
) -> tuple[Tensor, Tensor]:
    per_token = weights.shape[1]
    by_rows = gradient.index_select(0, by_expert // per_token)
    wide = torch.promote_types(rows.dtype, torch.float32)
    by_weights = (by_rows.to(wide) * rows).sum(1).index_select(0, by_token).view_as(weights)
    by_rows *= weights.flatten().index_select(0, by_expert).unsqueeze(1)
    return by_rows, by_weights.to(weights.dtype)


@_gather_op.register_fake
def _(x: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty((by_expert.shape[0], x.shape[1]))


@_gather_grad_op.register_fake
def _(gradient: Tensor, by_token: Tensor, tokens: int) -> Tensor:  # noqa: ARG001
    return gradient.new_empty((tokens, gradient.shape[1]))


@_sum_op.register_fake
def _(rows: Tensor, weights: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:  # noqa: ARG001
    return rows.new_empty((weights.shape[0], rows.shape[1]))


@_sum_grads_op.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    rows: Tensor,
    weights: Tensor,
    by_expert: Tensor,  # noqa: ARG001
    by_token: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _save_places(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,  # noqa: ARG001
) -> None:
    x, _, by_token = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(by_token)


def _gather_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor, None, None]:
    (by_token,) = ctx.saved_tensors
    return _gather_grad_op(gradient, by_token, ctx.tokens), None, None


def _save_rows(
    ctx: Any,  # noqa: ANN401
    inputs: tuple[Tensor, ...],
    output: Tensor,  # noqa: ARG001
) -> None:
    ctx.save_for_backward(*inputs)


def _sum_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor, Tensor, None, None]:
    return *_sum_grads_op(gradient, *ctx.saved_tensors), None, None


_gather_op.register_autograd(_gather_backward, setup_context=_save_places)
_sum_op.register_autograd(_sum_backward, setup_context=_save_rows)
