"""Linear layers that multiply 8-bit factors, as one would write them without a float8 type."""

from collections.abc import Iterable
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_LARGEST, _LEAST_EXPONENT, _MANTISSA_BITS = 448.0, -6, 3
"""Numbers of the format e4m3. Source: Micikevicius et al. 2022, arXiv:2209.05433, table 1."""


def use_plain_float8(layers: Iterable[nn.Module]) -> None:
    """Makes plain linear layers multiply 8-bit factors where both sides are multiples of 16."""
    for layer in layers:
        for module in layer.modules():
            if not isinstance(module, nn.Linear):
                continue
            is_plain = type(module).forward is nn.Linear.forward or hasattr(module, "lora_a")
            if is_plain and module.in_features % 16 == 0 == module.out_features % 16:
                module.forward = MethodType(_linear, module)  # type: ignore[method-assign]


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    weight = self.weight
    value = functional.linear(_rounded(x, by_row=True), _rounded(weight, by_row=True))
    of_weight = functional.linear(x.detach(), weight)
    of_input = functional.linear(x, _rounded(weight, by_row=False))
    if of_input.requires_grad:
        of_input.register_hook(lambda gradient: _rounded(gradient, by_row=True))
    # Each product gives its own gradient, and none but the first a value.
    output = value.detach() + sum(each - each.detach() for each in (of_weight, of_input))
    output = output if self.bias is None else output + self.bias
    if not hasattr(self, "lora_a"):
        return output
    # The one module inside a linear layer drops some inputs of the adapter beside it.
    dropout = next(self.children(), nn.Identity())
    a, b = (self.get_parameter(name) for name in ("lora_a", "lora_b"))
    return output + cast(float, self.scale) * (dropout(x) @ a.T @ b.T)


@torch.no_grad()
def _rounded(values: Tensor, *, by_row: bool) -> Tensor:
    """Values at the precision of e4m3, scaled by powers of two by row, or all alike."""
    size = values.abs()
    largest = size.amax(-1, keepdim=True) if by_row else size.amax()
    scale = 2.0 ** torch.floor(torch.log2(_LARGEST / largest.clamp(min=1e-12)))
    # A cast of a float64 to float8 goes through float32, and rounds twice.
    scaled = (values * scale).float().to(values.dtype)
    exponent = torch.frexp(scaled).exponent - 1
    step = 2.0 ** (exponent.clamp(min=_LEAST_EXPONENT) - _MANTISSA_BITS).to(values.dtype)
    return torch.round(scaled / step).mul(step).clamp(-_LARGEST, _LARGEST) / scale
