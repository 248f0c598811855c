"""Residual networks as `nn.Sequential`: stem, blocks, head (plain PyTorch, usable by itself).

Source: He et al. 2015, arXiv:1512.03385; weights start as in He et al. 2015, arXiv:1502.01852.
Shape letters: c channels, h and w pixels, v classes. Channels and pixels change between layers.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from windlass.models.images.image_config import ResNetConfig


class Convolution(nn.Conv2d):
    """A convolution without bias, padded to keep the size of an image at a stride of 1."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def reset_parameters(self) -> None:
        """Draws normal weights whose outputs keep the scale of ReLU's inputs."""
        if not self.weight.is_meta:
            nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class NormedConvolution(nn.Module):
    """A convolution with a batch norm behind it."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = Convolution(inputs, outputs, size, stride)
        self.norm = BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b c h w]` to `[b c' h/stride w/stride]`."""
        return self.norm(self.convolution(x))


class Stem(nn.Module):
    """From an image to the first stage."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        channels, width = config.image[0], config.stem_width
        small = config.stem == "small"
        self.input = NormedConvolution(channels, width, 3 if small else 7, 1 if small else 2)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Maps `Float[b c h w]` to `[b c' h' w']`."""
        return self.pool(functional.relu(self.input(images)))


class ResidualBlock(nn.Module):
    """Convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        changes = inputs != outputs or stride > 1
        self.shortcut = NormedConvolution(inputs, outputs, 1, stride) if changes else None
        inner = outputs // 4
        self.branch = nn.ModuleList(
            [
                NormedConvolution(inputs, inner, 1),
                NormedConvolution(inner, inner, 3, stride),
                NormedConvolution(inner, outputs, 1),
            ]
            if bottleneck
            else [
                NormedConvolution(inputs, outputs, 3, stride),
                NormedConvolution(outputs, outputs, 3),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b c h w]` to `[b c' h/stride w/stride]`."""
        y = x
        for index, convolution in enumerate(self.branch):
            y = convolution(functional.relu(y) if index else y)
        return functional.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ImageHead(nn.Module):
    """The mean over all pixels, and its projection to the classes."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.projection = nn.Linear(config.widths[-1], config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b c h w]` to logits `[b v]`."""
        return self.projection(x.mean(dim=(2, 3)))


def build_resnet(config: ResNetConfig) -> nn.Sequential:
    """The whole model; maps images `Float[b c h w]` to logits `[b v]`.

    It is built on torch's current default device (`with torch.device("meta")` allocates nothing).
    """
    layers: list[tuple[str, nn.Module]] = [("stem", Stem(config))]
    inputs = config.stem_width
    for stage, (depth, outputs) in enumerate(zip(config.depths, config.widths, strict=True)):
        for index in range(depth):
            halves = index == 0 and (stage > 0 or config.halves_first_stage)
            block = ResidualBlock(inputs, outputs, 2 if halves else 1, bottleneck=config.bottleneck)
            layers.append((f"stage{stage}_block{index}", block))
            inputs = outputs
    return nn.Sequential(OrderedDict([*layers, ("head", ImageHead(config))]))


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
