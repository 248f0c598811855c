"""Output streams of the command line: results to stdout, progress and errors to stderr."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from windlass.units import format_seconds

if TYPE_CHECKING:
    from windlass import api
    from windlass.judge import Verdict

_WIDTH = 100
"""Most columns of any output, so that all commands look alike."""
_MIN_LINE_SECONDS, _MAX_LINE_SECONDS = 10.0, 600.0
_VERDICT_COLORS = {"expected": "green", "slow": "yellow", "broken": "red", "unknown": "dim"}
_COMMANDS = tuple(
    code
    for first, last in ((0, 8), (11, 31), (0x7F, 0x9F), (0x202A, 0x202E), (0x2066, 0x2069))
    for code in range(first, last + 1)
)
"""Characters that a terminal obeys: of C0 and C1, and those that turn the direction of a text."""
_HIDDEN = dict.fromkeys(_COMMANDS, "\N{REPLACEMENT CHARACTER}")


class _PlainConsole(Console):
    """A console whose texts cannot command a terminal, and that tells of a reader who is gone."""

    def print(self, *objects: Any, **how: Any) -> None:  # noqa: ANN401  rich's own arguments
        """Prints; lines in a pipe or a file end without the spaces that fill a column."""
        if self.is_terminal:
            super().print(*objects, **how)
            return
        with self.capture() as printed:
            super().print(*objects, **how)
        lines = (line.rstrip(" ") for line in printed.get().split("\n"))
        super().print("\n".join(lines), end="", soft_wrap=True)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The parts of what is printed; names of runs or models may come from somebody else."""
        for part in super().render(renderable, options):
            is_plain = part.control or part.text.isprintable()
            yield part if is_plain else part._replace(text=without_controls(part.text))

    def on_broken_pipe(self) -> None:
        """Prints nothing from now on, not even what is left when Python ends."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    """A console as wide as its terminal, but at most 100 columns; 100 in a pipe or file.

    It prints square brackets as they are, because names may contain them.
    """
    console = _PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    has_width = console.is_terminal or "COLUMNS" in os.environ
    if console.width > _WIDTH or not has_width:
        console.width = _WIDTH
    return console


def without_controls(text: str) -> str:
    """The text, with a replacement character for each that a terminal would obey."""
    return text.translate(_HIDDEN)


console = _console(stderr=False)
error_console = _console(stderr=True)


class ProgressBars:
    """What is under way and how far it is, on stderr.

    A terminal has a bar for each label, and they vanish when the work is done. A pipe or a file has
    a line now and then, so that a log shows life.
    """

    def __init__(self) -> None:
        self._shown: _Bars | _Lines = _Bars() if error_console.is_terminal else _Lines()

    def __enter__(self) -> "api.Progress":
        return self._shown.update

    def __exit__(self, *_: object) -> None:
        self._shown.stop()


class _Bars:
    """One progress bar for each label."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=error_console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, label: str, done: int, total: int | None) -> None:
        # Started with the first label, because an empty display would leave a blank line behind.
        if not self._tasks:
            self._progress.start()
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total)
        self._progress.update(self._tasks[label], completed=done, total=total)

    def stop(self) -> None:
        if self._tasks:
            self._progress.stop()


