"""The linear layers of all experts at one place, and with an adapter beside each."""

import torch
from torch import Tensor, nn

from windlass.models.experts.grouped_products import grouped_linear
from windlass.models.fine_tuning.lora import Adaptable, Adapted
from windlass.models.tensor_parallel.collectives import (
    TensorParallelRank,
    all_gather_autograd,
    all_reduce_autograd,
    reduce_scatter_autograd,
)
from windlass.models.tensor_parallel.sharding_rules import GridShardable, ShardingStyle


class ExpertLinear(Adaptable, GridShardable):
    """A linear layer without bias of each expert; `weight` is `[E outputs inputs]`."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.reset_parameters()

    @property
    def out_features(self) -> int:
        """Outputs of each expert's layer."""
        return self.weight.shape[1]

    @property
    def in_features(self) -> int:
        """Inputs of each expert's layer."""
        return self.weight.shape[2]

    def reset_parameters(self) -> None:
        """Draws the weights."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Maps `[rows inputs]`, sorted by expert, to `[rows outputs]`."""
        return grouped_linear(rows, self.weight, counts)

    def with_adapters(self, *, rank: int, scale: float) -> "LoraExpertLinear":
        """The same layers with an adapter beside each expert's."""
        return LoraExpertLinear(self, rank=rank, scale=scale)

    def grid_class(self, style: ShardingStyle) -> type[nn.Module]:
        """The class with a rank's part of the products."""
        return GridExpertColumn if style == "column" else GridExpertRow


class GridExpertColumn(ExpertLinear):
    """Column-parallel linears of experts in a grid: they take a rank's features of each row."""

    tp_rank: TensorParallelRank
    is_sharded: bool
    """Whether the ranks of one row shard the outputs; otherwise each has all of them."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Maps `[rows d/c]` to `[rows f/t]`, or `[rows f/r]` if each has all of its row."""
        partial_sum = super().forward(rows, counts).unsqueeze(0)
        reduce = reduce_scatter_autograd if self.is_sharded else all_reduce_autograd
        return reduce(partial_sum, self.tp_rank.feature_group).squeeze(0)


class GridExpertRow(ExpertLinear):
    """Row-parallel linears of experts in a grid: they give a partial sum of a rank's features."""

    tp_rank: TensorParallelRank
    is_sharded: bool
    """Whether the ranks of one row shard the inputs; otherwise each has all of them."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Maps `[rows f/t]` to a partial sum of `[rows d/c]`."""
        if self.is_sharded:
            rows = all_gather_autograd(rows.unsqueeze(0), self.tp_rank.feature_group).squeeze(0)
        return super().forward(rows, counts)


class LoraExpertLinear(ExpertLinear, Adapted):
    """Frozen linear layers of E experts, each with an adapter: `x W_e^T + scale (x A_e^T) B_e^T`.

    Args:
        base: the linear layers, whose weight it takes over under the same name.
        rank: rank of each expert's adapter.
        scale: what the adapters' output is multiplied with.
    """

    def __init__(self, base: ExpertLinear, *, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.std, self.weight = base.std, base.weight
        self.rank, self.scale = rank, scale
        experts, outputs, inputs = base.weight.shape
        self.lora_a = nn.Parameter(base.weight.new_empty(experts, rank, inputs))
        self.lora_b = nn.Parameter(base.weight.new_empty(experts, outputs, rank))

    def reset_parameters(self) -> None:
        """Draws the weights of the base, then those of the adapters."""
        super().reset_parameters()
        self.reset_adapter()

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Maps `[rows in]`, sorted by expert, to `[rows out]`."""
        inner = grouped_linear(rows, self.lora_a, counts)
        adapter = grouped_linear(inner, self.lora_b, counts)
        return torch.add(super().forward(rows, counts), adapter, alpha=self.scale)
