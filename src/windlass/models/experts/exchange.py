"""The layer that one expert-parallel rank runs: its own experts, and the exchange of tokens.

Each of e ranks has `E / e` adjacent experts of every layer. Rows go to the rank of their expert and
the results come back, an all-to-all each way; how many arrive, the ranks tell each other first. The
adjoint of either is the other, so that the gradient of a rank's experts is summed over the tokens
of all e ranks. Source: Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2.

Shape letters: n rows, d width, E experts, e ranks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.models.experts.expert_linear import ExpertLinear
from windlass.models.experts.mixture import Experts, MixtureOfExperts
from windlass.models.init_weights import meta_copy, set_parameter
from windlass.models.tensor_parallel.collectives import process_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallelRank:
    """One of the ranks that divide the experts of each layer."""

    degree: int = 1
    """Expert-parallel degree e, the number of ranks."""
    index: int = 0
    """Index of this rank, from 0: it has the experts from `index * E / e` on."""
    group_name: str = ""
    """Name of the process group of all e ranks, in order."""

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's part of a weight `[E ...]`."""
        return (full[0] // self.degree, *full[1:])

    def own(self, full: Tensor) -> Tensor:
        """This rank's part of a weight `[E ...]`, `[E/e ...]`: a view."""
        count = len(full) // self.degree
        return full.narrow(0, self.index * count, count)


def expert_parameters(layer: nn.Module) -> frozenset[str]:
    """Names inside a layer of the parameters whose first dimension counts experts."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in layer.named_modules()
        if isinstance(module, ExpertLinear)
        for name, _ in module.named_parameters(recurse=False)
    )


def divide_experts(layer: nn.Module, rank: ExpertParallelRank) -> nn.Module:
    """A copy of a layer on the meta device with one rank's experts; the layer itself if all are.

    Args:
        layer: the layer, on any device; not changed.
        rank: the rank.
    """
    names = expert_parameters(layer)
    if rank.degree == 1 or not names:
        return layer
    local = meta_copy(layer)
    for name in names:
        old = local.get_parameter(name)
        shape = rank.shape(tuple(old.shape))
        set_parameter(local, name, nn.Parameter(old.new_empty(shape), old.requires_grad))
    for module in local.modules():
        if isinstance(module, MixtureOfExperts):
            module.exchange = TokenExchange(rank)
    return local


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Brings rows to the ranks of their experts, and the results back."""

    rank: ExpertParallelRank

    def __call__(self, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        """The results of rows that are sorted by expert, `[n d]` to `[n d]`.

        The host waits for the counts, to know how much memory arriving rows take.

        Args:
            rows: `Float[n d]`, sorted by expert; those without an expert come last and give 0.
            counts: rows of each of all E experts, `Int[E]`.
            experts: the experts of this rank.
        """
        if rows.is_meta:
            return torch.empty_like(rows)  # where nothing is counted, only the shape is wanted
        degree, group = self.rank.degree, self.rank.group_name
        sent = counts.view(degree, -1)  # [rank, its experts]
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent.contiguous(), group=process_group(group))
        sizes = _Sizes(*torch.stack((sent.sum(1), came.sum(1))).tolist())
        arrived: Tensor = _AllToAll.apply(rows[: sum(sizes.sent)], sizes, group)
        by_expert = _expert_of_rows(came).argsort(stable=True)
        by_rank = torch.empty_like(by_expert)
        by_rank[by_expert] = torch.arange(len(by_rank), device=by_rank.device)
        results = experts(_Reordered.apply(arrived, by_expert, by_rank), came.sum(0))
        results = _Reordered.apply(results, by_rank, by_expert)
        back: Tensor = _AllToAll.apply(results, sizes.swapped, group)
        missing = len(rows) - len(back)
        return torch.cat((back, back.new_zeros(missing, back.shape[1]))) if missing else back


class _Sizes(NamedTuple):
    """Rows that a rank exchanges with each of e ranks."""

    sent: list[int]
    came: list[int]

    @property
    def swapped(self) -> "_Sizes":
        """Those of the way back."""
        return _Sizes(self.came, self.sent)


def _expert_of_rows(came: Tensor) -> Tensor:
    """The expert of each row that arrives, rank by rank, `Int[n]`, of `Int[rank, expert]` rows."""
    experts = torch.arange(came.shape[1], device=came.device).repeat(len(came))
    return experts.repeat_interleave(came.flatten())


class _AllToAll(torch.autograd.Function):
    """Exchanges rows between all ranks of a group; its gradient takes the way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own context
        rows: Tensor,
        sizes: _Sizes,
        group: str,
    ) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _exchanged(rows, sizes, group)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *gradients: Tensor,
    ) -> tuple[Tensor, None, None]:
        return _exchanged(gradients[0], ctx.sizes.swapped, ctx.group), None, None


def _exchanged(rows: Tensor, sizes: _Sizes, group: str) -> Tensor:
    arrived = rows.new_empty((sum(sizes.came), *rows.shape[1:]))
    dist.all_to_all_single(
        arrived, rows.contiguous(), sizes.came, sizes.sent, group=process_group(group)
    )
    return arrived


class _Reordered(torch.autograd.Function):
    """Brings rows into another order; the gradient takes the way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own context
        rows: Tensor,
        order: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *gradients: Tensor,
    ) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None
