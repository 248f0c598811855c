"""What a request can name: keys, models and software stacks."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from rich import box
from rich.console import RenderableType
from rich.table import Table

from windlass.answer import Answer, Answers, Shown, word_table
from windlass.capture import parameter_count
from windlass.document import format_value, leaf_fields, value_types
from windlass.errors import RequestError, did_you_mean
from windlass.models import (
    ResNetConfig,
    TransformerConfig,
    model_config,
    model_names,
    resnet_config,
)
from windlass.report import StacksTable, stack_table
from windlass.schema import Request, Stack
from windlass.stacks import StackConstant, load_stack, stack_constants, stack_names
from windlass.units import format_count

_HEADS = ("key", "type", "default", "meaning")
_OPEN = "open"
"""Default of a key that is None, which its meaning explains: the model, the machine or the planner
decides."""
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table"}


class ShownKeys(Shown[dict[str, str]]):
    """A table of keys, each with its type, default and meaning."""

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """A row for each key."""
        return [_row(key, field) for key, field in leaf_fields(Request) if key in self.value]

    def lines(self) -> Iterable[RenderableType]:
        """The table."""
        yield word_table(_HEADS, self.rows)

    def json_tree(self) -> object:
        """The rows as objects."""
        return [dict(zip(_HEADS, row, strict=True)) for row in self.rows]


def keys(pattern: str | None = None) -> Annotated[dict[str, str], ShownKeys]:
    """List every key of a request with its type, default and meaning.

    They stand on the command line as `key=value`, and in request files. An `open` one is decided by
    the model, the machine or the planner.

    For example: `windlass keys batch`.

    Args:
        pattern: Only keys with this text in their name or meaning.

    Returns:
        The meaning of each key; `request.train.batch` is `train.batch`.

    Raises:
        RequestError: no key has this text.
    """
    rows = [_row(key, field) for key, field in leaf_fields(Request)]
    wanted = (pattern or "").lower()
    found = {key: text for key, _, _, text in rows if wanted in f"{key} {text}".lower()}
    if not found:
        hint = did_you_mean(wanted, [key for key, *_ in rows])
        raise RequestError(f"no key contains `{pattern}`{hint}; `windlass keys` lists all")
    return found


def _row(key: str, field: FieldInfo) -> tuple[str, str, str, str]:
    kinds = [_type(kind) for kind in value_types(field.annotation) if kind is not NoneType]
    default = field.get_default()
    shown = _OPEN if default is None else format_value(default)
    meaning = " ".join((field.description or "").split())
    return key, " or ".join(kinds), shown, re.sub(r"\bNone\b", f"`{_OPEN}`", meaning)


def _type(kind: object) -> str:
    """A type of value as a user writes it."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "list"
    return next(word for known, word in _WORDS.items() if (get_origin(kind) or kind) is known)


class ShownModels(Shown[dict[str, TransformerConfig | ResNetConfig]]):
    """A table of models with their parameters and shapes."""

    def lines(self) -> Iterable[RenderableType]:
        """A row for each model, and what else can be named."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("model", no_wrap=True)
        for head in ("parameters", "layers", "width", "heads", "sequence\nor image"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("vocabulary")
        for name, config in self.value.items():
            table.add_row(name, format_count(parameter_count(config)), *_shape_of(config))
        yield table
        yield "or `hf:DIR`, a Hugging Face folder"
        yield "or your own `file.py:function`, which returns an `nn.Module`"
        yield (
            "Layers are blocks; parameters are counted from the shapes, embedding and head "
            "included."
        )


def models() -> Annotated[dict[str, TransformerConfig | ResNetConfig], ShownModels]:
    """List the models that can be named, with their parameters and shapes.

    Parameters are counted from the shapes, as a plan counts them: what layers share counts once.
    """
    return {name: resnet_config(name) or model_config(name) for name in model_names()}


def _shape_of(config: TransformerConfig | ResNetConfig) -> tuple[str, ...]:
    """Layers, width, heads, the longest sequence or the image, and vocabulary or classes."""
    if isinstance(config, ResNetConfig):
        image, classes = "x".join(map(str, config.image)), f"{config.classes} classes"
        return str(config.layers), str(config.widths[-1]), "–", image, classes
    sequence, vocabulary = str(config.sequence), str(config.vocabulary)
    if config.image is not None:
        sequence, vocabulary = "x".join(map(str, config.image)), f"{vocabulary} classes"
    elif config.experts is not None:
        vocabulary += f", {config.experts.count} experts"
    return str(config.layers), str(config.width), str(config.heads), sequence, vocabulary


class Stacks(Answers[Stack]):
    """Software stacks, in short."""

    def lines(self) -> Iterable[RenderableType]:
        """A row for each stack."""
        yield StacksTable(self)


@dataclass(frozen=True, slots=True)
class StackConstants(Answer):
    """A software stack with all its constants."""

    stack: Stack
    constants: tuple[StackConstant, ...]

    def lines(self) -> Iterable[RenderableType]:
        """What it is, and a row for each constant."""
        yield stack_table(self.stack, self.constants)


def stacks(name: str | None = None) -> Stacks | StackConstants:
    """List the software stacks that `--stack` can name, or show one with all its constants.

    For example: `windlass stacks nemo`.

    Args:
        name: A stack, or a `.toml` file of your own; all of them in short if not given.

    Raises:
        StackError: no stack has this name.
    """
    if name is None:
        return Stacks(load_stack(each) for each in stack_names())
    stack = load_stack(name)
    return StackConstants(stack, stack_constants(stack))
