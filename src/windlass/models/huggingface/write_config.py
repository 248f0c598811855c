"""Our configuration as a `config.json`, the inverse of reading one."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from windlass.errors import ModelError
from windlass.models.config import TransformerConfig
from windlass.models.huggingface.families import Family, FieldRule, find_family, model_types
from windlass.models.huggingface.image_processor import IMAGE, ModelConfig, image_part
from windlass.models.huggingface.read_config import SCALING_NUMBERS, config_from_values
from windlass.models.images.image_config import ResNetConfig
from windlass.models.positions.rope_scaling import RopeScaling

NOT_SHAPE = ("name", "source", "dropout", "split_blocks", "sparsity")
"""Fields that no `config.json` says, because they do not change what a trained model computes."""


_TRAINING_OF_EXPERTS: Mapping[str, Any] = {"balance_loss": 0.0}
"""Fields of experts that do not change what a trained model computes."""


def config_content(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family of a model of ours, and the `config.json` that it is read from as it is.

    Raises:
        ModelError: no type of Hugging Face has this shape.
    """
    # A type that is like another one has fewer shapes, so the other one comes first.
    for family in sorted(map(find_family, model_types()), key=lambda family: family.is_like or ""):
        content = _content(family, config)
        if content is not None and is_read_as(family, content, config):
            return family, content
    raise ModelError(
        f"`{config.name}` has a shape that no `model_type` of Hugging Face known here has; export "
        "it as one safetensors file (`--to FILE.safetensors`)"
    )


def _content(family: Family, config: ModelConfig) -> dict[str, Any] | None:
    """The keys of a family for a configuration; None if it cannot be of that family."""
    if (family.network == "resnet") != isinstance(config, ResNetConfig):
        return None
    if any(_field(config, name) != value for name, value in family.fixed.items()):
        return None
    scaling = config.rope_scaling if isinstance(config, TransformerConfig) else None
    content: dict[str, Any] = {
        "architectures": [family.architecture_of(config)],
        "model_type": family.model_type,
        **dict.fromkeys(family.null_keys),
    }
    for name, rule in family.fields.items():
        ours = _field(config, name)
        value = _their_value(rule, _field(config, rule.of or name), config)
        if value is None and ours is not None:
            return None
        for key in _written_keys(name, rule, scaling):
            _put(content, key, value)
        if rule.inverse is not None:
            _put(content, rule.inverse, {each: int(number) for number, each in value.items()})
    _put_class_names(family, content, config)
    for key, allowed in family.only.items():
        if allowed and key.partition(".")[0] in (key, *content):
            _put(content, key, allowed[0])
    return content | {"dtype": "float32"}


def _put_class_names(family: Family, content: dict[str, Any], config: ModelConfig) -> None:
    """Names the classes of texts as `transformers` does without names, in place."""
    for name, value in family.head_fields(content["architectures"]).items():
        if isinstance(value, dict):
            labels = [f"LABEL_{number}" for number in range(_field(config, name))]
            content[value["names"]] = {str(n): label for n, label in enumerate(labels)}
            content[value["inverse"]] = {label: n for n, label in enumerate(labels)}


def _field(config: ModelConfig, name: str) -> Any:  # noqa: ANN401  any field
    """A field or property; a dot leads into one that may be None."""
    if name.startswith(IMAGE):
        return image_part(config, name.removeprefix(IMAGE))
    value: Any = config
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _their_value(rule: FieldRule, value: Any, config: ModelConfig) -> Any:  # noqa: ANN401
    if rule.names_each is not None:
        return {str(n): rule.names_each.format(n=n) for n in range(value)}
    if rule.share_of is not None:
        return value / getattr(config, rule.share_of)
    if rule.counts_both_sides and value is not None:
        return 2 * (value - 1)
    if rule.values is None:
        return list(value) if isinstance(value, tuple) else value
    if isinstance(value, tuple):
        return [_key_of(rule.values, each) for each in value]
    return _key_of(rule.values, value)


def _key_of(values: Mapping[str, Any], value: Any) -> Any:  # noqa: ANN401  any JSON
    """Their value for one of ours; an empty one of ours stands for None."""
    wanted = "" if value is None else value
    theirs = next((key for key, ours in values.items() if ours == wanted), None)
    return {"true": True, "false": False}.get(theirs, theirs) if theirs else None


def _written_keys(name: str, rule: FieldRule, scaling: RopeScaling | None) -> tuple[str, ...]:
    """The keys of a field; of scaled positions only what their type knows.

    transformers 4 and what converts weights read `rope_scaling`, transformers 5 `rope_parameters`.
    """
    owner, _, number = name.rpartition(".")
    if owner != "rope_scaling":
        return rule.keys
    if scaling is None:
        return (rule.key,) if number == "type" else ()
    return rule.keys[:2] if number in ("type", *SCALING_NUMBERS[scaling.type]) else ()


def _put(content: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401  any JSON
    """Sets a key whose dots lead into tables."""
    *tables, leaf = key.split(".")
    for table in tables:
        content = content.setdefault(table, {})
    content[leaf] = value


def is_read_as(family: Family, content: Mapping[str, Any], config: ModelConfig) -> bool:
    """Whether a `config.json` is read as a configuration."""
    again, errors = config_from_values(family, content, config.name, config.source)
    if again is None or errors:
        return False
    if isinstance(config, ResNetConfig):
        # A residual network takes images of any size.
        return isinstance(again, ResNetConfig) and again == replace(config, image=again.image)
    if isinstance(again, ResNetConfig):
        return False
    shapes = [
        {name: value for name, value in asdict(each).items() if name not in NOT_SHAPE}
        for each in (again, config)
    ]
    for shape, each in zip(shapes, (again, config), strict=True):
        # None means what these properties say.
        shape["rotary_width"] = each.rotated_width
        shape["head_dim"], shape["score_width"] = each.head_width, each.scored_width
        shape["projection_bias"] = each.has_projection_bias
        if each.experts is not None:
            shape["experts"] = asdict(replace(each.experts, **_TRAINING_OF_EXPERTS))
        shape["window_blocks"] = each.windows if each.sliding_window else None
    return shapes[0] == shapes[1]
