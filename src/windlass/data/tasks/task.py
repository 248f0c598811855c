"""A task: questions of several choices in a JSON lines file, described by a small TOML file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from windlass.atomic_files import atomic_write, read_regular_file
from windlass.data.tokenizer import Tokenizer
from windlass.document import Document
from windlass.errors import InputErrors, RequestError, did_you_mean

_MAX_MESSAGES = 20


class TaskItem(Document):
    """One question: a text, and the texts that may follow it, one of which does."""

    context: str
    choices: Annotated[tuple[str, ...], Field(min_length=2)]
    """At least two, none of them empty; each holds the space or line end that it begins with."""
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


class TaskFile(Document):
    """The TOML file of a task; its files are named relative to it."""

    name: str
    items: str = "items.jsonl"
    """The questions, one JSON object a line with `context`, `choices` and `answer`."""
    examples: str | None = None
    """Solved questions of the same form, which stand before a question in few-shot scoring."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Number of solved questions before each question, the first ones of `examples`."""
    separator: str = "\n\n"
    """What stands behind each solved question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The questions of a task, and how they are asked."""

    name: str
    items: tuple[TaskItem, ...]
    examples: tuple[TaskItem, ...] = ()
    shots: int = 0
    separator: str = "\n\n"

    def with_shots(self, shots: int) -> "Task":
        """The same task with another number of solved questions before each question.

        Raises:
            RequestError: it has fewer solved questions.
        """
        if not 0 <= shots <= len(self.examples):
            raise RequestError(
                f"task `{self.name}` has {len(self.examples)} solved questions, and `shots` = "
                f"{shots}; name a number from 0 to {len(self.examples)}"
            )
        return replace(self, shots=shots)

    def prompt(self, item: TaskItem) -> str:
        """What the model reads before each choice: the solved questions, then the context."""
        solved = [one.context + one.choices[one.answer] for one in self.examples[: self.shots]]
        return "".join(text + self.separator for text in solved) + item.context

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)


class EncodedChoice(NamedTuple):
    """A choice as tokens, behind the tokens of what a model reads before it."""

    context: tuple[int, ...]
    """At least one token."""
    tokens: tuple[int, ...]
    """At least one token."""


def encode_choices(task: Task, tokenizer: Tokenizer) -> list[list[EncodedChoice]]:
    """The choices of each question as tokens, in the order of the questions.

    Prompt and choice are tokenized together, as in training, and divided where the tokens of the
    prompt alone end. White space at the end of a prompt goes to the choice, as words begin with it.
    Source: `_encode_pair` of lm-evaluation-harness 0.4, which does the same.

    Args:
        task: the questions.
        tokenizer: the model's.
    """
    return [
        [_encoded(tokenizer, task.prompt(item), choice) for choice in item.choices]
        for item in task.items
    ]


def _encoded(tokenizer: Tokenizer, prompt: str, choice: str) -> EncodedChoice:
    bare = prompt.rstrip()
    context = tokenizer.encode(bare)
    whole = tokenizer.encode(bare + prompt[len(bare) :] + choice)
    # A prompt of nothing is the beginning of a text, which an end of text stands before.
    before = context or [tokenizer.end_of_text]
    return EncodedChoice(tuple(before), tuple(whole[len(context) :]))


def load_task(path: Path) -> Task:
    """Reads a task.

    Args:
        path: its TOML file.

    Raises:
        RequestError: a file cannot be read.
        InputErrors: all keys, values and lines that are not valid.
    """
    file = TaskFile.load(path)
    items = _load_items(path.parent / file.items)
    examples = _load_items(path.parent / file.examples) if file.examples is not None else ()
    task = Task(name=file.name, items=items, examples=examples, separator=file.separator)
    return task.with_shots(file.shots)


def save_task(task: Task, folder: Path) -> Path:
    """Writes a task as three files, and returns its TOML file.

    Args:
        task: the task.
        folder: receives `NAME.toml`, `NAME.items.jsonl` and `NAME.examples.jsonl`.

    Raises:
        StorageError: the disk is full or not writable.
    """
    names = {part: f"{task.name}.{part}.jsonl" for part in ("items", "examples")}
    for part, items in (("items", task.items), ("examples", task.examples)):
        lines = "".join(item.model_dump_json() + "\n" for item in items)
        atomic_write(folder / names[part], lines)
    path = folder / f"{task.name}.toml"
    TaskFile(name=task.name, shots=task.shots, separator=task.separator, **names).save(path)
    return path


def _load_items(path: Path) -> tuple[TaskItem, ...]:
    try:
        lines = read_regular_file(path).decode().splitlines()
    except OSError as error:
        names = [other.name for other in path.parent.glob("*.jsonl")]
        raise RequestError(
            f"no file `{path}`: {error.strerror}{did_you_mean(path.name, names)}"
        ) from None
    except UnicodeDecodeError:
        raise RequestError(f"`{path}` is not UTF-8 text") from None
    messages: list[str] = []
    items = tuple(_parsed(path, lines, messages))
    if messages:
        raise InputErrors(messages[:_MAX_MESSAGES])
    if not items:
        raise RequestError(f"`{path}` has no question; write one JSON object a line")
    return items


def _parsed(path: Path, lines: Sequence[str], messages: list[str]) -> Iterator[TaskItem]:
    """The items of some lines; what is wrong with others is added to the messages."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield TaskItem.model_validate(json.loads(line))
        except ValidationError as error:
            messages += [
                f"{path}:{number}: {_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()
            ]
        except ValueError as error:
            messages.append(f"{path}:{number}: {error}")


def _place(loc: tuple[int | str, ...]) -> str:
    """The key at which something is wrong, before what is wrong with it."""
    return f"`{'.'.join(map(str, loc))}`: " if loc else ""
