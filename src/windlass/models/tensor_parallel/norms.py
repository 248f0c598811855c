"""Norms of vectors whose features lie on several slices.

Each slice finds the moments of its own features, and the slices of one row put them together.
"""

import torch
from torch import Tensor, nn

from windlass.models.tensor_parallel.collectives import Place, summed


def norm_kind(module: nn.Module) -> type[nn.Module]:
    """What one of torch's norms becomes in a grid."""
    return SliceLayerNorm if isinstance(module, nn.LayerNorm) else SliceRMSNorm


class SliceLayerNorm(nn.LayerNorm):
    """`(x - mean) / sqrt(var + eps) * w + b` over all features, of own ones `[... d/c]`."""

    place: Place

    def forward(self, x: Tensor) -> Tensor:
        """Own features of the norm.

        Moments of parts come together as `mean = avg(m)` and `var = avg(v) + avg(m^2) - mean^2`:
        only how the parts' means differ is a difference of squares, not the values themselves.
        Source: Chan, Golub & LeVeque 1983, The American Statistician 37(3), equation 2.1.
        """
        wide = _wide(x)
        var, mean = torch.var_mean(wide, -1, correction=0)
        parts = torch.stack((var, mean, mean.square()), -1)
        var, mean, square = (summed(parts, self.place.features) / self.place.columns).unbind(-1)
        var = var + square - mean.square()
        normed = (wide - mean.unsqueeze(-1)) * (var + self.eps).rsqrt().unsqueeze(-1)
        return _scaled(normed.to(x.dtype), self.weight, self.bias)


class SliceRMSNorm(nn.RMSNorm):
    """`x / sqrt(avg(x^2) + eps) * w` over all features, of own ones `[... d/c]`."""

    place: Place

    def forward(self, x: Tensor) -> Tensor:
        """Own features of the norm."""
        wide = _wide(x)
        own = wide.square().mean(-1, keepdim=True)
        square = summed(own, self.place.features) / self.place.columns
        epsilon = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _scaled((wide * (square + epsilon).rsqrt()).to(x.dtype), self.weight, None)


def _wide(x: Tensor) -> Tensor:
    """Moments are in float32 at least, as torch's own."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
