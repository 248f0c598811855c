"""Mean cross-entropy of a linear map's outputs, some rows at a time, and both its gradients.

The gradients are computed with the loss, chunk by chunk, so that backward only scales them: the
logits are never whole in memory, nor computed twice. Source: Hsu et al. 2024, Liger Kernel,
arXiv:2410.10989, section 3.2.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from windlass.models.fused_loss.sizes import SUMMED_ROWS, FusedLossSizes
from windlass.models.loss import IGNORE_INDEX, split_weights


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float = 0.0
) -> Tensor:
    """Mean cross-entropy of `x @ weight.T + bias` in nats per token, in float32 or float64.

    Args:
        x: `Float[b s d]`.
        weight: `Float[v d]`.
        bias: `Float[v]`, or None for none.
        targets: `Int[b s]`; `IGNORE_INDEX` does not count. Or `Int[b 2 s]`, with weights.
        z_loss: factor of the mean of `log^2 Z`, whose gradient is added.
    """
    ids, weights = split_weights(targets)
    rows, flat = x.flatten(0, -2), ids.flatten()
    own = None if weights is None else weights.flatten()
    wanted = (x, weight) if bias is None else (x, weight, bias)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in wanted):
        return _loss_op(rows, weight, bias, flat, own)
    return _loss_and_gradients_op(rows, weight, bias, flat, own, z_loss)[0]


class _Gradients(NamedTuple):
    """Gradients of the sum of the losses of all tokens; those of the mean are `scale` times it."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    """Empty without a bias."""
    scale: Tensor
    """1 over the number of targets that count, or the sum of their weights."""


@custom_op("windlass::linear_cross_entropy", mutates_args=())
def _loss_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, counts: Tensor | None
) -> Tensor:
    loss = _Loss(x, weight, bias, targets, counts)
    for rows in loss.chunks():
        loss.add_rows(rows)
    return loss.mean()


@custom_op("windlass::linear_cross_entropy_grads", mutates_args=())
def _loss_and_gradients_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    counts: Tensor | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = _Loss(x, weight, bias, targets, counts)
    by_x, by_weight = torch.empty_like(x), torch.empty_like(weight)
    by_bias = weight.new_zeros(0 if bias is None else len(weight), dtype=loss.dtype)
    is_narrow = x.dtype != loss.dtype
    sums = torch.empty_like(weight, dtype=loss.dtype) if is_narrow else by_weight
    for rows in loss.chunks():
        logs, log_z = loss.add_rows(rows)
        by_logits = logs.exp_()
        if z_loss:
            # d (log^2 Z) / d logit = 2 log Z times the probability.
            by_logits.mul_(1 + 2 * z_loss * log_z)
        by_logits.scatter_add_(1, loss.index[rows], loss.minus_one[rows])
        if loss.counts is not None:
            by_logits.mul_(loss.counts[rows].unsqueeze(1))
        if bias is not None:
            by_bias.addmv_(by_logits.t(), (~loss.ignored[rows]).to(loss.dtype))
        if is_narrow:
            by_logits = loss.logits[: len(by_logits)].copy_(by_logits)
        torch.mm(by_logits, weight, out=by_x[rows])
        is_first = rows.start == 0
        torch.addmm(
            by_weight,
            by_logits.t(),
            x[rows].masked_fill(loss.ignored[rows].unsqueeze(1), 0),
            beta=float(not (is_first or is_narrow)),
            out=by_weight,
        )
        if is_narrow:
            _add_narrow(sums, by_weight, is_first=is_first)
    if is_narrow:
        by_weight.copy_(sums)
    by_x.masked_fill_(loss.ignored.unsqueeze(1), 0)
    scale = torch.where(loss.count > 0, 1 / loss.count, 1.0)
    return loss.mean(), by_x, by_weight, by_bias.to(weight.dtype), scale


class _Loss:
    """The sum of the losses of some tokens, which are added chunk by chunk."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        counts: Tensor | None,
    ) -> None:
        self._x, self._weight, self._bias = x, weight, bias
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.ignored = targets == IGNORE_INDEX
        self.index = targets.masked_fill(self.ignored, 0).unsqueeze(1)
        self.counts = None if counts is None else counts.to(self.dtype)
        """How much each target counts; None if each counts once."""
        total = (~self.ignored).sum() if self.counts is None else self.counts.sum()
        self.count = total.to(self.dtype)
        self.minus_one = x.new_full((len(x), 1), -1, dtype=self.dtype)
        sizes = FusedLossSizes(len(weight), weight.shape[1], weight.element_size())
        self._rows = sizes.rows
        self.logits = x.new_empty(self._rows, len(weight))
        """Logits of one chunk."""
        self._wide = self.logits
        if x.dtype != self.dtype:
            self._wide = torch.empty_like(self.logits, dtype=self.dtype)
        self._sum = x.new_zeros((), dtype=self.dtype)

    def chunks(self) -> Iterator[slice]:
        """The rows of each chunk."""
        for start in range(0, len(self._x), self._rows):
            yield slice(start, min(start + self._rows, len(self._x)))

    def add_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Adds the losses of some rows; returns their log-probabilities `[rows v]` and `log Z`."""
        count = rows.stop - rows.start
        logits, logs, x = self.logits[:count], self._wide[:count], self._x[rows]
        if self._bias is None:
            torch.mm(x, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, x, self._weight.t(), out=logits)
        if logs.dtype != logits.dtype:
            logs.copy_(logits)
        first = logs[:, :1].clone()
        torch.log_softmax(logs, -1, out=logs)
        losses = logs.gather(1, self.index[rows]).squeeze(1)
        losses.masked_fill_(self.ignored[rows], 0)
        if self.counts is not None:
            losses.mul_(self.counts[rows])
        self._sum -= losses.sum()
        return logs, first - logs[:, :1]

    def mean(self) -> Tensor:
        """The mean over the targets that count; not a number if there are none."""
        return self._sum / self.count


def _add_narrow(sums: Tensor, part: Tensor, *, is_first: bool) -> None:
    """Adds `part` to wider sums, or overwrites them with it."""
    for wide, narrow in zip(sums.split(SUMMED_ROWS), part.split(SUMMED_ROWS), strict=True):
        if is_first:
            wide.copy_(narrow)
        else:
            wide.add_(narrow)


@_loss_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    targets: Tensor,  # noqa: ARG001
    counts: Tensor | None,  # noqa: ARG001
) -> Tensor:
    return _empty_scalar(x)


@_loss_and_gradients_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,  # noqa: ARG001
    counts: Tensor | None,  # noqa: ARG001
    z_loss: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_bias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    gradients = torch.empty_like(x), torch.empty_like(weight), by_bias
    return _empty_scalar(x), *gradients, _empty_scalar(x)


def _empty_scalar(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _save_gradients(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, float],  # noqa: ARG001
    output: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    # Else torch would make zeros of the size of the weight as their gradients.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*gradients)


def _backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
    *_: None,
) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
    by_x, by_weight, by_bias, scale = ctx.saved_tensors
    factor = gradient * scale
    has_bias = ctx.needs_input_grad[2]
    of_bias = by_bias * factor if has_bias else None
    return by_x * factor, by_weight * factor, of_bias, None, None, None


_loss_and_gradients_op.register_autograd(_backward, setup_context=_save_gradients)
