"""The base of every document: a frozen pydantic model with TOML, JSON, overrides, a fingerprint.

A value is resolved as *defaults < file < overrides*, where the last wins. All errors of the three
are reported at once, each with its file and line or the override that it comes from.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.atomic_files import atomic_write
from windlass.document.fields import KeyPath
from windlass.document.messages import Synonyms, describe_origin, meant_keys, message
from windlass.document.parse import (
    apply_override,
    dotted,
    line_origins,
    parse_file,
    read_text,
    take_unusable,
)
from windlass.errors import InputErrors, RequestError, shorten


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
