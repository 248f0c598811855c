"""Hyperparameters of models of images (this module does not import torch)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from windlass.models.config import TransformerConfig

Stem = Literal["imagenet", "small"]
"""How a residual network begins. `imagenet`: a convolution of 7 x 7 and a pooling, which both halve
the image. `small`: a convolution of 3 x 3, as for images of 32 x 32 (He et al. 2015, section
4.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """A residual network. Source: He et al. 2015, arXiv:1512.03385, table 1.

    Where a stage halves its image, the convolution of 3 x 3 does, not the one of 1 x 1 before it
    (known as v1.5, as in torchvision and MLPerf).
    """

    name: str
    image: tuple[int, int, int]
    """Channels, height and width of an image."""
    classes: int
    stem: Stem = "imagenet"
    stem_width: int = 64
    """Channels behind the stem."""
    depths: tuple[int, ...]
    """Blocks of each stage."""
    widths: tuple[int, ...]
    """Channels behind each stage."""
    bottleneck: bool = True
    """Whether a block has three convolutions, of which the middle one has a quarter of the
    channels; otherwise it has two of 3 x 3."""
    halves_first_stage: bool = False
    """Whether the first stage halves the image as the others do."""
    source: str = ""
    """Publication that the numbers come from."""

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return sum(self.depths)

    def errors(self) -> Iterator[str]:
        """Every reason why this model cannot be built, one sentence each."""
        if len(self.depths) != len(self.widths) or not self.depths:
            yield f"`depths` has {len(self.depths)} stages, and `widths` {len(self.widths)}"
        if min((*self.depths, *self.widths, self.stem_width, self.classes), default=0) < 1:
            yield "`depths`, `widths`, `stem_width` and `classes` must be at least 1"
        elif self.bottleneck and any(width % 4 for width in self.widths):
            yield f"`widths` {list(self.widths)} must be multiples of 4 with bottlenecks"
        if prod(self.image) < 1:
            yield f"an image of {list(self.image)} has no pixel"


def with_image_positions(config: TransformerConfig) -> TransformerConfig:
    """The configuration of a model of images with as many positions as these have.

    One of tokens stays as it is.
    """
    if config.image is None:
        return config
    return replace(config, sequence=config.positions_of_image if config.patch > 0 else 1)
