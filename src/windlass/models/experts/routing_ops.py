"""The choice of experts as operators, each of one call: their shapes know no values.

A compiler and a graph of costs see one operation where plain PyTorch would have a dozen small ones.
Shape letters: b micro-batch, s sequence, E experts, k experts of a token.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional

from windlass.models.config import ExpertConfig
from windlass.models.context_parallel import ContextParallelRank
from windlass.models.tensor_parallel.collectives import process_group
from windlass.schema import CONTEXT_RUNS


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    config: ExpertConfig,
    *,
    balances: bool,
    context: ContextParallelRank,
) -> tuple[Tensor, Tensor]:
    """The k best experts of each token `Int[b s k]`, and their weights `[b s k]`.

    Their gradient has that of the balance loss in it: `balance_loss` times `scale` times the sum
    over sequences of `sum_e f_e P_e`, which says how unevenly each loads the experts, 1 if evenly.
    `f_e` is E times the share of the sequence's choices that are expert e, `P_e` is the mean share
    of e in a token's scores. No sequence's depends on another's, so that the sum is the same
    however a batch is divided. Source: DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20.

    Args:
        logits: `Float[b s E]`.
        bias: what is added to scores when experts are picked, `Float[E]`; None adds nothing.
        scale: weight of one sequence's balance loss, `Float[]`; None means 1 / b.
        balances: whether the balance loss counts.
        context: the rank whose tokens of each sequence they are. The loss is that of the whole
            sequence: in the backward pass ranks sum how often each expert was chosen.
    """
    experts, weights = _choose_op(
        logits, bias, scale, config.per_token, config.scores == "sigmoid", config.norm_topk,
        config.balance_loss if balances else 0.0, context.degree, context.group_name,
    )  # fmt: skip
    return experts, weights


def _choices(experts: Tensor, scores: Tensor) -> Tensor:
    """`f_e` of each sequence, `[b E]`."""
    choices, count = experts.flatten(1), scores.shape[-1]
    ones = torch.ones_like(choices, dtype=scores.dtype)
    chosen = torch.zeros_like(scores[:, 0]).scatter_add_(1, choices, ones)
    return chosen * (count / choices.shape[1])


@custom_op("windlass::choose_experts", mutates_args=())
def _choose_op(
    logits: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,  # noqa: ARG001  backward takes it
    per_token: int,
    sigmoid: bool,
    norm_topk: bool,
    balance_loss: float,  # noqa: ARG001
    ranks: int,  # noqa: ARG001
    group: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    scores = _scores(logits, sigmoid=sigmoid)
    ranked = scores if bias is None else scores + bias
    experts = ranked.topk(per_token, dim=-1).indices
    weights = _weights(scores, experts, norm_topk=norm_topk)
    return experts, weights.to(logits.dtype)


def _scores(logits: Tensor, *, sigmoid: bool) -> Tensor:
    """The score of each expert, in float32 at least."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return logits.sigmoid() if sigmoid else logits.softmax(-1)


def _weights(scores: Tensor, experts: Tensor, *, norm_topk: bool) -> Tensor:
    weights = scores.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if norm_topk else weights


@custom_op("windlass::choose_experts_grad", mutates_args=())
def _choose_grad_op(
    gradient: Tensor,
    logits: Tensor,
    experts: Tensor,
    scale: Tensor | None,
    sigmoid: bool,
    norm_topk: bool,
    balance_loss: float,
    ranks: int,
    group: str,
) -> Tensor:
    scores = _scores(logits, sigmoid=sigmoid)
    gradient = gradient.to(scores.dtype)
    if norm_topk:
        total = scores.gather(-1, experts).sum(-1, keepdim=True)
        weights = _weights(scores, experts, norm_topk=True)
        gradient = (gradient - (gradient * weights).sum(-1, keepdim=True)) / total
    by_scores = torch.zeros_like(scores).scatter_(-1, experts, gradient)
    if balance_loss or ranks > 1:
        choices = _choices(experts, scores)
        if ranks > 1:
            # Whatever the factor of the loss, so that a pass sends what its program says.
            dist.all_reduce(choices, group=process_group(group))
        by_scores += _balance_grad(scores, choices / ranks, ranks) * (
            balance_loss / len(scores) if scale is None else balance_loss * scale
        )
    if sigmoid:
        by_logits = by_scores * scores * (1 - scores)
    else:
        by_logits = scores * (by_scores - (by_scores * scores).sum(-1, keepdim=True))
    return by_logits.to(logits.dtype)


def _balance_grad(scores: Tensor, choices: Tensor, ranks: int) -> Tensor:
    """The gradient of the sum over sequences of `sum_e f_e P_e` by the scores, `[b s/c E]`.

    Args:
        scores: those of one rank's tokens, `[b s/c E]`.
        choices: `f_e` of each whole sequence, `[b E]`.
        ranks: number c of ranks that divide each sequence.
    """
    choices, total = choices.unsqueeze(1), scores.sum(-1, keepdim=True)
    mean = (choices * scores).sum(-1, keepdim=True) / total
    return (choices - mean) / (total * (scores.shape[1] * ranks))


@_choose_op.register_fake
def _(
    logits: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    scale: Tensor | None,  # noqa: ARG001
    per_token: int,
    sigmoid: bool,  # noqa: ARG001
    norm_topk: bool,  # noqa: ARG001
    balance_loss: float,  # noqa: ARG001
    ranks: int,  # noqa: ARG001
    group: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], per_token)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