class _Lines:
    """The latest label, a line now and then: from a thread, as a label may last for minutes."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._latest: tuple[str, int, int | None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print, name="progress", daemon=True)

    def update(self, label: str, done: int, total: int | None) -> None:
        if self._latest is None:
            self._thread.start()
        self._latest = (label, done, total)

    def stop(self) -> None:
        self._ended.set()
        if self._latest is not None:
            self._thread.join()

    def _print(self) -> None:
        seconds = 0.0
        while not self._ended.wait(line_interval(seconds)):
            seconds = time.monotonic() - self._begun
            label, done, total = self._latest or ("", 0, None)
            if total is not None and done >= total:
                continue  # what comes after it has no label
            share = f", {100 * done // total} %" if total else ""
            # Without a reader there is nobody to tell.
            with suppress(BrokenPipeError):
                error_console.print(
                    f"{label}{share}, {format_seconds(seconds)} so far", soft_wrap=True
                )


def line_interval(seconds: float) -> float:
    """Time until the next line about work that goes on, where the output is no terminal.

    Args:
        seconds: how long the work has taken.

    Returns:
        Seconds: ten, a tenth of what the work has taken if that is longer, at most ten minutes. An
        hour of work has 47 lines, a day 186.
    """
    return min(max(_MIN_LINE_SECONDS, seconds / 10), _MAX_LINE_SECONDS)


def print_plan(planned: "api.Planned") -> None:
    """Prints a plan, what it trains on and for how long, and the defaults chosen for it."""
    # Most commands print no plan, and answer before the planner would be imported.
    from windlass import api
    from windlass.planner import explain_idle_devices
    from windlass.report import plan_table

    plan, defaults = planned.plan, planned.defaults
    idle = explain_idle_devices(plan, planned.request, planned.machine)
    job = api.describe_job(planned)
    console.print(plan_table(plan, planned.graph, defaults=defaults, idle=idle, job=job))


def print_line(line: str | Text) -> None:
    """Prints a line; wrapped on a terminal, on one line in a pipe or file."""
    console.print(line, soft_wrap=not console.is_terminal)


def print_error(message: str) -> None:
    """Prints a message to stderr after `windlass:`; wrapped as `print_bullets` does."""
    _print_message(("windlass:", "bold red"), message)


def print_notes(notes: Iterable[str]) -> None:
    """Prints what a user should know before anything else, to stderr."""
    for note in notes:
        _print_message(("note:", "yellow"), note)


def _print_message(head: tuple[str, str], message: str) -> None:
    """Prints a message to stderr; on a terminal with a hanging indent, list items further in."""
    if not error_console.is_terminal:
        error_console.print(Text.assemble(head, " ", message), soft_wrap=True)
        return
    first, *rest = message.splitlines() or [""]
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_row(Text(*head), Text(first))
    for line in rest:
        item = line.removeprefix("- ")
        table.add_row("-" if item != line else "", Text(item))
    error_console.print(table)


def print_bullets(lines: Iterable[str]) -> None:
    """Prints a bullet list; on a terminal, long lines wrap with a hanging indent."""
    if not console.is_terminal:
        for line in lines:
            console.print(Text(f"  - {line}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row(" ", "-", Text(line))
    console.print(table)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table of words, which wrap within their columns."""
    from windlass.api import word_table

    console.print(word_table(heads, rows))


def print_values(values: "Iterable[api.ValueOrigin]") -> None:
    """Prints the values of a request with where they come from; nothing if there are none."""
    rows = [(value.key, value.value, value.origin) for value in values]
    if rows:
        print_table(("key", "value", "from"), rows)


def print_verdict(verdict: "Verdict") -> None:
    """Prints a verdict: its level and first reason, then the other reasons, a line each."""
    first, *others = verdict.sentences
    level = (f"{verdict.level}:", _VERDICT_COLORS[verdict.level])
    console.print(Text.assemble(level, f" {first}"), soft_wrap=True)
    for sentence in others:
        console.print(f"  {sentence}", soft_wrap=True)


def print_written(*paths: Path | None) -> None:
    """Names the files that were written, on stderr; None stands for none."""
    for path in paths:
        if path is not None:
            error_console.print(f"wrote   {path}", soft_wrap=True)


def print_json(value: object) -> None:
    """Prints a value as JSON: documents and dataclasses as objects, NaN and infinity as null."""
    from windlass.api import json_text

    sys.stdout.write(json_text(value) + "\n")


def print_answer(answer: "api.Answer", *, as_json: bool) -> None:
    """Prints what a command found: as JSON, or as its lines, tables and lists."""
    from windlass.api import Bullets

    if as_json:
        print_json(answer.json_tree())
        return
    for part in answer.lines():
        if isinstance(part, Bullets):
            print_bullets(part)
        elif isinstance(part, str | Text):
            print_line(part)
        else:
            console.print(part)
