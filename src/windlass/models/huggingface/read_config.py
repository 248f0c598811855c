"""A `config.json` as our configuration; what our layers cannot express is refused by name."""

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from windlass.errors import ModelError, shorten
from windlass.models.config import ExpertConfig, TransformerConfig
from windlass.models.huggingface.families import (
    Family,
    FieldRule,
    find_family,
    model_types,
)
from windlass.models.huggingface.image_processor import (
    IMAGE,
    ModelConfig,
    count_names,
    image_processor,
    join_image,
)
from windlass.models.huggingface.model_folder import find_model_folder
from windlass.models.images.image_config import ResNetConfig, with_image_positions
from windlass.models.positions.rope_scaling import RopeScaling
from windlass.schema import MAX_LAYERS, MAX_SIZE

_KINDS: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[int, ...]: "whole numbers",
    int | tuple[int, ...]: "a whole number, or height and width",
}
SCALING_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_sequence", "low_frequency", "high_frequency"),
    "yarn": (
        "factor", "original_sequence", "beta_fast", "beta_slow", "attention_factor", "truncate",
    ),
}  # fmt: skip
"""What each type of scaled positions reads."""
_SCALING = "rope_scaling."
_QUANTIZATION = "quantization_config"
_EXPERTS = "experts."
_FIELD_TYPES = (
    {field.name: field.type for field in (*fields(ResNetConfig), *fields(TransformerConfig))}
    | {f"{_SCALING}{field.name}": field.type for field in fields(RopeScaling)}
    | {f"{_EXPERTS}{field.name}": field.type for field in fields(ExpertConfig)}
    | {f"{IMAGE}channels": int, f"{IMAGE}side": int | tuple[int, ...]}
)
_LAYER_COUNTS = ("layers", "depths")
_ABOVE_ZERO = ("rotary_base", "window_rotary_base", "attention_softcap", "logit_softcap")
_REQUIRED = ("layers", "width", "heads", "vocabulary")


def huggingface_config(name: str) -> TransformerConfig:
    """The configuration of a transformer of Hugging Face.

    Dropout is a setting of training, not of the model: it is 0 unless `model.dropout` says more.

    Raises:
        ModelError: there is no such model, its type is unknown, it is no transformer, or it is of a
            shape that cannot be built; lists all reasons at once.
    """
    config = _read_config(name)
    if not isinstance(config, TransformerConfig):
        raise ModelError(f"`{name}` is a residual network, not a transformer; name a transformer")
    return config


def huggingface_resnet(name: str) -> ResNetConfig | None:
    """The configuration of a residual network of Hugging Face; None for a transformer.

    Its images are those that `preprocessor_config.json` beside it asks for, or have 224 pixels a
    side.

    Raises:
        ModelError: as `huggingface_config` says.
    """
    config = _read_config(name)
    if not isinstance(config, ResNetConfig):
        return None
    processor = image_processor(name)
    if processor is None or processor.sides is None:
        return config
    return replace(config, image=(config.image[0], *processor.sides))


def is_huggingface_resnet(name: str) -> bool:
    """Whether a model of Hugging Face is a residual network, by its `model_type` alone.

    Raises:
        ModelError: there is no such model.
    """
    model_type = find_model_folder(name).read_config().get("model_type")
    return model_type in model_types() and find_family(model_type).network == "resnet"


def keys_of_transformers(name: str) -> tuple[str, ...]:
    """The keys of a known type that transformers computes and our layers do not.

    There are none where transformers is not installed, or does not know one of them either: then
    all are refused.

    Raises:
        ModelError: there is no such folder.
    """
    content = find_model_folder(name).read_config()
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types():
        return ()
    family, values = find_family(model_type), dict(_flatten(content))
    keys = dict.fromkeys((*_other_values(family, values), *_strange_keys(family, values)))
    for field, rule in family.fields.items():
        key, value = _value_of(rule, values)
        is_choice = rule.values is not None and isinstance(value, str)
        if is_choice and _our_value(field, rule.values or {}, value) is None:
            keys[key] = None
    heads = {key.partition(".")[0] for key in keys}
    if not keys or _QUANTIZATION in content or importlib.util.find_spec("transformers") is None:
        return ()
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}
    return tuple(keys) if heads <= known.keys() else ()


def _read_config(name: str) -> ModelConfig:
    """The configuration of a model of Hugging Face."""
    folder = find_model_folder(name)
    content = folder.read_config()
    try:
        family = find_family(content.get("model_type"))
    except ModelError as error:
        raise ModelError(f"{folder.config}: {error}") from None
    config, errors = config_from_values(family, content, name, str(folder.config))
    if errors or config is None:
        heading = f"{folder.config}: this `{family.model_type}` cannot be built as it is:"
        raise ModelError("\n  ".join([heading, *errors]))
    return config


