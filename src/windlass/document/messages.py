"""Messages on keys and values that are not valid, with a hint at what may be meant."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass.document.fields import KeyPath, leaf_fields, table_at
from windlass.document.parse import dotted
from windlass.errors import did_you_mean, did_you_mean_any, shorten

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
