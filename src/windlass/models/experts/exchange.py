"""The layer that one expert-parallel rank runs: its own experts, and the exchange of tokens.

Each of e ranks has `E / e` adjacent experts of every layer. Rows go to the rank of their expert and
the results come back, an all-to-all each way; how many arrive, the ranks tell each other first. The
adjoint of either is the other, so that the gradient of a rank's experts is summed over the tokens
of all e ranks. Source: Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2.

Shape letters: n rows, d width, E experts, e ranks.

How many rows arrive is known in a run alone, so their number is a size that a compiler knows no
value of. The host waits for it once, with the counts, and everything else takes it from there: an
accelerator that has run out of work in the middle of a layer would stand still. Rows that arrive
are brought from the order (rank, expert) into (expert, rank), and back before they return. Shape
letters: n rows of this rank, u rows that arrive, d width, e ranks, l experts of a rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.library import custom_op, get_ctx

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


@custom_op("windlass::exchange_expert_counts", mutates_args=())
def exchange_counts(sent: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """The rows that arrive from each rank for each expert here, and the sizes of all messages.

    The host waits for the sizes, to know how much memory arriving rows take.

    Args:
        sent: rows of each expert, rank by rank, `Int[e l]`.

    Returns:
        The rows that arrive, `Int[e l]`, and in the host's memory how many go to each rank and come
        from it, `Int[2 e]`.
    """
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent.contiguous(), group=process_group(group))
    return came, torch.stack((sent.sum(1), came.sum(1))).cpu()


@custom_op("windlass::send_expert_rows", mutates_args=())
def send_rows(rows: Tensor, came: Tensor, sizes: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """The rows that arrive in the order of experts `[u d]`, and the place of each when it came.

    Args:
        rows: `Float[n d]`, sorted by expert; those without an expert come last and stay.
        came: as `exchange_counts` gives it.
        sizes: as `exchange_counts` gives it.
    """
    by_expert = _expert_of_rows(came, sizes).argsort(stable=True)
    return _sent(rows, by_expert, sizes, group), by_expert


@custom_op("windlass::return_expert_rows", mutates_args=())
def return_rows(
    results: Tensor, by_expert: Tensor, sizes: Tensor, rows: int, group: str
) -> Tensor:  # fmt: skip
    """The results of rows `[n d]` from those of the rows that arrived, `[u d]`; else 0.

    Args:
        results: `Float[u d]`, in the order of experts.
        by_expert: as `send_rows` gives it.
        sizes: as for `send_rows`.
    """
    in_order = torch.empty_like(results).index_copy_(0, by_expert, results)
    back = _exchanged(in_order, sizes.flip(0), group)
    missing = rows - len(back)
    return torch.cat((back, back.new_zeros(missing, back.shape[1]))) if missing else back


@custom_op("windlass::send_expert_gradients", mutates_args=())
def _send_gradients(gradients: Tensor, by_expert: Tensor, sizes: Tensor, group: str) -> Tensor:
    """The gradients of results that were returned, `[u d]`, of those of all rows `[n d]`."""
    return _sent(gradients, by_expert, sizes, group)


def _sent(rows: Tensor, by_expert: Tensor, sizes: Tensor, group: str) -> Tensor:
    arrived = _exchanged(rows[: int(sizes[0].sum())], sizes, group)
    return arrived.index_select(0, by_expert)


def _exchanged(rows: Tensor, sizes: Tensor, group: str) -> Tensor:
    """Rows of other ranks for those of this one; `sizes` has how many go, and how many come."""
    own, others = sizes.tolist()
    arrived = rows.new_empty((sum(others), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), others, own, group=process_group(group))
    return arrived


def _expert_of_rows(came: Tensor, sizes: Tensor) -> Tensor:
    """The expert of each row that arrives, rank by rank, `Int[u]`, of `Int[e l]` rows."""
    rows = torch.arange(int(sizes[1].sum()), device=came.device)
    return torch.searchsorted(came.flatten().cumsum(0), rows, right=True) % came.shape[1]


@exchange_counts.register_fake
def _(sent: Tensor, group: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(sent), sent.new_empty((2, sent.shape[0]), device="cpu")


@send_rows.register_fake
def _(rows: Tensor, came: Tensor, sizes: Tensor, group: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    arriving = get_ctx().new_dynamic_size()
    return rows.new_empty((arriving, rows.shape[1])), came.new_empty((arriving,))


@return_rows.register_fake
def _(results: Tensor, by_expert: Tensor, sizes: Tensor, rows: int, group: str) -> Tensor:  # noqa: ARG001
    return results.new_empty((rows, results.shape[1]))


@_send_gradients.register_fake
def _(gradients: Tensor, by_expert: Tensor, sizes: Tensor, group: str) -> Tensor:  # noqa: ARG001
    return gradients.new_empty((by_expert.shape[0], gradients.shape[1]))


def _save_sent(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    rows, _, sizes, ctx.group = inputs
    ctx.rows = rows.shape[0]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], sizes)


def _send_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
    _: None,
) -> tuple[Tensor | None, ...]:
    by_expert, sizes = ctx.saved_tensors
    returned = return_rows(gradient.contiguous(), by_expert, sizes, ctx.rows, ctx.group)
    return returned, None, None, None


def _save_returned(
    ctx: Any,  # noqa: ANN401
    inputs: tuple[Any, ...],
    output: Tensor,  # noqa: ARG001
) -> None:
    _, by_expert, sizes, _, ctx.group = inputs
    ctx.save_for_backward(by_expert, sizes)


def _return_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    by_expert, sizes = ctx.saved_tensors
    arrived = _send_gradients(gradient.contiguous(), by_expert, sizes, ctx.group)
    return arrived, None, None, None, None


send_rows.register_autograd(_send_backward, setup_context=_save_sent)
return_rows.register_autograd(_return_backward, setup_context=_save_returned)
