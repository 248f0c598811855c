"""What a command returns: rich prints it, and it gives JSON."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.document import Document

Item = TypeVar("Item")


class Answer:
    """The result of a command; `rich.print` shows what the command line shows."""

    notes: tuple[str, ...] = ()
    """What a user should know before anything else, a sentence each."""
    exit_code = 0
    """With what the command ends."""

    def lines(self) -> Iterable[RenderableType]:
        """What is printed: lines of text, which are never cut, tables and lists."""
        raise NotImplementedError

    def json_tree(self) -> object:
        """What `--json` prints: documents and dataclasses become objects."""
        return self

    def to_json(self) -> str:
        """The answer as JSON; NaN and infinity are null."""
        return json_text(self.json_tree())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines()


class Answers(tuple[Item, ...], Answer):  # noqa: SLOT001  answers have notes of their own
    """Several results of a command."""


class Bullets(tuple[str, ...]):
    """A list of sentences, whose long lines wrap with a hanging indent."""

    __slots__ = ()

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1, 0, 0))
        for line in self:
            table.add_row(" ", "-", Text(line))
        return table


def json_text(value: object) -> str:
    """A value as JSON: documents and dataclasses as objects, NaN and infinity as null."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, Document):
        return _plain(value.model_dump(mode="json"))
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
