"""Named models from `catalog.toml` (this module does not import torch, so it answers at once)."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from windlass.errors import ModelError, did_you_mean, did_you_mean_any, shorten
from windlass.models.config import ExpertConfig, TransformerConfig
from windlass.models.experts.arguments import (
    EXPERT_ARGUMENTS,
    apply_expert_arguments,
    unused_argument,
)
from windlass.models.huggingface.families import model_types, writes_text
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.huggingface.read_config import (
    huggingface_config,
    huggingface_resnet,
    is_huggingface_resnet,
    keys_of_transformers,
)
from windlass.models.images.image_config import ResNetConfig, with_image_positions
from windlass.models.positions.rope_scaling import RopeScaling

ModelArgument = int | float | str | tuple[int, ...]
"""A value that a request gives for an argument of a model."""

MODEL_ARGUMENTS = (
    "layers", "width", "heads", "kv_heads", "ffn", "vocabulary", "sequence", "dropout",
    "split_blocks", "sentence_head", "input_shape", "classes", "patch", *EXPERT_ARGUMENTS,
)  # fmt: skip
"""Fields of a catalog model's configuration that a request may change."""
_COUNTS = frozenset(MODEL_ARGUMENTS) - {
    "dropout", "split_blocks", "sentence_head", "input_shape", *EXPERT_ARGUMENTS,
}  # fmt: skip

_OF_IMAGES = {"input_shape": "image", "classes": "vocabulary"}
"""Arguments of models that take images, and the fields that they set."""
_OF_TEXT = {"classes": "text_classes"}
"""The same of models that take tokens."""
_NOT_OF_IMAGES = ("vocabulary", "sequence")
_RESIDUAL = "resnet"
"""The family of residual networks."""


def model_names() -> tuple[str, ...]:
    """All names in the catalog, small families first."""
    return tuple(_tables()["models"])


def text_model_names() -> tuple[str, ...]:
    """The names of those that take tokens."""
    return tuple(name for name in model_names() if not takes_images(name))


def model_config(name: str) -> TransformerConfig:
    """The configuration of a catalog transformer, or of a Hugging Face folder (`hf:DIR`).

    Raises:
        ModelError: no model has that name, the folder's cannot be built, or it is no transformer.
    """
    if is_huggingface(name):
        return huggingface_config(name)
    entry = _whole_entry(name)
    if entry.pop("family") == _RESIDUAL:
        raise ModelError(f"`{name}` is a residual network, not a transformer; name a transformer")
    entry.setdefault("kv_heads", entry["heads"])
    entry.setdefault("ffn", 4 * entry["width"])
    if "image" in entry:
        entry |= {"image": tuple(entry["image"]), "vocabulary": entry.pop("classes")}
        return with_image_positions(TransformerConfig(name=name, sequence=1, **entry))
    if "rope_scaling" in entry:
        entry["rope_scaling"] = RopeScaling(**entry["rope_scaling"])
    if "experts" in entry:
        entry["experts"] = ExpertConfig(**entry["experts"])
    if "window_blocks" in entry:
        entry["window_blocks"] = tuple(entry["window_blocks"])
    return TransformerConfig(name=name, **entry)


def resnet_config(name: str) -> ResNetConfig | None:
    """The configuration of a residual network, by a name or `hf:DIR`; None for any other model.

    Raises:
        ModelError: there is no such folder, or its model cannot be built.
    """
    if is_huggingface(name):
        return huggingface_resnet(name)
    if not is_residual(name):
        return None
    entry = _whole_entry(name)
    del entry["family"]
    lists = {key: tuple(entry[key]) for key in ("image", "depths", "widths")}
    return ResNetConfig(name=name, **{**entry, **lists})


def is_residual(name: str) -> bool:
    """Whether a name is that of a residual network of the catalog, or of a Hugging Face folder.

    Raises:
        ModelError: there is no such folder.
    """
    if is_huggingface(name):
        return is_huggingface_resnet(name)
    return _tables()["models"].get(name, {}).get("family") == _RESIDUAL


