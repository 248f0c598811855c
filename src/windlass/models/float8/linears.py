"""Makes linear layers multiply 8-bit factors: plain ones, with adapters, and ranks' parts."""

from types import MethodType

import torch
from torch import Tensor, nn

from windlass.models.fine_tuning.lora import LoraLinear, RowLoraLinear
from windlass.models.float8.products import TILE, float8_linear
from windlass.models.tensor_parallel.collectives import FeatureSplit
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
