"""Linear layers whose products take 8-bit factors, in float8 e4m3.

The output and the gradient of the input multiply factors that are scaled, rounded to float8 and
scaled back; the gradient of the weight multiplies them as they are. Each token, and each output of
the weight, has a scale of its own, and the weight one scale in the backward pass. No scale depends
on other tokens, so the numbers are the same however a batch is divided. The recipe is torchao's
`rowwise_with_gw_hp`; scales are powers of two, so that scaling back rounds nothing.

An accelerator with float8 products multiplies by `torch._scaled_mm`, which no GPU has run yet. All
other devices compute the same with an ordinary product of the rounded factors.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_LEAST = 1e-12
"""Least magnitude that a scale is made for. Source: torchao."""
_TILE = 16
"""Sides of float8 products are multiples of it."""
_CAPABILITY = (8, 9)
"""First CUDA architecture that has float8 products."""


def use_float8(layer: nn.Module) -> None:
    """Makes plain linear layers multiply 8-bit factors, in place.

    Those whose sides are no multiples of 16 stay as they are.
    """
    for module in layer.modules():
        if takes_float8(module):
            module.forward = MethodType(_forward, module)


def takes_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can multiply 8-bit factors."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return module.in_features % _TILE == module.out_features % _TILE == 0


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    output = float8_linear(x, self.weight)
    return output if self.bias is None else output + self.bias


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` with factors in float8, `[... out]`.

    Args:
        x: `[... in]`.
        weight: `[out in]`.
    """
    output: Tensor = _Float8Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return output


class _Float8Linear(torch.autograd.Function):
    """The product of tokens and a weight in float8, and its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, 1, weight, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight = ctx.needs_input_grad  # type: ignore[attr-defined]
        of_x = _product(gradient, 1, weight.t(), None) if needs_x else None
        if not needs_weight:
            return of_x, None
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        return of_x, rows.t() @ inputs


def _product(x: Tensor, x_dim: int | None, weight: Tensor, weight_dim: int | None) -> Tensor:
    """`x W^T` of rounded factors.

    Args:
        x: `[... k]`.
        x_dim: dimension over which each scale of its rows is taken; None for one scale.
        weight: `[n k]`.
        weight_dim: likewise.
    """
    rows = x.reshape(-1, x.shape[-1])
    x_scale, weight_scale = _scale(rows, x_dim), _scale(weight, weight_dim)
    x8, weight8 = _rounded(rows, x_scale), _rounded(weight, weight_scale)
    if _multiplies_float8(x):
        columns = weight_scale.reciprocal().expand(len(weight), 1).t().contiguous()
        product = torch._scaled_mm(  # noqa: SLF001  it has no public name
            x8, weight8.contiguous().t(), scale_a=x_scale.reciprocal().contiguous(),
            scale_b=columns, out_dtype=x.dtype,
        )  # fmt: skip
    else:
        product = functional.linear(
            x8.to(x.dtype) / x_scale.to(x.dtype), weight8.to(x.dtype) / weight_scale.to(x.dtype)
        )
    return product.view(*x.shape[:-1], len(weight))


def _scale(values: Tensor, dim: int | None) -> Tensor:
    """`Float32[rows 1]` or `[1 1]`: the power of two that brings the largest value below 448."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    exponent = torch.floor(torch.log2(_LARGEST / largest.double().clamp(min=_LEAST)))
    return torch.exp2(exponent).float().view(-1, 1)


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    scaled = values * scale.to(values.dtype)
    return scaled.clamp(-_LARGEST, _LARGEST).to(_FLOAT8)


def _multiplies_float8(x: Tensor) -> bool:
    """Whether the device of a tensor multiplies float8 factors."""
    if not x.is_cuda or x.dtype == torch.float64 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(x.device) >= _CAPABILITY
