"""What a command returns: rich prints it, and it gives JSON."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.document import Document

Item = TypeVar("Item")
_MAX_CELL = 22
"""Most columns of a cell of words between the first and the last."""


class Answer:
    """The result of a command; `rich.print` shows what the command line shows."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before anything else, a sentence each."""
        return ()

    @property
    def exit_code(self) -> int:
        """With what the command ends."""
        return 0

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


@dataclass(frozen=True)
class Shown(Answer, Generic[Item]):
    """How a value of another room is shown: `-> Annotated[RunDiff, ShownDiff]`."""

    value: Item
    given: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the command was given, by name."""

    def json_tree(self) -> object:
        """The value."""
        return self.value


class Bullets(tuple[str, ...]):
    """A list of sentences, whose long lines wrap with a hanging indent."""

    __slots__ = ()

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1, 0, 0))
        for line in self:
            table.add_row(" ", "-", Text(line))
        return table


def word_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of words, which wrap within their columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        between = 0 < index < len(heads) - 1
        most = _MAX_CELL if between else None
        # A name is copied whole, so it never breaks.
        table.add_column(head, overflow="fold", max_width=most, no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table


def json_text(value: object) -> str:
    """A value as JSON: documents and dataclasses as objects, NaN and infinity as null."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, Document):
        return _plain(value.model_dump(mode="json"))
    if is_dataclass(value):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
