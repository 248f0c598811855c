"""A feed-forward branch of experts, of which each token takes a few (plain PyTorch).

Shape letters: b micro-batch, s sequence, n = b s tokens, d width, E experts, k experts of a token,
f inner width of an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional

from windlass.models.config import ExpertConfig, TransformerConfig
from windlass.models.experts.expert_linear import ExpertLinear
from windlass.models.experts.routing import Router
from windlass.models.experts.routing_ops import sort_by_expert
from windlass.models.experts.row_order import rows_by_expert, weighted_sum
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
        experts: the same `experts`.
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
