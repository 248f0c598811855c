"""Which experts each token takes, with which weight, and how evenly.

Shape letters: b micro-batch, s sequence, n = b s tokens, E experts, k experts of a token, d width.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.config import ExpertConfig
from windlass.models.context_parallel import ContextParallelRank
from windlass.models.experts.routing_ops import (
    add_dropped,
    add_load,
    choices_before,
    choose_experts,
    drop_late_tokens,
)
from windlass.models.fine_tuning.lora import Adaptable, Adapted
from windlass.models.tensor_parallel.collectives import TensorParallelRank, all_reduce_autograd
from windlass.models.tensor_parallel.sharding_rules import GridShardable, ShardingStyle

_BALANCE_SCALE = "balance_scale"


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Tensor
    """`Int[n k]`; E where an expert has no room for the token."""
    weights: Tensor
    """`Float[n k]`, 0 where an expert has no room."""


class Router(Adaptable, GridShardable):
    """Scores experts for each token and picks the k best.

    Four buffers are no parameters. `load`, `Int[E]`, sums the tokens that chose each expert over
    forward passes in training, `dropped`, `Int[]`, the choices that found no room; None without a
    capacity. `balance_bias`, `Float[E]`, is added to scores when experts are picked, not
    to their weights. `balance_scale`, `Float[]`, is the weight of one sequence's balance loss; None
    divides that of a call by its sequences.

    Args:
        width: features d of a token.
        std: standard deviation of the weights that it begins with.
    """

    adapted_unasked: ClassVar[bool] = False
    balance_scale: Tensor | None
    balance_bias: Tensor | None
    load: Tensor
    dropped: Tensor | None
    context = ContextParallelRank()
    """The rank whose tokens of each sequence it routes."""

    def __init__(self, width: int, config: ExpertConfig, *, std: float) -> None:
        super().__init__()
        self.config = config
        self.std = std
        self.weight = nn.Parameter(torch.empty(config.count, width))
        bias = None if config.balance_bias is None else torch.zeros(config.count)
        self.register_buffer("balance_bias", bias)
        self.register_buffer("load", torch.zeros(config.count, dtype=torch.int64), persistent=False)
        dropped = None if config.capacity is None else torch.zeros((), dtype=torch.int64)
        self.register_buffer("dropped", dropped, persistent=False)
        self.register_buffer(_BALANCE_SCALE, None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights; no expert has had a token."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)
        self.load.zero_()
        if self.dropped is not None:
            self.dropped.zero_()
        if self.balance_bias is not None:
            self.balance_bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Maps tokens `[b s d]` to their experts."""
        config, logits = self.config, self.logits(x)
        experts, weights = choose_experts(
            logits, self.balance_bias, self.balance_scale if self.training else None, config,
            balances=self.training, context=self.context,
        )  # fmt: skip
        if self.training:
            add_load(self.load, experts)
        slots = config.slots(x.shape[1] * self.context.degree)
        if slots is not None:
            before = choices_before(experts, config.count, self.context)
            experts = drop_late_tokens(experts, before, config.count, slots)
            if self.training and self.dropped is not None:
                add_dropped(self.dropped, experts, config.count)
            weights = weights.masked_fill(experts == config.count, 0)
        return Routing(experts.flatten(0, 1), weights.flatten(0, 1))

    def logits(self, x: Tensor) -> Tensor:
        """What scores are made of, `[b s d]` to `[b s E]`."""
        return functional.linear(x, self.weight)

    def with_adapters(self, *, rank: int, scale: float) -> "LoraRouter":
        """The same router with an adapter beside its product."""
        return LoraRouter(self, rank=rank, scale=scale)

    @property
    def in_features(self) -> int:
        """Features of a token."""
        return self.weight.shape[1]

    def grid_class(self, style: ShardingStyle) -> type[nn.Module]:
        """The class with a rank's part of the product."""
        del style
        return GridRouter


class GridRouter(Router):
    """A router in a grid, which takes a rank's features: all ranks of a row route alike."""

    tp_rank: TensorParallelRank
    is_sharded: bool

    def logits(self, x: Tensor) -> Tensor:
        """What scores are made of, `[b s d/c]` to `[b s E]`."""
        return all_reduce_autograd(super().logits(x), self.tp_rank.feature_group)


class LoraRouter(Router, Adapted):
    """A frozen router with an adapter: its logits are `x W^T + scale (x A^T) B^T`.

    Args:
        base: the router, whose weight and buffers it takes over under the same names.
        scale: what the adapter's output is multiplied with.
    """

    def __init__(self, base: Router, *, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(base))
        # The base keeps its own table.
        self._parameters = dict(base._parameters)  # noqa: SLF001
        self.rank, self.scale = rank, scale
        experts, width = base.weight.shape
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, width))
        self.lora_b = nn.Parameter(base.weight.new_empty(experts, rank))

    def reset_parameters(self) -> None:
        """Draws the weights of the base, then those of the adapter."""
        super().reset_parameters()
        self.reset_adapter()

    def logits(self, x: Tensor) -> Tensor:
        """What scores are made of, `[b s d]` to `[b s E]`."""
        inner = functional.linear(x, self.lora_a)
        adapter = functional.linear(inner, self.lora_b)
        return torch.add(super().logits(x), adapter, alpha=self.scale)


def has_capacity(layer: nn.Module) -> bool:
    """Whether experts of a layer have no room for late tokens of a sequence."""
    routers = (module for module in layer.modules() if isinstance(module, Router))
    return any(router.config.capacity is not None for router in routers)


def set_balance_scale(module: nn.Module, scale: float) -> None:
    """Sets the weight of one sequence's balance loss in every router of a module."""
    for router in module.modules():
        if isinstance(router, Router):
            router.balance_scale = torch.tensor(scale, device=router.weight.device)


def balance_buffers(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's buffers that take the weight of one sequence's balance loss."""
    return tuple(
        f"{path}.{_BALANCE_SCALE}" if path else _BALANCE_SCALE
        for path, module in layer.named_modules()
        if isinstance(module, Router) and module.config.balance_loss
    )
