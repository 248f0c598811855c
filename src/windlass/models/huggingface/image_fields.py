"""Images in a `config.json`: channels and sides, which are one field of ours, and names of classes.

Shape letters: c channels, h and w pixels.
"""

import re
from collections.abc import Mapping
from typing import Any

from windlass.models.config import TransformerConfig
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.images.image_config import ResNetConfig

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
