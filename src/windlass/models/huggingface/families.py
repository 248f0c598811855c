"""Tables that say how a `model_type` of Hugging Face names its sizes and its tensors."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from windlass.errors import ModelError, did_you_mean, shorten
from windlass.models.huggingface.model_folder import find_model_folder

_NO_WRITERS = ("ForMaskedLM", "Classification", "ForPreTraining")
"""Ends of the names of classes that do not predict the next token."""
Layout = Literal["transposed", "rotated_neighbours", "qkv_of_each_head", "experts"]
"""How a type lays out a weight that we keep in another order.

`transposed`: inputs by outputs. `rotated_neighbours`: positions rotate neighbouring features of a
head, not its two halves. `qkv_of_each_head`: query, key and value of each head lie together.
`experts`: each expert is a tensor of its own, whose number `{e}` stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """Where a field of our configuration stands in a `config.json`."""

    key: str
    """Key; a dot leads into a table."""
    older: tuple[str, ...] = ()
    """Keys that earlier versions used."""
    default: Any = None
    """Value where no key stands; None leaves the field to our own default."""
    nullable: bool = False
    """Whether `null` means None; otherwise it means the default, as if no key stood."""
    values: Mapping[str, Any] | None = None
    """Our value for each of theirs, as JSON writes it, or for each of a list; None takes the value
    as it is."""
    share_of: str | None = None
    """The value is a share of this property, which is rounded down."""
    counts_both_sides: bool = False
    """The value is twice the furthest distance of a token that is seen."""
    of: str | None = None
    """Property that is written in place of the field, which may be None."""
    names_each: str | None = None
    """The key is a table that names each of them by its number; the value is how many there are.
    Those that have no name get this one, in which `{n}` is the number."""
    inverse: str | None = None
    """Key of a table that gives the number of each of these names."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, the one that is written first."""
        return (self.key, *self.older)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """The tensors of a Hugging Face model that one parameter of ours is made of."""

    sources: tuple[str, ...]
    """Their names, in the order in which their rows are joined; `{n}` is a block's number. In a
    residual network it is counted in its stage, whose number is `{s}`."""
    layout: Layout | None = None
    half: Literal["first", "second"] | None = None
    """Which half of the rows of the one source it is; the other is another parameter of ours."""
    copies: tuple[str, ...] = ()
    """Further names under which the same tensor may stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTable:
    """How a GGUF file says a model of some type."""

    architecture: str
    """Name of its `general.architecture`, before which keys of sizes stand."""
    keys: Mapping[str, str]
    """Properties of our configuration by key."""
    only: Mapping[str, tuple[Any, ...]]
    """Values of our fields that programs which read such a file compute."""
    expressed: tuple[str, ...]
    """Fields that the tensors alone say."""
    tensors: Mapping[str, TensorRule]
    """By name of our parameter, in which `block` stands for each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that is known of one `model_type`."""

    model_type: str
    is_like: str | None
    """The type whose table this one's adds to; None if it stands alone."""
    network: Literal["transformer", "resnet"]
    """Which of our networks it is."""
    architecture: str
    """Class of `transformers` that has these tensors."""
    heads: Mapping[str, Mapping[str, Any]]
    """Fields of our configuration by other classes that have them; the usual class has none. For
    a field that counts classes, a table says which key names them, which one has their numbers,
    and how many there usually are."""
    prefix: str
    """Beginning of the names of all tensors but the head's; a model saved without head lacks it."""
    fixed: Mapping[str, Any]
    """Fields of our configuration that all models of the type have alike."""
    fields: Mapping[str, FieldRule]
    only: Mapping[str, tuple[Any, ...]]
    """Values of keys for which our layers compute the same; a key that is missing is fine."""
    harmless: Mapping[str, tuple[Any, ...]]
    """Values of keys, or of each of a list, that change nothing; such a key is never written."""
    unread_keys: frozenset[str]
    """Keys that do not change what a trained model computes."""
    null_keys: tuple[str, ...]
    """Keys whose defaults in `transformers` fit its published model only."""
    unread_tensors: tuple[str, ...]
    """Ends of names of tensors that hold no weight of ours."""
    unread_beside_classes: str | None
    """Beginning of names of other heads' tensors, which a model of text classes leaves out."""
    tensors: Mapping[str, TensorRule]
    """By name of our parameter, in which `block` stands for each block."""
    older_names: Mapping[str, str]
    """Ends of names that folders of earlier versions have, by today's."""
    module_names: Mapping[str, str]
    """Parts of the names of modules, by those of tensors in a folder where these differ. PEFT has
    the names of modules."""
    gguf: GgufTable | None = None
    """None if no GGUF file of this type can be written."""

    def module_name(self, tensor: str) -> str:
        """What a tensor of a folder, or its module, is called among the modules."""
        for stored, live in self.module_names.items():
            tensor = tensor.replace(stored, live)
        return tensor

    def tensor_name(self, module: str) -> str:
        """The inverse of `module_name`."""
        for stored, live in self.module_names.items():
            module = module.replace(live, stored)
        return module

    def head_fields(self, architectures: object) -> Mapping[str, Any]:
        """What a folder's class says of our fields, as in `heads`.

        Args:
            architectures: value of that key in a `config.json`.
        """
        names = architectures if isinstance(architectures, list) else []
        named = (name for name in names if isinstance(name, str) and name in self.heads)
        return next((self.heads[name] for name in named), {})

    def architecture_of(self, config: object) -> str:
        """The class of `transformers` whose heads a configuration of ours has."""
        return next(
            (
                name
                for name, fields in self.heads.items()
                if all(_has_value(config, *field) for field in fields.items())
            ),
            self.architecture,
        )

    def leaves_out(self, name: str, config: object) -> bool:
        """Whether a tensor is of another head than that of a model of text classes."""
        beginning = self.unread_beside_classes
        has_classes = getattr(config, "text_classes", None) is not None
        return has_classes and beginning is not None and name.startswith(beginning)

    def rule(self, parameter: str) -> tuple[TensorRule, Mapping[str, str]]:
        """The rule for a parameter of ours, and the numbers of its block, by their letters.

        Args:
            parameter: its full name; halves of a block may be layers of their own.

        Raises:
            ModelError: models of this type have no such parameter.
        """
        match = _BLOCK.match(parameter)
        numbers = (
            {key: number for key, number in match.groupdict().items() if number} if match else {}
        )
        name = parameter if match is None else f"block.{parameter[match.end() :]}"
        for pattern, whole in () if name in self.tensors else _HALVES:
            name = pattern.sub(whole, name)
        if name not in self.tensors:
            raise ModelError(f"`{self.model_type}` models of Hugging Face have no `{parameter}`")
        return self.tensors[name], numbers


