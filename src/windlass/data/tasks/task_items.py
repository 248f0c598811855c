"""The questions of a task, read from JSON lines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from windlass.atomic_files import read_regular_file
from windlass.document import Document
from windlass.errors import InputErrors, RequestError, did_you_mean
from windlass.schema import OutputType

_MAX_MESSAGES = 20


class TaskItem(Document):
    """One question: a text, and the texts that may follow it, one of which does."""

    context: str
    choices: Annotated[tuple[str, ...], Field(min_length=2)]
    """At least two, none of them empty; each holds the space or line end that it begins with,
    unless the task has a `target_delimiter`."""
    answer: Annotated[int, Field(ge=0)]
    """Position of the right choice."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.answer >= len(self.choices):
            raise ValueError(
                f"`answer` = {self.answer} with {len(self.choices)} choices, counted from 0"
            )
        if not all(self.choices):
            raise ValueError("a choice is empty, and no model can tell how likely nothing is")
        return self


class TargetItem(Document):
    """A text, and the one that follows it."""

    context: str
    target: Annotated[str, Field(min_length=1)]

    @property
    def choices(self) -> tuple[str, ...]:
        """The target alone."""
        return (self.target,)

    @property
    def answer(self) -> int:
        """The target is right."""
        return 0


class TextItem(Document):
    """A whole text."""

    text: Annotated[str, Field(min_length=1)]

    @property
    def context(self) -> str:
        """Nothing stands before a whole text."""
        return ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The text alone."""
        return (self.text,)

    @property
    def answer(self) -> int:
        """The text is right."""
        return 0


AnyItem = TaskItem | TargetItem | TextItem
ITEM_TYPES: Mapping[OutputType, type[AnyItem]] = {
    "multiple_choice": TaskItem,
    "loglikelihood": TargetItem,
    "loglikelihood_rolling": TextItem,
}
"""What a line of a task is, by what the task asks."""


def load_items(path: Path, output_type: OutputType) -> tuple[AnyItem, ...]:
    """The questions of a file, one JSON object a line.

    Raises:
        RequestError: the file cannot be read, or has no question.
        InputErrors: the lines that are none.
    """
    try:
        lines = read_regular_file(path).decode().split("\n")
    except OSError as error:
        names = [other.name for other in path.parent.glob("*.jsonl")]
        raise RequestError(
            f"no file `{path}`: {error.strerror}{did_you_mean(path.name, names)}"
        ) from None
    except UnicodeDecodeError:
        raise RequestError(f"`{path}` is not UTF-8 text") from None
    messages: list[str] = []
    items = tuple(_parsed(path, lines, ITEM_TYPES[output_type], messages))
    if messages:
        raise InputErrors(messages[:_MAX_MESSAGES])
    if not items:
        raise RequestError(f"`{path}` has no question; write one JSON object a line")
    return items


def _parsed(
    path: Path, lines: Sequence[str], item_type: type[AnyItem], messages: list[str]
) -> Iterator[AnyItem]:
    """The items of some lines; what is wrong with others is added to the messages."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield item_type.model_validate(json.loads(line))
        except ValidationError as error:
            messages += [
                f"{path}:{number}: {_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()
            ]
        except (ValueError, RecursionError) as error:
            messages.append(f"{path}:{number}: {error}")


def _place(loc: tuple[int | str, ...]) -> str:
    """The key at which something is wrong, before what is wrong with it."""
    return f"`{'.'.join(map(str, loc))}`: " if loc else ""