@_choose_grad_op.register_fake
def _(gradient: Tensor, logits: Tensor, *_: Any) -> Tensor:  # noqa: ANN401, ARG001
    return torch.empty_like(logits)


def _save_choice(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    logits, _, scale, _, *ctx.numbers = inputs
    experts, _ = output
    ctx.mark_non_differentiable(experts)
    # Else torch would make zeros as the gradient of the experts.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, experts, *(() if scale is None else (scale,)))


def _choose_backward(
    ctx: Any,  # noqa: ANN401
    _: None,
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    logits, experts, *scale = ctx.saved_tensors
    by_logits = _choose_grad_op(
        gradient, logits, experts, scale[0] if scale else None, *ctx.numbers
    )
    return by_logits, *(None,) * (3 + len(ctx.numbers))


_choose_op.register_autograd(_choose_backward, setup_context=_save_choice)


@custom_op("windlass::add_expert_load", mutates_args=("load",))
def add_load(load: Tensor, experts: Tensor) -> None:
    """Adds to `load[E]` how many tokens chose each expert, of `Int[b s k]`.

    Selective checkpointing does not run it again.
    """
    load.add_(count_rows(experts.flatten(), len(load)))


@add_load.register_fake
def _(load: Tensor, experts: Tensor) -> None:
    pass


@custom_op("windlass::add_dropped_choices", mutates_args=("dropped",))
def add_dropped(dropped: Tensor, experts: Tensor, count: int) -> None:
    """Adds to `dropped[]` how many of `Int[b s k]` choices have no room, and so the number `count`.

    Selective checkpointing does not run it again.
    """
    dropped.add_((experts == count).sum())


@add_dropped.register_fake
def _(dropped: Tensor, experts: Tensor, count: int) -> None:
    pass


def count_rows(experts: Tensor, count: int) -> Tensor:
    """Rows of each of `count` experts, `Int[count]`, of `Int[rows]`; shapes know no values."""
    return torch.zeros(count, dtype=torch.int64, device=experts.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )


def choices_before(experts: Tensor, count: int, context: ContextParallelRank) -> Tensor | None:
    """How often each sequence chose each expert in front of each run of tokens, `Int[b r E]`.

    Ranks tell each other how often their own runs did.

    Args:
        experts: what each of a rank's tokens chose, `Int[b s/c k]`.
        count: number E of experts.
        context: the rank; None is returned if it has whole sequences.
    """
    if context.degree == 1:
        return None
    choices = experts.flatten(1).unflatten(1, (CONTEXT_RUNS, -1))  # [b r s*k/(r*c)]
    none = choices.new_zeros(len(choices), CONTEXT_RUNS, count)
    chosen = context.all_tokens(none.scatter_add(2, choices, torch.ones_like(choices)))
    before = chosen.cumsum(1) - chosen  # [b r*c E]
    return torch.stack([before[:, run.number] for run in context.runs()], dim=1)


@custom_op("windlass::drop_late_tokens", mutates_args=())
def drop_late_tokens(experts: Tensor, before: Tensor | None, count: int, slots: int) -> Tensor:
    """The experts `Int[b s k]` of each token, or `count` where one has no room for it.

    A token is judged by the earlier ones of its sequence alone, so that a causal model stays one.

    Args:
        experts: what each token chose.
        before: choices in front of each of r runs of tokens, `Int[b r E]`; None means whole
            sequences.
        count: number E of experts.
        slots: most choices of a sequence that an expert takes.
    """
    runs = 1 if before is None else before.shape[1]
    choices = experts.flatten(1).unflatten(1, (runs, -1))  # [b r s*k/r]
    taken = functional.one_hot(choices, count).cumsum(2)
    if before is not None:
        taken += before.unsqueeze(2)
    place = taken.gather(-1, choices.unsqueeze(-1)).squeeze(-1)
    return experts.masked_fill((place > slots).view_as(experts), count)


@drop_late_tokens.register_fake
def _(experts: Tensor, before: Tensor | None, count: int, slots: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(experts)


class RowOrder(NamedTuple):
    """The rows of all tokens, k of each, in the order of their experts."""

    by_expert: Tensor
    """`Int[n*k]`: which row of the tokens' order stands at each place of the experts' order."""
    by_token: Tensor
    """`Int[n*k]`: the place of each row of the tokens' order in the experts'."""
    counts: Tensor
    """`Int[E]`: rows of each expert."""


def sort_by_expert(experts: Tensor, count: int) -> RowOrder:
    """The order of rows by expert, of `Int[n k]`; those without an expert come last."""
    return RowOrder(*_sort_op(experts, count))


@custom_op("windlass::sort_by_expert", mutates_args=())
def _sort_op(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = experts.flatten()
    by_expert = flat.argsort(stable=True)
    places = torch.arange(len(flat), device=flat.device)
    by_token = torch.empty_like(by_expert).scatter_(0, by_expert, places)
    # Those without an expert have the number after the last one's.
    return by_expert, by_token, count_rows(flat, count + 1)[:-1].clone()


@_sort_op.register_fake
def _(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = experts.new_empty(experts.numel())
    return rows, torch.empty_like(rows), experts.new_empty(count)