def _has_value(config: object, field: str, value: object) -> bool:
    """Whether a field of a configuration is what a class says of it; of a number any will do."""
    own = getattr(config, field, None)
    return own is not None if isinstance(value, dict) else own == value


_BLOCK = re.compile(r"(?:stage(?P<s>\d+)_)?block(?P<n>\d+)\.")
_HALVES = (
    (re.compile(r"^(block\.\w+)\.branch\."), r"\1."),
    (re.compile(r"^(block\.\w+)\.norm\."), r"\1_norm."),
    (re.compile(r"^(block\.\w+)\.result_norm\."), r"\1_result_norm."),
)
"""Names in a block that is split into two layers, and in a whole one."""


def model_types() -> tuple[str, ...]:
    """Every `model_type` that can be read."""
    return tuple(sorted(_tables()))


def writes_text(name: str) -> bool:
    """Whether a model that runs by the code of transformers predicts the next token.

    Raises:
        ModelError: there is no such folder.
    """
    named = find_model_folder(name).read_config().get("architectures")
    first = named[0] if isinstance(named, list) and named else "ForCausalLM"
    return not str(first).endswith(_NO_WRITERS)


def find_family(model_type: object) -> Family:
    """The family of a `model_type`.

    Raises:
        ModelError: it is unknown.
    """
    if not isinstance(model_type, str) or model_type not in _tables():
        name = shorten(str(model_type))
        known = ", ".join(f"`{known}`" for known in model_types())
        raise ModelError(
            f"`model_type` = {name!r} is none that can be read{did_you_mean(name, model_types())}; "
            f"known are {known}, and a module of your own is named `file.py:function`"
        )
    return _family(model_type)


@cache
def _family(model_type: str) -> Family:
    table = _merged(model_type)
    return Family(
        model_type=model_type,
        is_like=_tables()[model_type].get("like"),
        network=table.get("network", "transformer"),
        architecture=table["architecture"],
        heads=table.get("heads", {}),
        prefix=table["prefix"],
        fixed=table["fixed"],
        fields={
            name: FieldRule(**{**rule, "older": tuple(rule.get("older", ()))})
            for name, rule in table["fields"].items()
            if name not in table["fixed"]
        },
        only={key: tuple(values) for key, values in table.get("only", {}).items()},
        harmless={key: tuple(values) for key, values in table.get("harmless", {}).items()},
        unread_keys=frozenset(table["unread_keys"]) | _common_keys(),
        null_keys=tuple(table.get("null_keys", ())),
        unread_tensors=tuple(table["unread_tensors"]),
        unread_beside_classes=table.get("unread_beside_classes"),
        tensors=_tensor_rules(table["tensors"]),
        older_names=table.get("older_names", {}),
        module_names=table.get("module_names", {}),
        gguf=_gguf_table(table["gguf"]) if table.get("gguf") else None,
    )


def _gguf_table(table: Mapping[str, Any]) -> GgufTable:
    return GgufTable(
        architecture=table["architecture"],
        keys=table["keys"],
        only={name: tuple(values) for name, values in table["only"].items()},
        expressed=tuple(table["expressed"]),
        tensors=_tensor_rules(table["tensors"]),
    )


def _tensor_rules(table: Mapping[str, Any]) -> dict[str, TensorRule]:
    return {name: _tensor_rule(rule) for name, rule in table.items()}


def _tensor_rule(rule: str | Mapping[str, Any]) -> TensorRule:
    if isinstance(rule, str):
        return TensorRule(sources=(rule,))
    return TensorRule(
        sources=tuple(rule["from"]),
        layout=rule.get("layout"),
        half=rule.get("half"),
        copies=tuple(rule.get("copies", ())),
    )


def _merged(model_type: str) -> dict[str, Any]:
    """The table of a type, with what it shares with the one that it is `like`."""
    table = dict(_tables()[model_type])
    base = table.pop("like", None)
    if base is None:
        return table
    return _merge(_merged(base), table)


def _merge(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the entries of another in place of its own; a rule is replaced as a whole."""
    merged = dict(base)
    for key, value in table.items():
        is_table = isinstance(value, dict) and not {"key", "from"} & value.keys()
        merged[key] = _merge(merged.get(key, {}), value) if is_table else value
    return merged


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    folder = files("windlass.models.huggingface").joinpath("families")
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


@cache
def _common_keys() -> frozenset[str]:
    text = files("windlass.models.huggingface").joinpath("common.toml").read_text(encoding="utf-8")
    return frozenset(tomllib.loads(text)["unread_keys"])
