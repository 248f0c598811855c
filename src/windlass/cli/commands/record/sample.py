"""`windlass sample` and `chat`: what the model of a run writes and answers."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from windlass import api
from windlass.api import Flag
from windlass.cli.console import ProgressBars, print_notes, without_controls

_TEXT, _ANSWER = api.Drawing(), api.AnswerDrawing()


def sample(
    run: str = "last",
    *,
    prompt: str = "",
    chat: Flag = False,
    system: str | None = None,
    drawing: api.Drawing = _TEXT,
    phases: int = 1,
    ema: Flag = False,
    runs: Path = api.RUNS,
) -> None:
    """Let a trained model continue a prompt.

    For example: `windlass sample last --prompt 'def ' --tokens 100`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        prompt: The beginning of the text.
        chat: The prompt is what a user says, the text the answer, both in the run's chat template.
        system: With `--chat`, the system prompt; if not given, the one that most conversations of
            the run begin with. An empty one is none.
        drawing: How tokens are drawn.
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        ema: Let the averages of the weights write that the run keeps (`train.ema`).
        runs: The folder that holds the run folders.
    """
    if chat and system is None:
        _say_system_prompt(run, runs)
    pieces = api.sample(
        run,
        prompt,
        root=runs,
        **asdict(drawing),
        chat=chat,
        system=system,
        phases=phases,
        ema=ema,
    )
    with ProgressBars() as progress:
        progress("loading the model", 0, None)
        first = next(pieces, "")
    _write(chain(("" if chat else prompt, first), pieces))


def chat(
    run: str = "last",
    *,
    system: str | None = None,
    drawing: api.AnswerDrawing = _ANSWER,
    phases: int = 1,
    ema: Flag = False,
    runs: Path = api.RUNS,
) -> None:
    """Talk with a trained model, turn by turn, in the run's chat template.

    A line is what you say; `/new` begins another conversation, and `/exit` or the end of the input
    ends. For example: `windlass chat last --system 'Answer in one word.'`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        system: The system prompt; if not given, the one that most conversations of the run begin
            with. An empty one is none.
        drawing: How tokens are drawn.
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        ema: Let the averages of the weights answer that the run keeps (`train.ema`).
        runs: The folder that holds the run folders.
    """
    if system is None:
        _say_system_prompt(run, runs)
    with ExitStack() as stack:
        with ProgressBars() as progress:
            progress("loading the model", 0, None)
            opened = api.open_dialogue(
                run, drawing, root=runs, system=system, phases=phases, ema=ema
            )
            dialogue = stack.enter_context(opened)
        for line in _lines():
            if line == "/new":
                dialogue.begin()
            elif line:
                _write(dialogue.say(line))


def _lines() -> Iterator[str]:
    """What is said, until `/exit` or the end of the input."""
    while True:
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        yield line.strip()


def _write(pieces: Iterable[str]) -> None:
    """Prints a text as it comes."""
    for piece in pieces:
        sys.stdout.write(without_controls(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _say_system_prompt(run: str, runs: Path) -> None:
    """Says with which system prompt the run is asked, where none is named."""
    note = api.usual_system_prompt(api.load(run, root=runs).meta)[1]
    print_notes(() if note is None else (note,))
