"""Pixels as the numbers that a model takes, flipped and moved in training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.data.keyed_choices import keyed_number

Images = npt.NDArray[np.uint8]
"""Pixels `[image c h w]`."""
Numbers = npt.NDArray[np.float32]

_FLIP, _ROW, _COLUMN = range(3)
"""Last number of the keys of what is drawn for a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelScale:
    """How pixels become numbers: `(pixel / 255 - mean) / std`, by channel.

    In training an image may be mirrored, and moved by some pixels over a border of zeros, as a
    function of the seed, the step and the sample alone. Source of both: He et al. 2015,
    arXiv:1512.03385, section 4.2.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flips: bool = False
    """Whether half of the training images are mirrored."""
    border: int = 0
    """Most pixels by which a training image is moved, along each side."""

    def numbers(self, images: Images) -> Numbers:
        """Images `[b c h w]` as numbers of the same shape."""
        mean, std = (
            np.array(each, dtype=np.float32)[:, None, None] for each in (self.mean, self.std)
        )
        return (images.astype(np.float32) / np.float32(255) - mean) / std

    def training_numbers(self, images: Images, keys: Sequence[tuple[int, ...]]) -> Numbers:
        """The same of images in training.

        Args:
            images: `[b c h w]`.
            keys: what the flip and the move of each image are drawn from.
        """
        numbers = self.numbers(images)
        if self.flips:
            for row, key in zip(numbers, keys, strict=True):
                if keyed_number(2, *key, _FLIP):
                    row[:] = row[:, :, ::-1].copy()
        if self.border:
            for row, key in zip(numbers, keys, strict=True):
                row[:] = self._moved(row, key)
        return numbers

    def _moved(self, row: Numbers, key: tuple[int, ...]) -> Numbers:
        """An image `[c h w]`, cut out of itself with a border."""
        border, (_, height, width) = self.border, row.shape
        padded = np.pad(row, ((0, 0), (border, border), (border, border)))
        top, left = (keyed_number(2 * border + 1, *key, side) for side in (_ROW, _COLUMN))
        return padded[:, top : top + height, left : left + width]


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images `[image c h w]`, of pixels up to 1."""
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, dtype=np.int64)
        for start in range(0, len(images), _ROWS):
            part = images[start : start + _ROWS, channel]
            counts += np.bincount(part.reshape(-1), minlength=256)
        shares = counts / counts.sum()
        mean = float(shares @ levels)
        means.append(mean)
        # A channel of one colour has no deviation to divide by.
        stds.append(float(np.sqrt(shares @ (levels - mean) ** 2)) or 1.0)
    return tuple(means), tuple(stds)


_ROWS = 256
"""Images that are counted at once."""
