"""Batch normalizations whose statistics are float32, whatever layers compute in."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


class _WideStatistics(_BatchNorm):
    """Batch normalization with statistics and weights in float32, whatever layers compute in.

    In bfloat16, which has 8 bits, a running mean that moves by a tenth of a difference stops
    moving; and torch takes weights of another type than the statistics only if they are wider.
    """

    def forward(self, x: Tensor) -> Tensor:
        mean, variance, weight = self.running_mean, self.running_var, self.weight
        if mean is None or variance is None or weight is None or self.momentum is None:
            return super().forward(x)
        if weight.dtype == mean.dtype:
            return super().forward(x)
        self._check_input_dim(x)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        # Torch takes no narrower statistics beside float64.
        dtype = torch.promote_types(mean.dtype, x.dtype)
        wide = mean.to(dtype), variance.to(dtype)
        learned = weight.to(dtype), self.bias.to(dtype)
        y = functional.batch_norm(x, *wide, *learned, self.training, self.momentum, self.eps)
        if self.training and dtype != mean.dtype:
            with torch.no_grad():
                mean.copy_(wide[0])
                variance.copy_(wide[1])
        return y


class BatchNorm1d(_WideStatistics, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with wide statistics."""


class BatchNorm2d(_WideStatistics, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with wide statistics."""


class BatchNorm3d(_WideStatistics, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with wide statistics."""


_WIDE: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


def widen_batch_norms(module: nn.Module) -> None:
    """Gives all batch normalizations of a module wide statistics, in place."""
    for inner in module.modules():
        if type(inner) in _WIDE:
            inner.__class__ = _WIDE[type(inner)]
