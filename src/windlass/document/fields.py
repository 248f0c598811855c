"""Walks the keys of a document class: its tables, which values its keys take, and their words."""

import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

KeyPath = tuple[str | int, ...]


def leaf_fields(
    cls: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Each dotted key with its field; a key that holds a table stands for none itself.

    Args:
        prefix: precedes each key.
        above: the classes of the tables that hold this one; none of them is walked again.
    """
    for name, field in cls.model_fields.items():
        kinds = [kind for kind in value_types(field.annotation) if isinstance(kind, type)]
        table = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if table is None:
            yield f"{prefix}{name}", field
        elif table not in (cls, *above):
            yield from leaf_fields(table, f"{prefix}{name}.", (cls, *above))


def format_overrides(values: Mapping[str, object], table: str = "") -> tuple[str, ...]:
    """The words `key=value` that set some keys.

    Args:
        table: precedes each key, such as `model.`.
    """
    return tuple(f"{table}{key}={format_value(value)}" for key, value in values.items())


def format_value(value: object) -> str:
    """A value as a user writes it in `key=value`: `true`, `[3, 224, 224]`, text without quotes."""
    return value if isinstance(value, str) else _toml(value)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def table_at(cls: type[BaseModel], loc: KeyPath) -> type[BaseModel] | None:
    """The class of the table at `loc`; None if there is none."""
    for part in loc:
        if isinstance(part, int):
            continue  # an index into a list of tables: the class stays the same
        field = cls.model_fields.get(part)
        inner = next(_documents(field.annotation), None) if field else None
        if inner is None:
            return None
        cls = inner
    return cls


def takes_only_lists(cls: type[BaseModel], loc: KeyPath) -> bool:
    """Whether a text with commas can only mean a list for the key at `loc`."""
    table = table_at(cls, loc[:-1])
    field = table.model_fields.get(str(loc[-1])) if table else None
    kinds = tuple(value_types(field.annotation)) if field else ()
    return str not in kinds and any(get_origin(kind) is tuple for kind in kinds)


def _documents(annotation: object) -> Iterator[type[BaseModel]]:
    """The document classes inside an annotation such as `tuple[Stage, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _documents(argument)


def value_types(annotation: object) -> Iterator[object]:
    """The types of a union; or the type itself, if it is none."""
    if get_origin(annotation) is Annotated:
        yield from value_types(get_args(annotation)[0])
        return
    if get_origin(annotation) not in (Union, UnionType):
        yield annotation
        return
    for kind in get_args(annotation):
        yield from value_types(kind)
