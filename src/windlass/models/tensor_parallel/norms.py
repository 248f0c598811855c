"""RMS normalisation whose weight is stored less 1, whole and over sharded features."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.tensor_parallel.parallel_modules import ShardedRMSNorm


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """`x / sqrt(avg(x^2) + eps) * (1 + w)`, in float32, as in Gemma.

    Source: Gemma Team 2024, arXiv:2403.08295, and its code.
    """

    def reset_parameters(self) -> None:
        """Sets the weight to zero, so that it scales by 1."""
        if self.weight is not None:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[... d]` to the same shape."""
        weight = _at_least_float32(self.weight) + 1
        normed = functional.rms_norm(_at_least_float32(x), self.normalized_shape, weight, self.eps)
        return normed.to(x.dtype)


class ShardedZeroCenteredRMSNorm(ShardedRMSNorm):
    """`ZeroCenteredRMSNorm` over all features, of which a rank has `[... d/c]`."""

    def forward(self, x: Tensor) -> Tensor:
        """The rank's features of the norm."""
        return (self.normalized(x) * (_at_least_float32(self.weight) + 1)).to(x.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
