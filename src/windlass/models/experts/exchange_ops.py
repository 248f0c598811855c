"""The exchange of rows between ranks that divide experts, as operators with their adjoints.

How many rows arrive is known in a run alone, so their number is a size that a compiler knows no
value of. The host waits for it once, with the counts, and everything else takes it from there: an
accelerator that has run out of work in the middle of a layer would stand still. Rows that arrive
are brought from the order (rank, expert) into (expert, rank), and back before they return. Shape
letters: n rows of this rank, u rows that arrive, d width, e ranks, l experts of a rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op, get_ctx

from windlass.models.tensor_parallel.collectives import process_group


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
