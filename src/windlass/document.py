"""The base of every file: a frozen pydantic model with TOML, JSON, overrides and a fingerprint.

A value is resolved as *defaults < file < overrides*, the last wins, and every fault of all three is
told at once, each with its file and line or the override that brought it.
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
    """An immutable value with a file form; unknown keys are faults."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset()
    """Fields that do not change what a document is, and that its fingerprint leaves out; of all
    values of a mapping as `mapping.field`."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """The document in a TOML or JSON file (told by the suffix).

        Raises:
            RequestError: no such file, or it is no TOML or JSON.
            Faults: all keys and values that do not fit.
        """
        return cls.resolve(path)

    @classmethod
    def resolve(cls, file: Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """The document of *defaults < file < overrides*.

        Args:
            file: TOML or JSON; None starts from the defaults.
            overrides: `key=value` with dotted keys; values are TOML, bare words are text.

        Raises:
            RequestError: no such file, or it is no TOML or JSON.
            Faults: all keys and values that do not fit, each with where it stands.
        """
        text = _read_text(file) if file else ""
        tree = _parse(file, text) if file else {}
        overridden: dict[KeyPath, str] = {}
        faults: list[str] = []
        for override in overrides:
            key, equals, value = override.partition("=")
            loc = tuple(part.strip() for part in key.split("."))
            if not equals or not all(loc):
                faults.append(f"override `{override}`: write it as `key=value`")
            elif not _put(tree, loc, _value(value.strip())):
                faults.append(f"override `{override}`: `{key}` lies below a key that is no table")
            else:
                overridden[loc] = f"override `{override}`"
        try:
            document = cls.model_validate(tree)
        except ValidationError as error:
            toml = file is not None and file.suffix != ".json"
            lines = {loc: f"{file}:{line}" for loc, line in _lines(text if toml else "")}
            origin = lines | overridden
            found = error.errors()
            # A list with a faulty item counts as too short: told by the item's own fault.
            inner = {item["loc"][:end] for item in found for end in range(len(item["loc"]))}
            faults += [_fault(cls, i, origin, file) for i in found if i["loc"] not in inner]
        if faults:
            raise InputErrors(faults)
        return document

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced, unchecked but for their names.

        Raises:
            KeyError: a name that is no field; pydantic would keep it beside the fields unseen.
        """
        unknown = sorted(set(update or ()) - set(type(self).model_fields))
        if unknown:
            raise KeyError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        return super().model_copy(update=update, deep=deep)

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all, as JSON or TOML by its suffix.

        Raises:
            StorageError: the disk is full or closed.
        """
        atomic_write(path, self.to_json() if path.suffix == ".json" else self.to_toml())

    def to_toml(self) -> str:
        """The document as TOML; keys without a value are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def to_json(self) -> str:
        """The document as one JSON object."""
        return self.model_dump_json(exclude_none=True)

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the content, independent of key order."""
        content = json.dumps(
            self.model_dump(mode="json", exclude_none=True, exclude=self._left_out()),
            sort_keys=True,
        )
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def _left_out(self) -> dict[str, Any]:
        """What the fingerprint leaves out, as pydantic takes it."""
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
    """The file's tree; `Any` because a file may hold anything before it is validated."""
    try:
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"{path}: holds a {type(tree).__name__}, not a table of keys")
    return tree


def _lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Where each key of a TOML text stands; a table of an array is counted from 0.

    The text is known to be TOML, so lines are gathered until they are whole, which no beginning of
    a key with its value or of a table's name is.
    """
    table: KeyPath = ()
    tables: dict[KeyPath, int] = {}
    held, start = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        held += f"{line}\n"
        try:
            tree = tomllib.loads(held)
        except tomllib.TOMLDecodeError:
            continue
        if held.lstrip().startswith("["):
            table = _table(tree, tables)
            yield table, start
            if table[-1] == 0:  # the array begins with its first table
                yield table[:-1], start
        else:
            yield from ((table + loc, start) for loc in _keys(tree))
        held, start = "", number + 1


def _table(tree: dict[str, Any], tables: dict[KeyPath, int]) -> KeyPath:
    """The place that a table's name, alone in `tree`, opens; counts those of arrays in `tables`."""
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
    """All keys of a tree, those of tables within tables included."""
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield (name,)
            yield from ((name, *loc) for loc in _keys(inner))


def _value(text: str) -> object:
    """The TOML value of an override; what is no TOML value is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], loc: tuple[str, ...], value: object) -> bool:
    """Sets a leaf of the tree; False if what is no table stands in the way."""
    for part in loc[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            return False
        tree = branch
    tree[loc[-1]] = value
    return True


def _fault(
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
    """The place of `loc`; else of a key below it, or the nearest above it that is known."""
    if loc in origin:
        return origin[loc]
    below = next((place for key, place in origin.items() if loc and key[: len(loc)] == loc), None)
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
    """The keys that the table at `loc` knows."""
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