def config_from_values(
    family: Family, content: Mapping[str, Any], name: str, source: str
) -> tuple[ModelConfig | None, list[str]]:
    """The configuration that a `config.json` describes, and all that is wrong with it.

    Returns:
        No configuration if a field cannot be read.
    """
    values = dict(_flatten(content))
    errors = [*_refused_values(family, values), *_unknown_keys(family, values)]
    entry, missing = _read_fields(family, values)
    if missing:
        return None, [*errors, *missing]
    config: ModelConfig
    if family.network == "resnet":
        config = ResNetConfig(name=name, source=source, **entry)
    else:
        config = _without_usual(TransformerConfig(name=name, source=source, **entry))
        config = with_image_positions(config)
    return config, [*errors, *config.errors()]


def _read_fields(family: Family, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of our configuration, and what is wrong with those that cannot be read."""
    entry: dict[str, Any] = dict(family.fixed)
    shares: dict[str, float] = {}
    errors = []
    for name, rule in family.fields.items():
        key, value = _value_of(rule, values)
        if rule.values is not None and value is not None:
            known, value = value, _our_value(name, rule.values, value)
            if value is None:
                expected = ", ".join(f"`{choice}`" for choice in rule.values)
                errors.append(f"`{key}` is `{shorten(_as_key(known))}`; can be read: {expected}")
        elif value is not None and (kind := _wrong_kind(name, rule, value) or _beyond(name, value)):
            errors.append(f"`{key}` is {shorten(json.dumps(value))}, must be {kind}")
        elif rule.share_of is not None:
            shares[name] = value
            continue
        if value is not None:
            entry[name] = tuple(value) if isinstance(value, list) else value
        elif name in _REQUIRED and rule.values is None:
            errors.append(f"`{key}` is missing")
    entry |= _head_fields(family, values)
    _join_rope_scaling(entry)
    _join_experts(entry)
    if errors:
        return entry, errors
    join_image(entry)
    if family.network == "transformer":
        _complete_transformer(family, entry, shares)
    return entry, errors


def _head_fields(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the class of a model sets; of classes, how many the file names."""
    return {
        field: count_names(values, value["names"]) or values.get("num_labels") or value["usual"]
        if isinstance(value, dict)
        else value
        for field, value in family.head_fields(values.get("architectures")).items()
    }


def _complete_transformer(
    family: Family, entry: dict[str, Any], shares: Mapping[str, float]
) -> None:
    """Adds the fields of a transformer that follow from others, in place."""
    _halve_windows(family, entry)
    entry.setdefault("ffn", 4 * entry["width"])
    entry.setdefault("kv_heads", entry["heads"])
    if "image" in entry:
        entry.setdefault("sequence", 1)
    base = TransformerConfig(name="", **entry)
    for name, share in () if base.errors() else shares.items():
        entry[name] = int(getattr(base, str(family.fields[name].share_of)) * share)


def _without_usual(config: TransformerConfig) -> TransformerConfig:
    """The same configuration, with None for sizes of heads that None would give, too."""
    if config.heads > 0 and config.head_dim == config.width / config.heads:
        config = replace(config, head_dim=None)
    if config.heads > 0 and config.score_width == config.head_width:
        config = replace(config, score_width=None)
    return config


def _join_rope_scaling(entry: dict[str, Any]) -> None:
    """Makes one field of those that say how rotary angles are scaled, if they are."""
    parts = {name: entry.pop(name) for name in tuple(entry) if name.startswith(_SCALING)}
    if kind := parts.get(f"{_SCALING}type"):
        known = {f"{_SCALING}{number}" for number in ("type", *SCALING_NUMBERS[kind])}
        scaling = {name.removeprefix(_SCALING): parts[name] for name in parts.keys() & known}
        entry["rope_scaling"] = RopeScaling(**{"factor": 1.0, **scaling})


def _halve_windows(family: Family, entry: dict[str, Any]) -> None:
    """Makes distances, counted from 1, of windows that count both sides."""
    for name, rule in family.fields.items():
        if rule.counts_both_sides and entry.get(name) is not None:
            entry[name] = entry[name] // 2 + 1


def _join_experts(entry: dict[str, Any]) -> None:
    """Makes one field of those that say which experts a block has, if it has some."""
    parts = {name: entry.pop(name) for name in tuple(entry) if name.startswith(_EXPERTS)}
    if parts:
        named = {name.removeprefix(_EXPERTS): value for name, value in parts.items()}
        entry["experts"] = ExpertConfig(**named)


def _value_of(rule: FieldRule, values: Mapping[str, Any]) -> tuple[str, Any]:
    """The key of a field that stands in a `config.json`, and its value or the default."""
    if rule.names_each is not None:
        return rule.key, count_names(values, rule.key) or rule.default
    for key in rule.keys:
        if values.get(key) is not None or (rule.nullable and key in values):
            return key, values[key]
    return rule.key, rule.default


def _our_value(name: str, known: Mapping[str, Any], value: object) -> Any:  # noqa: ANN401  as the table says
    """Our value for one of theirs, or for each of a list; None if one is unknown."""
    if not isinstance(value, list) or "tuple" not in str(_FIELD_TYPES[name]):
        return known.get(_as_key(value))
    each = tuple(known.get(_as_key(part)) for part in value)
    return None if None in each else each


def _refused_values(family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    if any(key.startswith(f"{_QUANTIZATION}.") for key in values):
        method = values.get(f"{_QUANTIZATION}.quant_method", "some way")
        yield (
            f"`{_QUANTIZATION}`: its weights are quantized by {shorten(json.dumps(method))}; take "
            "the model that they were quantized from"
        )
    for key in _other_values(family, values):
        choices = " or ".join(f"`{json.dumps(choice)}`" for choice in (*family.only[key], None))
        yield (
            f"`{key}` is {json.dumps(values[key])}, which cannot be computed here; only {choices} "
            "can"
        )


def _other_values(family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    """Keys with another value than our layers compute."""
    for key, allowed in family.only.items():
        if values.get(key) is not None and values[key] not in allowed:
            yield key


def _unknown_keys(family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    """What is said of each of `_strange_keys`."""
    for key in _strange_keys(family, values):
        yield (
            f"`{key}` = {json.dumps(values[key])} is not known for `{family.model_type}`; if it "
            "does not change what the model computes, remove it from a copy of the file"
        )


def _strange_keys(family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    """Keys that may change what the model computes, and that no table knows.

    transformers computes without a key that it does not know, and a text changes no sum; a number
    or a switch may be of code that came with the model.
    """
    known = family.unread_keys | family.only.keys()
    known = known.union(*(rule.keys for rule in family.fields.values()))
    refused = {key.partition(".")[0] for key in _other_values(family, values)}
    for key, value in values.items():
        parts = key.split(".")
        if parts[0] == _QUANTIZATION:
            continue  # said already
        heads = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if heads & (known | refused) or _is_harmless(family, key, value):
            continue
        yield key


def _is_harmless(family: Family, key: str, value: object) -> bool:
    """Whether a key that no table reads changes nothing."""
    parts = value if isinstance(value, list) else [value]
    if key in family.harmless:
        return all(part in family.harmless[key] for part in parts)
    return value in (None, False, {}) or all(isinstance(part, str) for part in parts)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, and their values, of a table and the tables in it."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_key(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _wrong_kind(name: str, rule: FieldRule, value: object) -> str | None:
    """What a value must be and is not; None if it is right."""
    wanted = float if rule.share_of else _FIELD_TYPES[name]
    if isinstance(value, list) and wanted in (tuple[int, ...], int | tuple[int, ...]):
        length = 2 if wanted != tuple[int, ...] else len(value)
        right = len(value) == length and all(type(each) is int for each in value)
        return None if right else _KINDS[wanted]
    if wanted == tuple[int, ...]:
        return _KINDS[wanted]
    wanted = int if wanted == int | tuple[int, ...] else wanted
    kind = next((kind for kind in (bool, int, float) if wanted in (kind, kind | None)), None)
    if kind is None:
        return None
    right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    return None if right and isinstance(value, bool) == (kind is bool) else _KINDS[kind]


def _beyond(name: str, value: object) -> str | None:
    """What numbers may be, if one is not; no model has larger ones."""
    most = MAX_LAYERS if name in _LAYER_COUNTS else MAX_SIZE
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            return "a finite number"
        if isinstance(number, int) and number > most:
            return f"at most {most}"
        # The root of a negative sum, and a power or a share of nothing, are no numbers.
        if name == "norm_epsilon" and isinstance(number, int | float) and number < 0:
            return "at least 0"
        if name in _ABOVE_ZERO and isinstance(number, int | float) and number <= 0:
            return "above 0"
    return None
