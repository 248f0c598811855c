"""A head for other classes on the weights of a Hugging Face folder of images."""

import json
from collections.abc import Mapping

from windlass.models.config import TransformerConfig
from windlass.models.huggingface.families import Family, find_family
from windlass.models.huggingface.image_processor import ModelConfig
from windlass.models.huggingface.model_folder import ModelFolder, find_model_folder, is_huggingface
from windlass.models.huggingface.read_config import config_from_values

HEAD = ("head.projection.weight", "head.projection.bias")
"""Parameters of the projection to the classes."""


def classes_of(config: ModelConfig) -> int | None:
    """The classes of a model of images; None for a model of tokens."""
    if not isinstance(config, TransformerConfig):
        return config.classes
    return config.vocabulary if config.image is not None else None


def replaced_classes(config: ModelConfig) -> int | None:
    """The classes of the folder that a configuration was read from, if it has others now.

    None if its head has those of the folder, or there is no folder with weights.
    """
    wanted = classes_of(config)
    if wanted is None or not is_huggingface(config.name):
        return None
    folder = find_model_folder(config.name)
    if folder.weights is None:
        return None
    stored = _stored_classes(folder, config)
    return None if stored == wanted else stored


def with_classes(content: bytes, config: ModelConfig, family: Family) -> bytes:
    """A `config.json` with the classes of a configuration, numbered anew.

    Args:
        content: the file of the folder that the weights are from.
    """
    values, count = json.loads(content), classes_of(config)
    rules = [rule for rule in family.fields.values() if rule.names_each is not None]
    for rule in rules:
        names = {str(n): (rule.names_each or "").format(n=n) for n in range(count or 0)}
        values[rule.key] = names
        if rule.inverse is not None:
            values[rule.inverse] = {name: int(number) for number, name in names.items()}
    values.pop("num_labels", None)
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


def _stored_classes(folder: ModelFolder, config: ModelConfig) -> int | None:
    values: Mapping[str, object] = folder.read_config()
    family = find_family(values.get("model_type"))
    stored, _ = config_from_values(family, values, config.name, config.source)
    return None if stored is None else classes_of(stored)
