"""Which experts each token takes, with which weight, and how evenly.

Shape letters: b micro-batch, s sequence, n = b s tokens, E experts, k experts of a token, d width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

from windlass.models.config import ExpertConfig

_BALANCE_SCALE = "balance_scale"


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Tensor
    """`Int[n k]`; E where an expert has no room for the token."""
    weights: Tensor
    """`Float[n k]`, 0 where an expert has no room."""


class Router(nn.Module):
    """Scores experts for each token and picks the k best.

    Three buffers are no parameters. `load`, `Int[E]`, sums the tokens of each expert over forward
    passes in training. `balance_bias`, `Float[E]`, is added to scores when experts are picked, not
    to their weights. `balance_scale`, `Float[]`, is the weight of one sequence's balance loss.

    Args:
        width: features d of a token.
        config: number of experts, and how they are chosen.
        std: standard deviation of the weights that it begins with.
    """

    balance_scale: Tensor | None
    balance_bias: Tensor | None
    load: Tensor

    def __init__(self, width: int, config: ExpertConfig, *, std: float) -> None:
        super().__init__()
        self.config = config
        self.std = std
        self.weight = nn.Parameter(torch.empty(config.count, width))
        bias = None if config.balance_bias is None else torch.zeros(config.count)
        self.register_buffer("balance_bias", bias)
        self.register_buffer("load", torch.zeros(config.count, dtype=torch.int64), persistent=False)
        self.register_buffer(_BALANCE_SCALE, None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights; no expert has had a token."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)
        self.load.zero_()
        if self.balance_bias is not None:
            self.balance_bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Maps tokens `[b s d]` to their experts."""
        config = self.config
        logits = functional.linear(x, self.weight)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        ranked = scores.detach()
        if self.balance_bias is not None:
            ranked = ranked + self.balance_bias
        experts = ranked.topk(config.per_token, dim=-1).indices  # [b s k]
        weights = scores.gather(-1, experts)
        if config.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            _add_load(self.load, experts)
        if self.training and config.balance_loss is not None:
            loss = config.balance_loss * balance_losses(scores, experts).sum()
            scale = self.balance_scale
            weights = _WithLoss.apply(weights, loss / len(x) if scale is None else loss * scale)
        slots = config.slots(x.shape[1])
        if slots is not None:
            has_room = _has_room(experts, config.count, slots)
            experts = experts.masked_fill(~has_room, config.count)
            weights = weights.masked_fill(~has_room, 0)
        return Routing(experts.flatten(0, 1), weights.flatten(0, 1).to(x.dtype))


def balance_losses(scores: Tensor, experts: Tensor) -> Tensor:
    """How unevenly each sequence loads the experts, `[b]`: `sum_e f_e P_e`, 1 if evenly.

    `f_e` is E times the share of the sequence's choices that are expert e, `P_e` is the mean share
    of e in a token's scores. No sequence's depends on another's, so that their sum is the same
    however a batch is divided. Source: DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20.

    Args:
        scores: `Float[b s E]`.
        experts: `Int[b s k]`.
    """
    count, choices = scores.shape[-1], experts.flatten(1)
    chosen = torch.zeros_like(scores[:, 0]).scatter_add_(
        1, choices, torch.ones_like(choices, dtype=scores.dtype)
    )
    shares = scores / scores.sum(-1, keepdim=True)
    return (chosen * (count / choices.shape[1]) * shares.mean(1)).sum(-1)


class _WithLoss(torch.autograd.Function):
    """Adds a loss to whatever loss follows: its gradient joins in backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own context
        x: Tensor,
        loss: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *gradients: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0]


def _has_room(experts: Tensor, count: int, slots: int) -> Tensor:
    """Whether an expert still takes a token after the earlier ones of its sequence, `[b s k]`.

    A token is judged by earlier ones alone, so that a causal model stays causal.
    """
    choices = experts.flatten(1)  # [b s*k]
    taken = functional.one_hot(choices, count).cumsum(1)
    place = taken.gather(-1, choices.unsqueeze(-1)).squeeze(-1)
    return (place <= slots).view_as(experts)


@custom_op("windlass::add_expert_load", mutates_args=("load",))
def _add_load(load: Tensor, experts: Tensor) -> None:
    # An operation of its own, so that selective checkpointing does not run it again.
    load.add_(count_rows(experts.flatten(), len(load)))


@_add_load.register_fake
def _(load: Tensor, experts: Tensor) -> None:
    pass


def count_rows(experts: Tensor, count: int) -> Tensor:
    """Rows of each of `count` experts, `Int[count]`, of `Int[rows]`; shapes know no values."""
    return torch.zeros(count, dtype=torch.int64, device=experts.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )


def balance_buffers(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's buffers that take the weight of one sequence's balance loss."""
    return tuple(
        f"{path}.{_BALANCE_SCALE}" if path else _BALANCE_SCALE
        for path, module in layer.named_modules()
        if isinstance(module, Router) and module.config.balance_loss is not None
    )
