"""Reads files and overrides into trees of keys, and knows the line of each key."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass.atomic_files import read_regular_file
from windlass.document.fields import KeyPath, takes_only_lists
from windlass.errors import RequestError, WindlassError, shorten

_MAX_DEPTH = 32
"""Deepest table or list of a file; those of documents have fewer than ten levels."""
_TOO_DEEP = f"tables or lists are nested more than {_MAX_DEPTH} deep; no key is"
_DEEP_KEY = re.compile(rf"""(?:^|[{{,\[])\s*(?:[\w"'-]+\s*\.\s*){{{_MAX_DEPTH}}}""", re.MULTILINE)
_LARGEST_TOML, _LARGEST_JSON = 2**63 - 1, 10**300
"""Largest whole numbers: TOML's have 64 bits, and all must be representable as a float."""
_MAX_LINES_OF_VALUE = 1000
"""Lines of one value, up to which the lines of the keys below it are known."""


def read_text(path: Path) -> str:
    """The text of a file that a user names.

    Raises:
        RequestError: it is missing, no regular file, too large, or no UTF-8.
    """
    try:
        return read_regular_file(path).decode()
    except FileNotFoundError:
        raise RequestError(f"no file `{shorten(str(path))}`") from None
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise RequestError(f"`{shorten(str(path))}` cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"`{path}` cannot be read as text: {error}") from None


def parse_file(path: Path, text: str) -> dict[str, Any]:
    """The file's content; `Any` because it is not validated yet."""
    try:
        tree = json.loads(text) if _is_json(path) else _parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: {_parse_problem(error)}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"{path}: contains a {type(tree).__name__}, not a table of keys")
    return tree


def apply_override(cls: type[BaseModel], tree: dict[str, Any], override: str) -> dict[KeyPath, str]:
    """Puts the value of an override into the tree, and returns the origin of its key.

    Raises:
        RequestError: what is wrong with the override.
    """
    key, equals, text = override.partition("=")
    loc = tuple(part.strip() for part in key.split("."))
    if not equals or not all(loc):
        raise RequestError("write it as `key=value`")
    if len(loc) > _MAX_DEPTH:
        raise RequestError(_TOO_DEEP)
    value = _value(text.strip())
    if isinstance(value, str) and "," in value and takes_only_lists(cls, loc):
        value = _value(f"[{value}]")
    if not _put(tree, loc, value):
        raise RequestError(f"`{key}` is below a key that is not a table")
    return {loc: f"override `{shorten(override)}`"}


def take_unusable(
    tree: dict[str, Any], file: Path | None, above: KeyPath = ()
) -> Iterator[tuple[KeyPath, str]]:
    """Takes the values out of a tree that no document can hold; yields their keys and reasons."""
    largest = _LARGEST_JSON if _is_json(file) else _LARGEST_TOML
    for name, value in tuple(tree.items()):
        loc = (*above, name)
        if isinstance(value, dict) and len(loc) < _MAX_DEPTH:
            yield from take_unusable(value, file, loc)
        elif reason := _unusable(value, largest, len(loc)):
            del tree[name]
            yield loc, reason


def line_origins(file: Path | None, text: str) -> dict[KeyPath, str]:
    """`file:line` of each key of a TOML file; lines of a JSON file are not known."""
    return {} if _is_json(file) else {loc: f"{file}:{line}" for loc, line in _lines(text)}


def _is_json(file: Path | None) -> bool:
    return file is not None and file.suffix == ".json"


def dotted(loc: KeyPath) -> str:
    """`train.steps`: a key as a user writes it, shortened for a message."""
    return shorten(".".join(str(part) for part in loc))


def _parse_toml(text: str) -> dict[str, Any]:
    if _DEEP_KEY.search(text):  # parsing it would take minutes
        raise RequestError(_TOO_DEEP)
    return tomllib.loads(text)


def _parse_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    # Python's own words name a setting of Python that nobody should need.
    return str(error).partition("; use sys.")[0]


def _value(text: str) -> object:
    """The TOML value of an override; anything that is not TOML is a string."""
    try:
        tree = _parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise RequestError(_parse_problem(error)) from None
    return tree["value"] if len(tree) == 1 else text


def _put(tree: dict[str, Any], loc: tuple[str, ...], value: object) -> bool:
    """Sets a leaf of the tree; False if a part of its path is not a table."""
    for part in loc[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            return False
        tree = branch
    tree[loc[-1]] = value
    return True


def _unusable(value: object, largest: int, depth: int = 0) -> str | None:
    """Why no document can hold a value; None if one may."""
    if depth > _MAX_DEPTH:
        return _TOO_DEEP
    if isinstance(value, int) and abs(value) > largest:
        return f"a number of {value.bit_length()} bits is larger than any setting"
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return None
    return next(filter(None, (_unusable(item, largest, depth + 1) for item in inner)), None)


def _lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """The line of each key of a TOML text; tables of an array are counted from 0.

    The text is valid TOML, so lines are joined until they parse: no incomplete key-value pair or
    table header does.
    """
    table: KeyPath = ()
    tables: dict[KeyPath, int] = {}
    pending, start = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        if number - start > _MAX_LINES_OF_VALUE:
            return
        pending += f"{line}\n"
        try:
            tree = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        if pending.lstrip().startswith("["):
            table = _table(tree, tables)
            yield table, start
            if table[-1] == 0:  # the array begins with its first table
                yield table[:-1], start
        else:
            yield from ((table + loc, start) for loc in _keys(tree))
        pending, start = "", number + 1


def _table(tree: dict[str, Any], tables: dict[KeyPath, int]) -> KeyPath:
    """The path of a table header, alone in `tree`; counts tables of arrays in `tables`."""
    loc: KeyPath = ()
    inner: object = tree
    while isinstance(inner, dict) and inner:
        [(name, inner)] = inner.items()
        loc += (name,)
        if isinstance(inner, list):
            tables[loc] = tables.get(loc, -1) + 1
        if loc in tables:
            loc += (tables[loc],)
    return loc


def _keys(tree: object) -> Iterator[KeyPath]:
    """The paths of all keys of a tree, including those of nested tables."""
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield (name,)
            yield from ((name, *loc) for loc in _keys(inner))


def read_json_object(path: Path, fault: type[WindlassError]) -> dict[str, Any]:
    """The object in a JSON file; `Any` because it is not validated yet.

    Raises:
        WindlassError: it cannot be read, is no JSON object, or has a key twice.
    """
    try:
        content = json.loads(read_regular_file(path), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise fault(f"`{path}` cannot be read: {(error.strerror or '').lower()}") from None
    except (ValueError, RecursionError) as error:
        raise fault(f"`{path}` is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise fault(f"`{path}` holds a JSON {type(content).__name__}, not an object")
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, whose keys must differ."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key `{next(n for n in names if names.count(n) > 1)}` stands there twice")
    return table