def apply_resnet_arguments(
    config: ResNetConfig, arguments: Mapping[str, ModelArgument]
) -> ResNetConfig:
    """The configuration of a residual network for other images or classes.

    Raises:
        ModelError: an argument is none of it, or it cannot be built with them.
    """
    known = ("input_shape", "classes")
    errors = [
        f"`{name}` is none of a residual network; it takes "
        f"{' and '.join(f'`model.{each}`' for each in known)}"
        for name in arguments
        if name not in known
    ]
    shape = arguments.get("input_shape", config.image)
    if not isinstance(shape, tuple) or len(shape) != len(config.image):
        errors.append(f"`input_shape` is {shape}, must be channels, height and width")
    if errors:
        raise _unbuildable(config.name, errors)
    changes: dict[str, Any] = {"image": shape, "classes": arguments.get("classes", config.classes)}
    new = replace(config, **changes)
    if errors := list(new.errors()):
        raise _unbuildable(config.name, errors)
    return new


def _whole_entry(name: str) -> dict[str, Any]:
    """What the catalog says of a model, with what its family says."""
    entry = {
        key: value
        for key, value in _entry(name).items()
        if key not in ("parameters", "active_parameters", "also")
    }
    return {**_tables()["families"][entry["family"]], **entry}


def apply_model_arguments(
    config: TransformerConfig, arguments: Mapping[str, ModelArgument]
) -> TransformerConfig:
    """The configuration after some of its fields are changed.

    Dependent fields follow: the feed-forward width keeps its ratio to the width, and so does the
    width of all heads together, the rotary width its share of a head, and `kv_heads` stays equal to
    `heads` if it was.

    Raises:
        ModelError: the resulting configuration is invalid; lists all reasons at once.
    """
    unknown = [
        f"unknown model argument `{name}`{did_you_mean(name, MODEL_ARGUMENTS)}"
        for name in arguments
        if name not in MODEL_ARGUMENTS
    ]
    errors = list(_misplaced_arguments(config, arguments))
    valid = {name: value for name, value in arguments.items() if name in MODEL_ARGUMENTS}
    experts: dict[str, Any] = {name: valid.pop(name) for name in EXPERT_ARGUMENTS if name in valid}
    if unused := unused_argument(config, experts):
        errors.append(
            f"`{unused}` is of experts, of which this model has none; set `model.experts`"
        )
    fields = _OF_TEXT if config.image is None else _OF_IMAGES
    changes: dict[str, Any] = {
        fields.get(name, name): int(value) if name in _COUNTS else value  # type: ignore[arg-type]  # counts are numbers
        for name, value in valid.items()
    }
    if "text_classes" in changes:
        changes.setdefault("sentence_head", False)
    if errors:
        raise _unbuildable(config.name, [*unknown, *errors])
    new = with_image_positions(replace(config, **changes))
    if "ffn" not in valid:
        new = replace(new, ffn=round(config.ffn * new.width / config.width))
    if "kv_heads" not in valid and config.kv_heads == config.heads:
        new = replace(new, kv_heads=new.heads)
    if config.head_dim is not None and new.heads > 0:
        share = config.head_dim * config.heads / config.width
        new = replace(new, head_dim=max(2, 2 * round(share * new.width / new.heads / 2)))
    if config.rotary_width is not None and new.heads > 0:
        share = config.rotary_width / config.head_width
        new = replace(new, rotary_width=max(2, 2 * round(share * new.head_width / 2)))
    new = replace(new, experts=apply_expert_arguments(config, experts, new.width))
    if errors := [*unknown, *new.errors()]:
        raise _unbuildable(config.name, errors)
    return new


