"""The exchange of rows between ranks that divide experts, as operators with their adjoints.

How many rows arrive is known in a run alone, so their number is a size that a compiler knows no
value of. Rows that arrive are brought from the order (rank, expert) into (expert, rank), and back
before they return. Shape letters: n rows of this rank, u rows that arrive, d width, e ranks, l
experts of a rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op, get_ctx

from windlass.models.tensor_parallel.collectives import process_group


@custom_op("windlass::exchange_expert_counts", mutates_args=())
def exchange_counts(sent: Tensor, group: str) -> Tensor:
    """The rows that arrive from each rank for each expert here, `Int[e l]`, of those it sends."""
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent.contiguous(), group=process_group(group))
    return came


@custom_op("windlass::send_expert_rows", mutates_args=())
def send_rows(rows: Tensor, sent: Tensor, came: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """The rows that arrive in the order of experts `[u d]`, and the place of each when it came.

    The host waits for the counts, to know how much memory arriving rows take.

    Args:
        rows: `Float[n d]`, sorted by expert; those without an expert come last and stay.
        sent: rows of each expert, rank by rank, `Int[e l]`.
        came: rows that arrive from each rank for each expert, `Int[e l]`.
        group: name of the ranks' process group.
    """
    by_expert = _expert_of_rows(came).argsort(stable=True)
    return _sent(rows, by_expert, sent, came, group), by_expert


@custom_op("windlass::return_expert_rows", mutates_args=())
def return_rows(
    results: Tensor, by_expert: Tensor, sent: Tensor, came: Tensor, rows: int, group: str
) -> Tensor:
    """The results of rows `[n d]` from those of the rows that arrived, `[u d]`; else 0.

    Args:
        results: `Float[u d]`, in the order of experts.
        by_expert: as `send_rows` gives it.
        sent: as for `send_rows`.
        came: as for `send_rows`.
        rows: n.
        group: name of the ranks' process group.
    """
    in_order = torch.empty_like(results).index_copy_(0, by_expert, results)
    back = _exchanged(in_order, came, sent, group)
    missing = rows - len(back)
    return torch.cat((back, back.new_zeros(missing, back.shape[1]))) if missing else back


@custom_op("windlass::send_expert_gradients", mutates_args=())
def _send_gradients(
    gradients: Tensor, by_expert: Tensor, sent: Tensor, came: Tensor, group: str
) -> Tensor:
    """The gradients of results that were returned, `[u d]`, of those of all rows `[n d]`."""
    return _sent(gradients, by_expert, sent, came, group)


def _sent(rows: Tensor, by_expert: Tensor, sent: Tensor, came: Tensor, group: str) -> Tensor:
    arrived = _exchanged(rows[: int(sent.sum())], sent, came, group)
    return arrived.index_select(0, by_expert)


def _exchanged(rows: Tensor, sent: Tensor, came: Tensor, group: str) -> Tensor:
    sizes, own = came.sum(1).tolist(), sent.sum(1).tolist()
    arrived = rows.new_empty((sum(sizes), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), sizes, own, group=process_group(group))
    return arrived


def _expert_of_rows(came: Tensor) -> Tensor:
    """The expert of each row that arrives, rank by rank, `Int[u]`, of `Int[e l]` rows."""
    experts = torch.arange(came.shape[1], device=came.device).repeat(len(came))
    return experts.repeat_interleave(came.flatten())


@exchange_counts.register_fake
def _(sent: Tensor, group: str) -> Tensor:  # noqa: ARG001
    return torch.empty_like(sent)


@send_rows.register_fake
def _(rows: Tensor, sent: Tensor, came: Tensor, group: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    arriving = get_ctx().new_dynamic_size()
    return rows.new_empty((arriving, rows.shape[1])), came.new_empty((arriving,))


@return_rows.register_fake
def _(
    results: Tensor, by_expert: Tensor, sent: Tensor, came: Tensor, rows: int, group: str  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return results.new_empty((rows, results.shape[1]))


@_send_gradients.register_fake
def _(
    gradients: Tensor, by_expert: Tensor, sent: Tensor, came: Tensor, group: str  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return gradients.new_empty((by_expert.shape[0], gradients.shape[1]))


def _save_sent(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    rows, sent, came, ctx.group = inputs
    ctx.rows = rows.shape[0]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], sent, came)


def _send_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
    _: None,
) -> tuple[Tensor | None, ...]:
    by_expert, sent, came = ctx.saved_tensors
    returned = return_rows(gradient.contiguous(), by_expert, sent, came, ctx.rows, ctx.group)
    return returned, None, None, None


def _save_returned(
    ctx: Any,  # noqa: ANN401
    inputs: tuple[Any, ...],
    output: Tensor,  # noqa: ARG001
) -> None:
    _, by_expert, sent, came, _, ctx.group = inputs
    ctx.save_for_backward(by_expert, sent, came)


def _return_backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    by_expert, sent, came = ctx.saved_tensors
    arrived = _send_gradients(gradient.contiguous(), by_expert, sent, came, ctx.group)
    return arrived, None, None, None, None, None


send_rows.register_autograd(_send_backward, setup_context=_save_sent)
return_rows.register_autograd(_return_backward, setup_context=_save_returned)
