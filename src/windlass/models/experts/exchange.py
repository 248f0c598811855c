"""The layer that one expert-parallel rank runs: its own experts, and the exchange of tokens.

Each of e ranks has `E / e` adjacent experts of every layer. Rows go to the rank of their expert and
the results come back, an all-to-all each way; how many arrive, the ranks tell each other first. The
adjoint of either is the other, so that the gradient of a rank's experts is summed over the tokens
of all e ranks. Source: Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2.

Shape letters: n rows, d width, E experts, e ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.models.experts.exchange_ops import exchange_counts, return_rows, send_rows
from windlass.models.experts.expert_linear import ExpertLinear
from windlass.models.experts.mixture import Experts, MixtureOfExperts
from windlass.models.init_weights import meta_copy, set_parameter


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


def exchanges_rows(layer: nn.Module) -> bool:
    """Whether a layer has a part of the experts, and sends rows to the ranks of the others."""
    mixtures = (each for each in layer.modules() if isinstance(each, MixtureOfExperts))
    return any(isinstance(each.exchange, TokenExchange) for each in mixtures)


def divide_experts(layer: nn.Module, rank: ExpertParallelRank) -> nn.Module:
    """A copy of a layer on the meta device with one rank's experts; the layer itself if all are.

    Args:
        layer: the layer, on any device; not changed.
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

        The host waits once, for the number of rows that arrive.

        Args:
            rows: `Float[n d]`, sorted by expert; those without an expert come last and give 0.
            counts: rows of each of all E experts, `Int[E]`.
        """
        if rows.is_meta:
            return torch.empty_like(rows)  # where nothing is counted, only the shape is wanted
        group = self.rank.group_name
        sent = counts.view(self.rank.degree, -1)  # [rank, its experts]
        came, sizes = exchange_counts(sent, group)
        arrived, by_expert = send_rows(rows, came, sizes, group)
        results = experts(arrived, came.sum(0))
        y: Tensor = return_rows(results, by_expert, sizes, rows.shape[0], group)
        return y
