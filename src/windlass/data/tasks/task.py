"""A task: questions in a JSON lines file, described by a small TOML file."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from windlass.atomic_files import atomic_write
from windlass.data.tasks.task_items import AnyItem, load_items
from windlass.document import Document
from windlass.errors import RequestError
from windlass.schema import OutputType


class TaskFile(Document):
    """The TOML file of a task; its files are named relative to it."""

    name: Annotated[str, Field(pattern=r"^\w[\w.+ -]*$", max_length=100)]
    """Letters, digits and `_.+- `, as its scores are kept in files of that name."""
    output_type: OutputType = "multiple_choice"
    """What is asked: `multiple_choice`, `loglikelihood` or `loglikelihood_rolling`."""
    items: str = "items.jsonl"
    """The questions, one JSON object a line: `context`, `choices` and `answer`, or `context` and
    `target` (`loglikelihood`), or `text` (`loglikelihood_rolling`)."""
    examples: str | None = None
    """Solved questions of the same form, which stand before a question in few-shot scoring."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Number of solved questions before each question, the first ones of `examples`."""
    separator: str = "\n\n"
    """What stands behind each solved question."""
    target_delimiter: str = ""
    """What stands between a context and each choice; it does not count in a choice's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The questions of a task, and how they are asked."""

    name: str
    items: tuple[AnyItem, ...]
    examples: tuple[AnyItem, ...] = ()
    shots: int = 0
    separator: str = "\n\n"
    target_delimiter: str = ""
    output_type: OutputType = "multiple_choice"

    def with_shots(self, shots: int) -> "Task":
        """The same task with another number of solved questions before each question.

        Raises:
            RequestError: it has fewer solved questions.
        """
        if shots and self.output_type == "loglikelihood_rolling":
            raise RequestError(
                f"task `{self.name}` is of whole texts, which nothing stands before; leave `shots` "
                f"= {shots} out"
            )
        if not 0 <= shots <= len(self.examples):
            raise RequestError(
                f"task `{self.name}` has {len(self.examples)} solved questions, and `shots` = "
                f"{shots}; name a number from 0 to {len(self.examples)}"
            )
        return replace(self, shots=shots)

    def prompt(self, item: AnyItem) -> str:
        """What the model reads before each choice: the solved questions, then the context."""
        solved = [
            one.context + self.target_delimiter + one.choices[one.answer]
            for one in self.examples[: self.shots]
        ]
        return "".join(text + self.separator for text in solved) + item.context

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the choices; 0 where there are none to guess among."""
        if self.output_type != "multiple_choice":
            return 0.0
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)


def load_task(path: Path) -> Task:
    """Reads a task.

    Args:
        path: its TOML file.

    Raises:
        RequestError: a file cannot be read.
        InputErrors: all keys, values and lines that are not valid.
    """
    file = TaskFile.load(path)
    items, examples = (
        load_items(path.parent / name, file.output_type) if name is not None else ()
        for name in (file.items, file.examples)
    )
    task = Task(
        name=file.name,
        items=items,
        examples=examples,
        separator=file.separator,
        target_delimiter=file.target_delimiter,
        output_type=file.output_type,
    )
    return task.with_shots(file.shots)


def save_task(task: Task, folder: Path) -> Path:
    """Writes a task as three files, or two without examples, and returns its TOML file.

    Args:
        task: the task.
        folder: receives `NAME.toml`, `NAME.items.jsonl` and `NAME.examples.jsonl`.

    Raises:
        StorageError: the disk is full or not writable.
    """
    names: dict[str, str] = {}
    for part, items in (("items", task.items), ("examples", task.examples)):
        if items:
            names[part] = f"{task.name}.{part}.jsonl"
            lines = "".join(item.model_dump_json() + "\n" for item in items)
            atomic_write(folder / names[part], lines)
    path = folder / f"{task.name}.toml"
    file = TaskFile(
        name=task.name,
        output_type=task.output_type,
        shots=task.shots,
        separator=task.separator,
        target_delimiter=task.target_delimiter,
        **names,
    )
    file.save(path)
    return path
