"""The base of every document: a frozen pydantic model with TOML, JSON, overrides, a fingerprint.

A value is resolved as *defaults < file < overrides*, where the last wins. All errors of the three
are reported at once, each with its file and line or the override that it comes from.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.atomic_files import atomic_write
from windlass.document.fields import KeyPath, leaf_fields, table_at
from windlass.document.parse import (
    apply_override,
    dotted,
    line_origins,
    parse_file,
    read_text,
    take_unusable,
)
from windlass.errors import InputErrors, RequestError, did_you_mean, did_you_mean_any, shorten

_MAX_HINTED = 500
"""Keys of a file with hints at what unknown ones may mean; a larger file is no such document."""


@dataclass(frozen=True, slots=True)
class Synonyms:
    """Words of other software for keys and values; capitals and punctuation do not matter."""

    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Dotted key -> its synonyms."""
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Value -> its synonyms."""


def message(
    cls: type[BaseModel],
    item: Mapping[str, Any],
    origin: Mapping[KeyPath, str],
    file: Path | None,
    synonyms: Synonyms,
) -> str:
    """One sentence on a key or value that is not valid: where it is, and what may be meant.

    Args:
        item: the error as pydantic reports it.
        origin: where each key that is given comes from.
    """
    loc: KeyPath = item["loc"]
    where, name = describe_origin(_blamed(loc, str(item["msg"]), origin), origin, file), dotted(loc)
    if item["type"] == "extra_forbidden":
        given = next((key for key in origin if key[: len(loc)] == loc), loc)
        hint = "" if len(origin) > _MAX_HINTED else _suggestion(cls, loc, given, synonyms)
        return f"{where}: unknown key `{name}`{hint}"
    text = str(item["msg"]).removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    if item["type"] == "missing":
        return f"{where}: `{name}` is missing"
    if item["type"] == "model_type":
        text = "should be a table of keys"
    if item["type"] == "literal_error":
        text += _value_suggestion(item, synonyms)
    if isinstance(item["input"], (Mapping, Sequence)) and not isinstance(item["input"], str):
        return f"{where}: {f'`{name}`: ' if name else ''}{text}"
    return f"{where}: `{name}` = {shorten(repr(item['input']))}: {text}"


def meant_keys(cls: type[BaseModel], word: str, synonyms: Synonyms) -> list[str]:
    """The keys that a word of other software stands for, or that end in it; none if it is unknown.

    Args:
        word: the word, with or without the tables that it stands in.
    """
    last = word.rpartition(".")[2]
    leaves = [key for key, _ in leaf_fields(cls)]
    return (
        _meant(word, synonyms.keys)
        or _meant(last, synonyms.keys)
        or [key for key in leaves if _plain(key.rpartition(".")[2]) == _plain(last)]
    )


def _blamed(loc: KeyPath, text: str, origin: Mapping[KeyPath, str]) -> KeyPath:
    """The key below `loc` that a message on a whole table names first; `loc` if it names none."""
    if loc in origin:
        return loc
    places = {
        place: key
        for key in origin
        if key[: len(loc)] == loc
        for name in (str(key[-1]), dotted(key))
        if (place := text.find(f"`{name}`")) >= 0
    }
    return places[min(places)] if places else loc


def describe_origin(loc: KeyPath, origin: Mapping[KeyPath, str], file: Path | None) -> str:
    """The origin of `loc`; else of a key below it, of the nearest key above it, or the file."""
    if loc in origin:
        return origin[loc]
    below = next((where for key, where in origin.items() if loc and key[: len(loc)] == loc), None)
    above = (origin[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in origin)
    return below or next(above, None) or (str(file) if file else "request")


def _suggestion(cls: type[BaseModel], loc: KeyPath, given: KeyPath, synonyms: Synonyms) -> str:
    """What an unknown key may mean.

    Args:
        given: the key that was given, `loc` or one below it.
    """
    if meant := meant_keys(cls, dotted(given), synonyms):
        return did_you_mean_any(meant)
    leaves = [key for key, _ in leaf_fields(cls)]
    table = table_at(cls, loc[:-1])
    near = did_you_mean(str(loc[-1]), table.model_fields) if table else ""
    prefixed = near.replace("`", f"`{''.join(f'{part}.' for part in loc[:-1])}", 1)
    return prefixed or did_you_mean(dotted(given), leaves)


def _value_suggestion(item: Mapping[str, Any], synonyms: Synonyms) -> str:
    """Which of the values that a key takes may be meant."""
    given, known = str(item["input"]), re.findall("'([^']*)'", item["ctx"]["expected"])
    words = {_plain(word) for word in (given, *_meant(given, synonyms.values))}
    equal = [value for value in known if _plain(value) in words]
    return did_you_mean_any(equal[:1]) or did_you_mean(given, known)


def _meant(word: str, synonyms: Mapping[str, Sequence[str]]) -> list[str]:
    """The names that have this synonym."""
    plain = _plain(word)
    return [name for name, words in synonyms.items() if plain in map(_plain, words)]


def _plain(word: str) -> str:
    """A word in small letters and digits alone."""
    return re.sub("[^a-z0-9]", "", word.lower())


class Document(BaseModel):
    """An immutable value with a file form; unknown keys are errors."""

    # Built when first used: a command needs few of the classes that it imports.
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True
    )

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
        text = read_text(file) if file else ""
        tree = parse_file(file, text) if file else {}
        overridden: dict[KeyPath, str] = {}
        messages: list[str] = []
        for override in overrides:
            try:
                overridden |= apply_override(cls, tree, override)
            except RequestError as error:
                messages.append(f"override `{shorten(override)}`: {error}")
        unusable = dict(take_unusable(tree, file))
        items: Sequence[Any] = ()
        try:
            document = cls.model_validate(tree)
        except ValidationError as error:
            items = error.errors()
        if items or unusable:
            origin = line_origins(file, text) | overridden
            # pydantic also reports a list with an invalid item as too short; the item's own error
            # says enough.
            outer = {item["loc"][:end] for item in items for end in range(len(item["loc"]))}
            messages += [
                message(cls, item, origin, file, cls.synonyms())
                for item in items
                if item["loc"] not in outer and item["loc"] not in unusable
            ]
            messages += [
                f"{describe_origin(loc, origin, file)}: `{dotted(loc)}`: {reason}"
                for loc, reason in unusable.items()
            ]
        if messages:
            raise InputErrors(messages)
        return document

    @classmethod
    def origins(cls, file: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, str]:
        """Where each key that is given comes from, by dotted key: `file:line`, or the override.

        Raises:
            RequestError: the file or an override cannot be read.
        """
        found = line_origins(file, read_text(file)) if file else {}
        for override in overrides:
            found |= apply_override(cls, {}, override)
        return {dotted(loc): where for loc, where in found.items()}

    @classmethod
    def synonyms(cls) -> Synonyms:
        """Words of other software for this document's keys and values; here none."""
        return Synonyms()

    @classmethod
    def meant_keys(cls, word: str) -> list[str]:
        """The dotted keys that a word of other software stands for, or that end in it."""
        return meant_keys(cls, word, cls.synonyms())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced; their values are not validated, their names are.

        Raises:
            KeyError: a name is not a field; pydantic would store it as an extra attribute.
        """
        unknown = sorted(set(update or ()) - set(type(self).model_fields))
        if unknown:
            raise KeyError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        copy = super().model_copy(update=update, deep=deep)
        if update:  # what was computed from the old fields does not hold for the copy
            for name in copy.__dict__.keys() - type(self).model_fields.keys():
                del copy.__dict__[name]
        return copy

    def save(self, path: Path) -> None:
        """Writes the file atomically, as JSON or TOML by its suffix."""
        atomic_write(path, self.to_json() if path.suffix == ".json" else self.to_toml())

    def to_toml(self, *, defaults: bool = True) -> str:
        """The document as TOML; keys that are None are left out.

        Args:
            defaults: whether keys with their default value are written.
        """
        tree = self.model_dump(mode="json", exclude_none=True, exclude_defaults=not defaults)
        return tomli_w.dumps(tree)

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
        left_out: dict[str, Any] = {}
        for name, _, inner in (each.partition(".") for each in self.fingerprint_excludes):
            if inner:
                left_out.setdefault(name, {"__all__": set()})["__all__"].add(inner)
            else:
                left_out[name] = True
        return left_out
