"""The text of an engine's configuration, by the suffix of its file, and what such a text says."""

import json
import shlex
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import islice
from typing import Any

from windlass.errors import RequestError

Value = bool | int | float | str | list[str] | list[list[str]]
_MOST_KEYS, _MOST_DEPTH = 5000, 12
_MOST_BYTES = 4 * 2**20
"""Largest configuration that is read; those of published runs have some kilobytes."""


def config_text(name: str, content: Mapping[str, Value]) -> str:
    """Flat values as the text of a file: dotted keys become tables, or flags of an `.args` file."""
    if name.endswith(".args"):
        return "".join(f"{word}\n" for word in _words(content))
    tree: dict[str, Any] = {}
    for key, value in content.items():
        *tables, last = key.split(".")
        table = tree
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return "".join(_yaml(tree)) if name.endswith(".yaml") else json.dumps(tree, indent=2) + "\n"


def _words(content: Mapping[str, Value]) -> list[str]:
    """Words of a command line; a value `:x` makes the sub-command `key:x`, at the end."""
    words, last = [], []
    for key, value in content.items():
        if isinstance(value, str) and value.startswith(":"):
            last.append(key + value)
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is True:
            words.append(f"--{key}")
        elif value is not False:
            words.append(f"--{key}={value}")
    return [*words, *last]


def _yaml(tree: Mapping[str, Any], indent: str = "") -> list[str]:
    """Block style with JSON scalars, which YAML reads as they are."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:\n", *_yaml(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return lines


def read_config(name: str, text: str) -> dict[str, Value]:
    """Flat values of a configuration file.

    Raises:
        RequestError: it is too large, or not what its suffix says.
    """
    if len(text) > _MOST_BYTES:
        raise RequestError(f"`{name}` is larger than any configuration; name the engine's own file")
    if name.endswith(".args"):
        return _read_words(name, text)
    tree = _read_yaml(name, text) if name.endswith(".yaml") else _read_json(name, text)
    if not isinstance(tree, dict):
        raise RequestError(f"`{name}` holds no table of keys; name the engine's own file")
    leaves = dict(islice(_leaves(tree, ""), _MOST_KEYS + 1))
    if len(leaves) > _MOST_KEYS:
        raise RequestError(f"`{name}` has more than {_MOST_KEYS} keys; name the engine's own file")
    return leaves


def _read_words(name: str, text: str) -> dict[str, Value]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise RequestError(f"`{name}` has quotes that do not end ({error})") from error
    flags: list[tuple[str, list[str]]] = []
    subcommands: dict[str, Value] = {}
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            flags.append((key, [value] if equals else []))
        elif ":" in word and (not flags or flags[-1][1]):
            key, _, value = word.partition(":")
            subcommands[key] = f":{value}"
        elif flags:
            flags[-1][1].append(word)
    return {key: _flag(values) for key, values in flags} | subcommands


def _flag(values: list[str]) -> Value:
    if not values:
        return True
    return _scalar(values[0]) if len(values) == 1 else values


def _scalar(word: str) -> Value:
    try:
        value = json.loads(word)
    except ValueError:
        return {"True": True, "False": False}.get(word, word)
    return value if isinstance(value, bool | int | float) else word


def _read_json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"`{name}` is no JSON ({error})") from error


def _read_yaml(name: str, text: str) -> object:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise RequestError(f"`{name}` is YAML, which PyYAML reads; `pip install pyyaml`") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RequestError(f"`{name}` is no YAML ({' '.join(str(error).split())})") from error


def _leaves(tree: Mapping[str, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, Value]]:
    """Values by dotted key; what lies deeper than any configuration is left out."""
    for key, value in tree.items():
        if isinstance(value, dict) and depth < _MOST_DEPTH:
            yield from _leaves(value, f"{prefix}{key}.", depth + 1)
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value
        elif isinstance(value, list):
            yield f"{prefix}{key}", [_item(each) for each in value[:_MOST_KEYS]]


def _item(value: object) -> str:
    """An item of a list, which may be a list of names itself."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
