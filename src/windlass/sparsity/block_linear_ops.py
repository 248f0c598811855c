"""A linear map whose weight stores only kept blocks: an operator of torch with both gradients.

A dense weight `W[out, in]` is given by its kept blocks `values[n, i, j] = W[row * B + i,
column * B + j]` with `(row, column) = blocks[n]`; blocks are in any order, and rows and columns may
have none. No operator ever builds the dense weight.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import custom_op

from windlass.errors import ModelError
from windlass.sparsity import block_batches, block_loops
from windlass.sparsity.block_kernels import BlockKernels, load_block_kernels
from windlass.sparsity.native_library import BuildProgress


class _Products(Protocol):
    """The three products of a weight of kept blocks, as modules and compiled code have them."""

    def linear(
        self, x: Tensor, values: Tensor, blocks: Tensor, out_features: int, bias: Tensor | None
    ) -> Tensor: ...

    def input_grad(
        self, gy: Tensor, values: Tensor, blocks: Tensor, in_features: int
    ) -> Tensor: ...

    def weight_grad(self, gy: Tensor, x: Tensor, blocks: Tensor, block: int) -> Tensor: ...


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def block_linear(
    x: Tensor,
    values: Tensor,
    blocks: Tensor,
    out_features: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` of a weight of kept blocks; its gradient exists only where it is kept.

    Args:
        x: inputs `[... in]`.
        values: kept blocks `[n B B]`, of the type of `x`.
        blocks: row and column of each block, int32 `[n 2]`.
        out_features: the weight's outputs; its inputs are those of `x`.
        bias: `[out]`, or None for none.

    Returns:
        `[... out]`.

    Raises:
        ModelError: features that blocks do not divide, a block outside of the weight, or a type of
            numbers for which no implementation exists.
    """
    y: Tensor = _linear_op(x, values, blocks, out_features, bias)
    return y


def implementation(
    device: torch.device, dtype: torch.dtype, *, progress: BuildProgress | None = None
) -> str:
    """Which code multiplies kept blocks there, and why, in a few words.

    Raises:
        ModelError: there is none for these numbers.
    """
    _require_dtype(dtype)
    if device.type != "cpu":
        return "batched `bmm` in PyTorch, which no GPU has run yet"
    kernels = load_block_kernels(progress, warns=False)
    if not isinstance(kernels, BlockKernels):
        return f"a loop of `mm` in PyTorch: {kernels.reason}"
    if dtype in kernels.dtypes:
        return "C++ on torch's brgemm kernels"
    return f"a loop of `mm` in PyTorch: torch has no brgemm kernel for {dtype} on this processor"


def _products(x: Tensor) -> _Products:
    """What multiplies kept blocks where `x` is: C++, or else PyTorch."""
    _require_dtype(x.dtype)
    if x.device.type != "cpu":
        return block_batches
    kernels = load_block_kernels()
    if isinstance(kernels, BlockKernels) and x.dtype in kernels.dtypes:
        return kernels
    return block_loops


@custom_op("windlass::block_linear", mutates_args=())
def _linear_op(
    x: Tensor, values: Tensor, blocks: Tensor, out_features: int, bias: Tensor | None
) -> Tensor:
    _require_sizes(x, values, out_features)
    rows = x.reshape(-1, x.shape[-1])
    out = _products(x).linear(rows, values, blocks, out_features, bias)
    return out.view(*x.shape[:-1], out_features)


@custom_op("windlass::block_linear_input_grad", mutates_args=())
def _input_grad_op(gy: Tensor, values: Tensor, blocks: Tensor, in_features: int) -> Tensor:
    rows = gy.reshape(-1, gy.shape[-1])
    grad = _products(gy).input_grad(rows, values, blocks, in_features)
    return grad.view(*gy.shape[:-1], in_features)


@custom_op("windlass::block_linear_weight_grad", mutates_args=())
def _weight_grad_op(gy: Tensor, x: Tensor, blocks: Tensor, block: int) -> Tensor:
    outputs, inputs = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
    return _products(gy).weight_grad(outputs, inputs, blocks, block)


@_linear_op.register_fake
def _(
    x: Tensor,
    values: Tensor,
    blocks: Tensor,  # noqa: ARG001
    out_features: int,
    bias: Tensor | None,  # noqa: ARG001
) -> Tensor:
    _require_sizes(x, values, out_features)
    return x.new_empty((*x.shape[:-1], out_features))


@_input_grad_op.register_fake
def _(gy: Tensor, values: Tensor, blocks: Tensor, in_features: int) -> Tensor:  # noqa: ARG001
    return gy.new_empty((*gy.shape[:-1], in_features))


@_weight_grad_op.register_fake
def _(gy: Tensor, x: Tensor, blocks: Tensor, block: int) -> Tensor:  # noqa: ARG001
    return gy.new_empty((blocks.shape[0], block, block))


def _save_inputs(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Tensor, Tensor, Tensor, int, Tensor | None],
    output: Tensor,  # noqa: ARG001
) -> None:
    x, values, blocks, _, _ = inputs
    ctx.save_for_backward(x, values, blocks)


_Gradients = tuple[Tensor | None, Tensor | None, None, None, Tensor | None]


def _backward(ctx: Any, gy: Tensor) -> _Gradients:  # noqa: ANN401
    x, values, blocks = ctx.saved_tensors
    needs_x, needs_values, _, _, needs_bias = ctx.needs_input_grad
    return (
        _input_grad_op(gy, values, blocks, x.shape[-1]) if needs_x else None,
        _weight_grad_op(gy, x, blocks, values.shape[-1]) if needs_values else None,
        None,
        None,
        gy.reshape(-1, gy.shape[-1]).sum(0) if needs_bias else None,
    )


_linear_op.register_autograd(_backward, setup_context=_save_inputs)


# Under `torch.autocast` products of kept blocks run in bfloat16, as those of dense layers do.
for _device in ("cpu", "cuda"):
    _linear_op.register_autocast(_device, torch.bfloat16)


def _require_dtype(dtype: torch.dtype) -> None:
    """Raises if no implementation computes in such numbers."""
    if dtype not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise ModelError(
            f"sparse layers compute in {names}, not in {str(dtype).removeprefix('torch.')}"
        )


def _require_sizes(x: Tensor, values: Tensor, out_features: int) -> None:
    """Raises if blocks do not divide the weight, or types of numbers differ."""
    block, in_features = values.shape[-1], x.shape[-1]
    if in_features % block or out_features % block:
        raise ModelError(
            f"blocks of {block} x {block} do not divide a weight of {out_features} outputs and "
            f"{in_features} inputs; choose a size that divides both (`sparsity.block`)"
        )
    if x.dtype != values.dtype:
        raise ModelError(
            f"inputs of {x.dtype} cannot be multiplied with kept blocks of {values.dtype}; cast one"
        )
