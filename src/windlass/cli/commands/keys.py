"""`windlass keys`: every key of a request with its type, default and meaning."""

import re
from types import NoneType
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from windlass.api import AsJson
from windlass.cli.console import print_json, print_table
from windlass.document import format_value, leaf_fields, value_types
from windlass.errors import RequestError, did_you_mean
from windlass.schema import Request

_HEADS = ("key", "type", "default", "meaning")
_OPEN = "open"
"""Default of a key that is None, which its meaning explains: the model, the machine or the planner
decides."""
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table"}


def keys(pattern: str | None = None, *, as_json: AsJson = False) -> None:
    """List every key of a request with its type, default and meaning.

    They stand on the command line as `key=value`, and in request files. An `open` one is decided by
    the model, the machine or the planner.

    For example: `windlass keys batch`.

    Args:
        pattern: Only keys with this text in their name or meaning.
        as_json: Print the keys as JSON.
    """
    rows = [_row(key, field) for key, field in leaf_fields(Request)]
    wanted = (pattern or "").lower()
    shown = [row for row in rows if wanted in f"{row[0]} {row[3]}".lower()]
    if not shown:
        hint = did_you_mean(wanted, [key for key, *_ in rows])
        raise RequestError(f"no key contains `{pattern}`{hint}; `windlass keys` lists all")
    if as_json:
        print_json([dict(zip(_HEADS, row, strict=True)) for row in shown])
    else:
        print_table(_HEADS, shown)


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
