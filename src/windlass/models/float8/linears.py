"""Makes linear layers multiply 8-bit factors: plain ones, with adapters, and ranks' parts.

The output and the gradient of the input multiply factors that are scaled, rounded to float8 and
scaled back; the gradient of the weight multiplies them as they are. Each token, and each output of
the weight, has a scale of its own, and the weight one scale in the backward pass. No scale depends
on other tokens, so the numbers are the same however a batch is divided. The recipe is torchao's
`rowwise_with_gw_hp`; scales are powers of two, so that scaling back rounds nothing.

Where tensor-parallel ranks divide the features that a product sums over, a scale is that of the
largest value on any rank: the factors are those of one device, to every bit.

An accelerator with float8 products multiplies by `torch._scaled_mm`, which no GPU has run yet. All
other devices compute the same with an ordinary product of the rounded factors.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from windlass.models.fine_tuning.lora import LoraLinear, RowLoraLinear
from windlass.models.tensor_parallel.collectives import (
    FeatureSplit,
    TensorParallelGroup,
    all_reduce_max,
)
from windlass.models.tensor_parallel.parallel_modules import RowLinear

_FORWARDS = (
    nn.Linear.forward, LoraLinear.forward, RowLinear.forward, RowLoraLinear.forward,
)  # fmt: skip
"""What linear layers compute whose product can be one of 8-bit factors."""


def use_float8(layer: nn.Module) -> None:
    """Makes linear layers multiply 8-bit factors, in place; adapters beside them stay as they are.

    Those whose sides are no multiples of 16 stay as they are, too.
    """
    for module in layer.modules():
        if takes_float8(module):
            module.forward = MethodType(_forward, module)


def takes_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can multiply 8-bit factors.

    A rank's part of a layer is taken as the layer is, so that a run is the same on any ranks.
    """
    if not isinstance(module, nn.Linear) or type(module).forward not in _FORWARDS:
        return False
    inputs, outputs, split = module.in_features, module.out_features, _split(module)
    if split is not None:
        inputs *= split.group.degree if split.side == "inputs" else 1
        outputs *= split.group.degree if split.side == "outputs" else 1
    return inputs % TILE == outputs % TILE == 0


def _split(module: nn.Module) -> FeatureSplit | None:
    """Which features of a linear layer are a rank's part of those of all ranks."""
    split: FeatureSplit | None = getattr(module, "split", None)
    return split


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    split = _split(self)
    output = float8_linear(x, self.weight, split)
    if self.bias is not None:
        # The ranks' partial sums have a share of the bias each, as in `RowLinear`.
        parts = split.group.degree if split is not None and split.side == "inputs" else 1
        output = output + (self.bias if parts == 1 else self.bias * (1 / parts))
    if isinstance(self, LoraLinear):
        output = torch.add(output, self.adapter_output(x), alpha=self.scale)
    return output


TILE = 16
"""Sides of float8 products are multiples of it."""
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_LEAST = 1e-12
"""Least magnitude that a scale is made for. Source: torchao."""
_CAPABILITY = (8, 9)
"""First CUDA architecture that has float8 products."""


def float8_linear(x: Tensor, weight: Tensor, split: FeatureSplit | None = None) -> Tensor:
    """`x W^T` with factors in float8, `[... out]`.

    Args:
        weight: `[out in]`.
        split: which of the features are a part of those of all ranks; None if none are.
    """
    # A compiler takes plain numbers and words beside tensors.
    side, ranks, name = (None, 1, "") if split is None else split.words
    output: Tensor = _Float8Linear.apply(x, weight, side, ranks, name)
    return output


class _Float8Linear(torch.autograd.Function):
    """The product of tokens and a weight in float8, and its gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        side: Literal["inputs", "outputs"] | None,
        ranks: int,
        name: str,
    ) -> Tensor:
        largest = [_largest(x), _largest(weight)]
        if side == "inputs":
            largest = _largest_of_ranks(largest, ranks, name)
        ctx.save_for_backward(x, weight, largest[1])
        ctx.split = side, ranks, name  # type: ignore[attr-defined]
        return _product(x, largest[0], weight, largest[1])

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, of_rows = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        side, ranks, name = ctx.split  # type: ignore[attr-defined]
        of_x = of_weight = None
        if needs_x:
            largest = [_largest(gradient), of_rows.amax().view(1, 1)]
            if side == "outputs":
                largest = _largest_of_ranks(largest, ranks, name)
            of_x = _product(gradient, largest[0], weight.t(), largest[1])
        if needs_weight:
            rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            of_weight = rows.t() @ inputs
        return of_x, of_weight, None, None, None


def _product(x: Tensor, x_largest: Tensor, weight: Tensor, weight_largest: Tensor) -> Tensor:
    """`x W^T` of rounded factors.

    Args:
        x: `[... k]`.
        x_largest: largest magnitude of each of its rows, `[rows 1]`.
        weight: `[n k]`.
        weight_largest: likewise, or one for all, `[1 1]`.
    """
    rows = x.reshape(-1, x.shape[-1])
    x_scale, weight_scale = _scale(x_largest), _scale(weight_largest)
    x8, weight8 = _rounded(rows, x_scale), _rounded(weight, weight_scale)
    if _multiplies_float8(x, weight):
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


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude of each row, `[rows 1]`."""
    return values.reshape(-1, values.shape[-1]).abs().amax(-1, keepdim=True)


def _largest_of_ranks(largest: Sequence[Tensor], ranks: int, name: str) -> list[Tensor]:
    """The largest of all ranks, by one collective for several tensors `[n 1]`."""
    group = TensorParallelGroup(rows=ranks, name=name)
    joined = all_reduce_max(torch.cat(tuple(largest)), group)
    return list(joined.split([len(each) for each in largest]))


def _scale(largest: Tensor) -> Tensor:
    """`Float32[rows 1]`: the power of two that brings the largest value below 448."""
    return torch.exp2(
        torch.floor(torch.log2(_LARGEST / largest.double().clamp(min=_LEAST)))
    ).float()


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    scaled = values * scale.to(values.dtype)
    return scaled.clamp(-_LARGEST, _LARGEST).to(_FLOAT8)


def _multiplies_float8(x: Tensor, weight: Tensor) -> bool:
    """Whether the device of two factors multiplies them in float8."""
    if not x.is_cuda or x.dtype == torch.float64 or torch.version.hip is not None:
        return False
    if any(side % TILE for side in weight.shape):  # a part of a weight whose own sides are none
        return False
    return torch.cuda.get_device_capability(x.device) >= _CAPABILITY
