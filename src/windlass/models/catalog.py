"""Named models from `catalog.toml` (this module does not import torch, so it answers at once)."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from windlass.errors import ModelError, did_you_mean, did_you_mean_any, shorten
from windlass.models.config import RopeScaling, TransformerConfig
from windlass.models.huggingface.model_folder import is_huggingface
from windlass.models.huggingface.read_config import huggingface_config

MODEL_ARGUMENTS = (
    "layers", "width", "heads", "kv_heads", "ffn", "vocabulary", "sequence", "dropout",
    "split_blocks",
)  # fmt: skip
"""Fields of a catalog model's configuration that a request may change."""
_COUNTS = frozenset(MODEL_ARGUMENTS) - {"dropout", "split_blocks"}


def model_names() -> tuple[str, ...]:
    """All names in the catalog, small families first."""
    return tuple(_tables()["models"])


def model_config(name: str) -> TransformerConfig:
    """The configuration of a catalog model, or of a Hugging Face folder (`hf:DIR`).

    Raises:
        ModelError: no model has that name, or the folder's cannot be built.
    """
    if is_huggingface(name):
        return huggingface_config(name)
    entry = dict(_entry(name))
    for key in ("parameters", "also"):
        entry.pop(key, None)
    entry = {**_tables()["families"][entry.pop("family")], **entry}
    entry.setdefault("kv_heads", entry["heads"])
    entry.setdefault("ffn", 4 * entry["width"])
    if "rope_scaling" in entry:
        entry["rope_scaling"] = RopeScaling(**entry["rope_scaling"])
    if "window_blocks" in entry:
        entry["window_blocks"] = tuple(entry["window_blocks"])
    return TransformerConfig(name=name, **entry)


def apply_model_arguments(
    config: TransformerConfig, arguments: Mapping[str, int | float]
) -> TransformerConfig:
    """The configuration after some of its fields are changed.

    Dependent fields follow: the feed-forward width keeps its ratio to the width, and so does the
    width of all heads together, the rotary width its share of a head, and `kv_heads` stays equal to
    `heads` if it was.

    Raises:
        ModelError: the resulting configuration is invalid; lists all reasons at once.
    """
    errors = [
        f"unknown model argument `{name}`{did_you_mean(name, MODEL_ARGUMENTS)}"
        for name in arguments
        if name not in MODEL_ARGUMENTS
    ]
    valid = {name: value for name, value in arguments.items() if name in MODEL_ARGUMENTS}
    changes: dict[str, int | float] = {
        name: int(value) if name in _COUNTS else value for name, value in valid.items()
    }
    new = replace(config, **changes)  # type: ignore[arg-type]  # counts are whole
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
    errors += new.errors()
    if errors:
        raise ModelError(
            f"model `{config.name}` cannot be built with these arguments:\n"
            + "\n".join(f"  {error}" for error in errors)
        )
    return new


def is_causal(name: str) -> bool:
    """Whether a model predicts the next token; true for all but encoders with a configuration."""
    return not has_config(name) or model_config(name).causal


def has_config(name: str) -> bool:
    """Whether a model is one of the catalog or of a Hugging Face folder, so that sizes say all."""
    return is_huggingface(name) or name in model_names()


def is_users_own(name: str) -> bool:
    """Whether a name is `file.py:function`, a function in a file of the user's."""
    return not is_huggingface(name) and (":" in name or name.endswith(".py"))


def published_parameter_count(name: str) -> float | None:
    """Number of parameters, in the digits that were published; None for our own models.

    Raises:
        ModelError: no model has that name.
    """
    return _entry(name).get("parameters")


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
