"""The models known by name (no torch here: it must answer at once)."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from windlass.errors import ModelError, did_you_mean
from windlass.models.config import TransformerShape


def names() -> tuple[str, ...]:
    """All known names, small families first."""
    return tuple(_tables()["models"])


def shape(name: str) -> TransformerShape:
    """The shape of a model known by name.

    Raises:
        ModelError: no model has that name.
    """
    entry = dict(_entry(name))
    entry.pop("parameters", None)
    entry = {**_tables()["families"][entry.pop("family")], **entry}
    entry.setdefault("kv_heads", entry["heads"])
    entry.setdefault("hidden", 4 * entry["width"])
    return TransformerShape(name=name, **entry)


def causal(name: str) -> bool:
    """Whether a model predicts next tokens, as all do but encoders of the catalogue."""
    return name not in names() or shape(name).causal


def published_parameters(name: str) -> float | None:
    """Parameters as published, in the digits published; None for our own models.

    Raises:
        ModelError: no model has that name.
    """
    return _entry(name).get("parameters")


def _entry(name: str) -> Mapping[str, Any]:
    models = _tables()["models"]
    if name not in models:
        raise ModelError(
            f"unknown model `{name}`{did_you_mean(name, models)}; known are {', '.join(models)}; "
            "a file of your own is named `file.py:function`"
        )
    return models[name]


@cache
def _tables() -> Mapping[str, Any]:
    """The catalogue file; `Any` because it is the border where data becomes shapes."""
    text = files("windlass.models").joinpath("catalog.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
