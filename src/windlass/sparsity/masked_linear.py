"""A linear layer with a dense weight that is zero outside of a mask: no faster than dense."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class MaskedPart(NamedTuple):
    """Consecutive outputs of a weight that keep a number of weights, such as the queries."""

    outputs: int
    kept: int
    """Kept weights of all these outputs together."""


class MaskedLinear(nn.Linear):
    """A linear layer with weights that are absent one by one, `unstructured` or n:m.

    Its weight is zero outside of the mask from the start, and its gradient is zero there, so that
    an optimizer keeps it zero.
    """

    mask: Tensor
    """Whether each weight is kept, `Bool[out in]`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        parts: Sequence[MaskedPart],
        n_of_m: tuple[int, int] | None = None,
        std: float | None = None,
    ) -> None:
        """A layer with a mask and weights drawn from torch's default generator.

        Args:
            parts: kept weights, for all outputs.
            n_of_m: n and m if n of every m consecutive inputs are kept; None for any.
            std: standard deviation of the kept weights at the start; the bias then starts at zero.
                None draws both as `nn.Linear` does.
        """
        # Set first: the parent's constructor already calls `reset_parameters`.
        self.parts, self.n_of_m, self.std = tuple(parts), n_of_m, std
        super().__init__(inputs, outputs, bias=bias)
        self.register_buffer("mask", torch.empty(outputs, inputs, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws mask and weights; kept weights start as those of a dense layer, not rescaled."""
        if "mask" not in self._buffers or self.weight.is_meta:
            return
        self.take_mask(self._draw_mask())

    def take_mask(self, mask: Tensor) -> None:
        """Takes over a mask `Bool[out in]`, and draws the weights anew."""
        self.mask.copy_(mask)
        if self.std is None:
            super().reset_parameters()
        else:
            nn.init.normal_(self.weight, std=self.std)
            if self.bias is not None:
                nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.weight *= self.mask

    def _draw_mask(self) -> Tensor:
        return torch.cat([self._draw_part(part) for part in self.parts])

    def _draw_part(self, part: MaskedPart) -> Tensor:
        weights = part.outputs * self.in_features
        if part.kept == weights:
            return torch.ones(part.outputs, self.in_features, dtype=torch.bool, device="cpu")
        if self.n_of_m is not None:
            n, m = self.n_of_m
            order = torch.rand(part.outputs, self.in_features // m, m, device="cpu").argsort(-1)
            return (order.argsort(-1) < n).flatten(1)
        mask = torch.zeros(weights, dtype=torch.bool, device="cpu")
        mask[torch.randperm(weights, device="cpu")[: part.kept]] = True
        return mask.view(part.outputs, self.in_features)

    @torch.no_grad()
    def take_dense_weight(self, weight: Tensor) -> None:
        """Takes over the kept weights of a dense weight `[out in]`."""
        self.weight.copy_(weight * self.mask)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[... in]` to `[... out]`."""
        return functional.linear(x, self.weight * self.mask, self.bias)
