"""What the file beside a Hugging Face model says of its images: their side, mean and deviation.

Shape letters: c channels, h and w pixels.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.document import read_json_object
from windlass.errors import ModelError
from windlass.models.config import TransformerConfig
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.images.image_config import ResNetConfig

PROCESSOR_FILE = "preprocessor_config.json"
_LEVELS = 255
"""Value of the brightest pixel; ours are divided by it before the mean is subtracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """How images become what a model takes, as `(pixel / 255 - mean) / std`."""

    sides: tuple[int, int] | None
    """Height and width in pixels; None if they are not said."""
    mean: tuple[float, ...]
    """Mean of each channel, where pixels reach up to 1; empty if it is not said."""
    std: tuple[float, ...]


def image_processor(name: str) -> ImageProcessor | None:
    """What the folder of a model says of its images; None if it says nothing.

    Raises:
        ModelError: there is no such model, or the file cannot be read.
    """
    path = find_model_folder(name).config.with_name(PROCESSOR_FILE)
    if not path.is_file():
        return None
    content = read_json_object(path, ModelError)
    try:
        mean, std = _normalization(content)
        return ImageProcessor(sides=_sides(content), mean=mean, std=std)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"`{path}` cannot be read: {error}") from None


def _sides(content: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of what the model takes: those that are cut out, else those scaled to."""
    crops = content.get("do_center_crop", "crop_size" in content)
    size = content.get("crop_size") if crops else None
    size = content.get("size") if size is None else size
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        both = (size.get("height", edge), size.get("width", edge))
    else:
        both = (size, size)
    if None in both:
        return None
    height, width = (int(side) for side in both)
    return height, width


def _normalization(content: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, for pixels that are divided by 255."""
    factor = float(content.get("rescale_factor") or 1 / _LEVELS)
    if content.get("do_rescale") is False:
        factor = 1.0
    mean, std = (tuple(map(float, content.get(f"image_{each}") or ())) for each in ("mean", "std"))
    if content.get("do_normalize") is False:
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    if any(value <= 0 for value in std) or len(mean) != len(std):
        raise ValueError(f"`image_mean` {mean} and `image_std` {std} do not go together")
    # (factor * pixel - mean) / std, with both sides of the fraction divided by 255 * factor.
    scale = _LEVELS * factor
    if scale == 1:
        return mean, std
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


ModelConfig = TransformerConfig | ResNetConfig
"""A configuration of ours that a `config.json` may describe."""
IMAGE = "image."
"""Begins the names of the parts of the field `image`."""
_UNNAMED = re.compile(r"LABEL_\d+")
"""What `transformers` calls a class without a name."""
_USUAL_SIDE = 224
"""Pixels of a side where a `config.json` says none, as a residual network's."""


def join_image(entry: dict[str, Any]) -> None:
    """Makes one field `(c, h, w)` of those that say which images a model takes, if it takes some.

    Args:
        entry: fields by name, changed in place.
    """
    parts = {name: entry.pop(name) for name in tuple(entry) if name.startswith(IMAGE)}
    if parts:
        side = parts.get(f"{IMAGE}side", _USUAL_SIDE)
        sides = (side, side) if isinstance(side, int) else tuple(side)
        entry["image"] = (parts[f"{IMAGE}channels"], *sides)


def image_part(config: ModelConfig, part: str) -> int | list[int] | None:
    """The channels or the sides of the images that a model takes; None if it takes tokens.

    Args:
        part: `channels`, or `side`, which is one number if height and width are equal.
    """
    if config.image is None:
        return None
    channels, height, width = config.image
    if part == "channels":
        return channels
    return height if height == width else [height, width]


def class_names(name: str) -> tuple[str, ...] | None:
    """The names of the classes of a Hugging Face model in order; None if they have no own names.

    Raises:
        ModelError: a Hugging Face folder cannot be read.
    """
    if not is_huggingface(name):
        return None
    table = find_model_folder(name).read_config().get("id2label")
    if not isinstance(table, dict) or not all(number.isdecimal() for number in table):
        return None
    names = tuple(str(table[number]) for number in sorted(table, key=int))
    return None if all(_UNNAMED.fullmatch(each) for each in names) else names


def count_names(values: Mapping[str, Any], key: str) -> int | None:
    """Entries of a table of names; None if there is no such table.

    Args:
        values: a file's values, by keys with dots.
    """
    return sum(name.startswith(f"{key}.") for name in values) or None