def _misplaced_arguments(
    config: TransformerConfig, arguments: Mapping[str, ModelArgument]
) -> Iterator[str]:
    """Arguments of models that take images, for one of tokens, and the other way round."""
    takes, instead = "tokens", "leave it out"
    misplaced: tuple[str, ...] = ("input_shape", "patch")
    if config.image is not None:
        takes, misplaced, instead = "images", _NOT_OF_IMAGES, "set `model.classes` or `model.patch`"
    for name in misplaced:
        if name in arguments:
            yield f"`{name}` is none of a model that takes {takes}; {instead}"
    shape = arguments.get("input_shape")
    if config.image is not None and isinstance(shape, tuple) and len(shape) != len(config.image):
        yield (
            f"`input_shape` is {list(shape)}, must be channels, height and width, such as "
            f"{list(config.image)}"
        )


def _unbuildable(name: str, errors: list[str]) -> ModelError:
    return ModelError(
        f"model `{name}` cannot be built with these arguments:\n"
        + "\n".join(f"  {error}" for error in errors)
    )


def is_causal(name: str) -> bool:
    """Whether a model predicts the next token; true for all but encoders with a configuration."""
    if is_residual(name):
        return False
    if runs_by_transformers(name):
        return writes_text(name)
    return not has_config(name) or model_config(name).causal


def predicts_pairs(name: str, arguments: Mapping[str, ModelArgument]) -> bool:
    """Whether a model has a sentence head, so that it takes pairs of sentences."""
    if not has_config(name):
        return False
    own = arguments.get("sentence_head")
    return model_config(name).sentence_head if own is None else bool(own)


def predicts_text_classes(name: str, arguments: Mapping[str, ModelArgument]) -> bool:
    """Whether a model that takes tokens says one class of each text."""
    if not has_config(name) or takes_images(name):
        return False
    return "classes" in arguments or model_config(name).text_classes is not None


def takes_images(name: str) -> bool:
    """Whether a model with a configuration takes images, not tokens."""
    if is_residual(name):
        return True
    return has_config(name) and model_config(name).image is not None


def runs_by_transformers(name: str) -> bool:
    """Whether a model is one of Hugging Face that our layers do not compute, and its own code does.

    Raises:
        ModelError: there is no such folder.
    """
    if not is_huggingface(name):
        return False
    model_type = find_model_folder(name).read_config().get("model_type")
    return model_type not in model_types() or bool(keys_of_transformers(name))


def has_config(name: str) -> bool:
    """Whether a model is a transformer of the catalog or of a Hugging Face folder."""
    if is_huggingface(name):
        return not runs_by_transformers(name) and not is_residual(name)
    return name in model_names() and not is_residual(name)


def published_parameter_count(name: str) -> float | None:
    """Number of parameters, in the digits that were published; None for our own models.

    Raises:
        ModelError: no model has that name.
    """
    return _entry(name).get("parameters")


def published_active_parameters(name: str) -> float | None:
    """Number of parameters that one token meets, as published; None for a dense model or our own.

    Raises:
        ModelError: no model has that name.
    """
    return _entry(name).get("active_parameters")


def _entry(name: str) -> Mapping[str, Any]:
    models = _tables()["models"]
    if name not in models:
        raise ModelError(
            f"unknown model `{shorten(name)}`{_suggestion(name)}; `windlass models` lists all, a "
            "file of your own is named `file.py:function`, and a Hugging Face folder `hf:DIR`"
        )
    return models[name]


def _suggestion(name: str) -> str:
    """Which models may be meant: by another name of theirs, as a family, or by spelling."""
    models = _tables()["models"]
    wanted = _plain(name.rpartition("/")[2])
    also = [known for known in models if wanted in map(_plain, models[known].get("also", ()))]
    family = [known for known in models if wanted and _plain(known).startswith(wanted)]
    return did_you_mean_any(also or family) or did_you_mean(name, models)


def _plain(name: str) -> str:
    """A name in small letters and digits alone."""
    return re.sub("[^a-z0-9]", "", name.lower())


@cache
def _tables() -> Mapping[str, Any]:
    """The parsed catalog file; `Any` because its entries are checked when a config is made."""
    text = files("windlass.models").joinpath("catalog.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
