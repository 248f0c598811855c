"""The ends of a vision transformer; its blocks are those of any pre-norm transformer.

Source: Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1. Shape letters: c channels, h and w
pixels; s one class token and the patches of an image.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from windlass.models.config import TransformerConfig
from windlass.models.modules import INIT_STD, Projection, build_norm
from windlass.models.sentences import FirstTokens
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable


class PatchProjection(nn.Conv2d):
    """A linear layer of the pixels of each patch, as a convolution whose steps are patches."""

    def reset_parameters(self) -> None:
        """Draws the weights and sets the bias to zero."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class PatchEmbedding(nn.Module):
    """Patches of an image, projected to d, behind a learned class token, with learned positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        channels, _, _ = config.image_shape
        self.patches = PatchProjection(channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, config.sequence, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the class token and the positions."""
        for parameter in (self.class_token, self.positions):
            if not parameter.is_meta:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, images: Tensor) -> Tensor:
        """Maps `Float[b c h w]` to `[b s d]`."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        return self.dropout(torch.cat((class_token, patches), dim=1) + self.positions)


class ClassHead(nn.Module, TensorShardable):
    """Final norm of the class token, and its projection to the classes."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.class_token = FirstTokens()
        self.norm = build_norm(config)
        self.projection = Projection(config.width, config.vocabulary, bias=config.head_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b v]`."""
        return self.projection(self.norm(self.class_token(x)[:, 0]))

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Every rank has all of it."""
        return {"": ShardingRule(style="tokenwise")}
