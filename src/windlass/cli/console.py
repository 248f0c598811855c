"""Where the command line writes: results to one stream, news and errors to the other."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Report = Callable[[str, int, int | None], None]
"""Tells a label, how much is done, and of how much (None if nobody knows)."""


class Bars:
    """One progress bar for each label that is told, on the news stream; gone when all is done."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Report:
        self._progress.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _tell(self, label: str, done: int, total: int | None) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total)
        self._progress.update(self._tasks[label], completed=done, total=total)
