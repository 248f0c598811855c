"""Products of rows that are sorted by expert, each expert's with its own weight.

On a CPU they are a loop of plain products. torch 2.13's `grouped_mm` has the same bits there and
takes 1.01 to 1.23 times as long, and knows no float64. On an accelerator it is one launch for all
experts, and no host waits for the counts.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`x[i] @ weight[e].T` for each row i of expert e, `[n o]`.

    Args:
        x: rows sorted by expert, `Float[n i]`.
        weight: `Float[E o i]`.
        counts: rows of each expert, `Int[E]`. Rows behind the last have no expert: theirs is a
            number that nobody may use.
    """
    y: Tensor = _linear_op(x, weight, counts)
    return y


@custom_op("windlass::grouped_linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return _products(x, weight.transpose(1, 2), counts)


@custom_op("windlass::grouped_linear_input_grad", mutates_args=())
def _input_grad_op(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return _products(gradient, weight, counts)


@custom_op("windlass::grouped_linear_weight_grad", mutates_args=())
def _weight_grad_op(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    if _is_one_launch(x):
        return functional.grouped_mm(gradient.t(), x, offs=_ends(counts, len(x)))
    by_weight = x.new_empty((len(counts), gradient.shape[1], x.shape[1]))
    for expert, rows in enumerate(_ranges(counts)):
        torch.mm(gradient[rows].t(), x[rows], out=by_weight[expert])
    return by_weight


def _products(x: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
    """`x[i] @ factors[e]` for each row i of expert e."""
    if _is_one_launch(x):
        return functional.grouped_mm(x, factors, offs=_ends(counts, len(x)))
    y = x.new_empty((len(x), factors.shape[2]))
    stop = 0
    for expert, rows in enumerate(_ranges(counts)):
        torch.mm(x[rows], factors[expert], out=y[rows])
        stop = rows.stop
    y[stop:] = 0
    return y


def _is_one_launch(x: Tensor) -> bool:
    return not x.is_cpu and x.dtype in _GROUPED_DTYPES


def _ends(counts: Tensor, rows: int) -> Tensor:
    """The end of each expert's rows; the last takes those without an expert, too."""
    ends = counts.cumsum(0).to(torch.int32)
    ends[-1] = rows
    return ends


def _ranges(counts: Tensor) -> Iterator[slice]:
    start = 0
    for count in counts.tolist():
        yield slice(start, start + count)
        start += count


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty((x.shape[0], weight.shape[1]))


@_input_grad_op.register_fake
def _(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG001
    return gradient.new_empty((gradient.shape[0], weight.shape[2]))


@_weight_grad_op.register_fake
def _(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((counts.shape[0], gradient.shape[1], x.shape[1]))


def _save_inputs(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,  # noqa: ARG001
) -> None:
    ctx.save_for_backward(*inputs)


def _backward(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    gradient = gradient.contiguous()
    needs_x, needs_weight, _ = ctx.needs_input_grad
    by_x = _input_grad_op(gradient, weight, counts) if needs_x else None
    by_weight = _weight_grad_op(gradient, x, counts) if needs_weight else None
    return by_x, by_weight, None


_linear_op.register_autograd(_backward, setup_context=_save_inputs)
