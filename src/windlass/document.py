"""The base of every document: a frozen pydantic model with TOML, JSON, overrides, a fingerprint.

A value is resolved as *defaults < file < overrides*, where the last wins. All errors of the three
are reported at once, each with its file and line or the override that it comes from.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.atomic_files import atomic_write
from windlass.errors import InputErrors, RequestError, did_you_mean

KeyPath = tuple[str | int, ...]


class Document(BaseModel):
    """An immutable value with a file form; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset()
    """Fields that the fingerprint leaves out because they do not change what a document describes;
    `mapping.field` leaves out a field of all values of a mapping."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """The document in a TOML or JSON file, by its suffix.

        Raises:
            RequestError: the file does not exist, or is not TOML or JSON.
            InputErrors: all keys and values that are not valid.
        """
        return cls.resolve(path)

    @classmethod
    def resolve(cls, file: Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """The document resolved as *defaults < file < overrides*.

        Args:
            file: a TOML or JSON file; None starts from the defaults.
            overrides: `key=value` with dotted keys; values are TOML, bare words are strings.

        Raises:
            RequestError: the file does not exist, or is not TOML or JSON.
            InputErrors: all keys and values that are not valid, each with its location.
        """
        text = _read_text(file) if file else ""
        tree = _parse(file, text) if file else {}
        overridden: dict[KeyPath, str] = {}
        messages: list[str] = []
        for override in overrides:
            key, equals, value = override.partition("=")
            loc = tuple(part.strip() for part in key.split("."))
            if not equals or not all(loc):
                messages.append(f"override `{override}`: write it as `key=value`")
            elif not _put(tree, loc, _value(value.strip())):
                messages.append(
                    f"override `{override}`: `{key}` is below a key that is not a table"
                )
            else:
                overridden[loc] = f"override `{override}`"
        try:
            document = cls.model_validate(tree)
        except ValidationError as error:
            toml = file is not None and file.suffix != ".json"
            lines = {loc: f"{file}:{line}" for loc, line in _lines(text if toml else "")}
            origin = lines | overridden
            items = error.errors()
            # pydantic also reports a list with an invalid item as too short; the item's own error
            # says enough.
            outer = {item["loc"][:end] for item in items for end in range(len(item["loc"]))}
            messages += [
                _message(cls, item, origin, file) for item in items if item["loc"] not in outer
            ]
        if messages:
            raise InputErrors(messages)
        return document

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced; their values are not validated, their names are.

        Raises:
            KeyError: a name is not a field; pydantic would store it as an extra attribute.
        """
        unknown = sorted(set(update or ()) - set(type(self).model_fields))
        if unknown:
            raise KeyError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        return super().model_copy(update=update, deep=deep)

    def save(self, path: Path) -> None:
        """Writes the file atomically, as JSON or TOML by its suffix.

        Raises:
            StorageError: the disk is full or not writable.
        """
        atomic_write(path, self.to_json() if path.suffix == ".json" else self.to_toml())

    def to_toml(self) -> str:
        """The document as TOML; keys that are None are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def to_json(self) -> str:
        """The document as one JSON object; keys that are None are left out."""
        return self.model_dump_json(exclude_none=True)

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the content, independent of key order."""
        content = json.dumps(
            self.model_dump(mode="json", exclude_none=True, exclude=self._left_out()),
            sort_keys=True,
        )
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def _left_out(self) -> dict[str, Any]:
        """The fields that the fingerprint leaves out, as pydantic's `exclude` argument."""
        names = (name.partition(".") for name in self.fingerprint_excludes)
        return {name: {"__all__": {inner}} if inner else True for name, _, inner in names}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"no file `{path}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"`{path}` cannot be read as text: {error}") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    """The file's content; `Any` because it is not validated yet."""
    try:
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"{path}: contains a {type(tree).__name__}, not a table of keys")
    return tree


def _lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """The line of each key of a TOML text; tables of an array are counted from 0.

    The text is valid TOML, so lines are joined until they parse: no incomplete key-value pair or
    table header does.
    """
    table: KeyPath = ()
    tables: dict[KeyPath, int] = {}
    pending, start = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
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


def _value(text: str) -> object:
    """The TOML value of an override; anything that is not TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], loc: tuple[str, ...], value: object) -> bool:
    """Sets a leaf of the tree; False if a part of its path is not a table."""
    for part in loc[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            return False
        tree = branch
    tree[loc[-1]] = value
    return True


def _message(
    cls: type[Document], item: Mapping[str, Any], origin: Mapping[KeyPath, str], file: Path | None
) -> str:
    loc: KeyPath = item["loc"]
    where = _where(loc, origin) or (str(file) if file else "request")
    name = ".".join(str(part) for part in loc)
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key `{name}`{_suggestion(cls, loc)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if item["type"] == "missing":
        return f"{where}: `{name}` is missing"
    if item["type"] == "model_type":
        message = "should be a table of keys"
    if isinstance(item["input"], (Mapping, Sequence)) and not isinstance(item["input"], str):
        return f"{where}: {f'`{name}`: ' if name else ''}{message}"
    return f"{where}: `{name}` = {item['input']!r}: {message}"


def _where(loc: KeyPath, origin: Mapping[KeyPath, str]) -> str | None:
    """The origin of `loc`; else of a key below it, or of the nearest key above it."""
    if loc in origin:
        return origin[loc]
    below = next((where for key, where in origin.items() if loc and key[: len(loc)] == loc), None)
    above = (origin[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in origin)
    return below or next(above, None)


def _suggestion(cls: type[Document], loc: KeyPath) -> str:
    fields = _fields(cls, loc[:-1])
    near = did_you_mean(str(loc[-1]), fields)
    if near and len(loc) > 1:
        prefix = ".".join(str(part) for part in loc[:-1])
        return near.replace("`", f"`{prefix}.", 1)
    return near


def _fields(cls: type[BaseModel], loc: KeyPath) -> list[str]:
    """The keys of the table at `loc`."""
    for part in loc:
        field = cls.model_fields.get(str(part))
        if field is None:
            continue  # an index into a list of tables: the class stays the same
        inner = next(_documents(field.annotation), None)
        if inner is None:
            return []
        cls = inner
    return list(cls.model_fields)


def _documents(annotation: object) -> Iterator[type[BaseModel]]:
    """The document classes inside an annotation such as `tuple[Stage, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _documents(argument)
