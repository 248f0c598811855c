"""`windlass train` and `windlass resume`: run, show what happens, end with what to do next."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

from cyclopts import Parameter
from rich.live import Live
from rich.markup import escape

from windlass import api
from windlass.cli.console import ProgressBars, console, error_console
from windlass.cli.options import build_request
from windlass.errors import RankLost, RunInterrupted
from windlass.models.catalog import is_causal
from windlass.report.terminal.live_view import TrainingView
from windlass.report.terminal.plan_tables import plan_table
from windlass.units import format_bytes, format_seconds

Elastic = Annotated[bool, Parameter(negative="")]

_LINE_SHARE = 20
"""Where output is no terminal, about so many lines tell of a run."""


def train(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
    runs: Path = api.RUNS,
    folder: Path | None = None,
    elastic: Elastic = False,
) -> None:
    """Plan, predict, run and record the training of a model.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `train.steps=500` or `model.layers=8`.
        on: the machine; `here` if not given.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        runs: where run folders lie.
        folder: train into this folder in place of a new one under `runs`.
        elastic: go on with fewer devices when one of several is lost.
    """
    request = build_request(model, overrides, on=on, memory=memory, file=file)
    with graceful_stop() as stop:
        with ProgressBars() as progress:
            planned = api.plan(request, progress=progress)
            run = api.train(planned, root=runs, folder=folder, stop=stop, progress=progress)
        _see_through(run, stop, elastic=elastic)


def resume(
    run: str = "last", *overrides: str, runs: Path = api.RUNS, elastic: Elastic = False
) -> None:
    """Go on with a run from its newest good checkpoint, under its plan or another one.

    Args:
        run: folder, name, beginning of its id, or `last`.
        overrides: `key=value` of the plan, such as `parallel.data=1` or `phases=4`.
        runs: where run folders lie.
        elastic: go on with fewer devices when one of several is lost.
    """
    with graceful_stop() as stop:
        with ProgressBars() as progress:
            resumed = api.resume(run, *overrides, root=runs, stop=stop, progress=progress)
        _see_through(resumed, stop, elastic=elastic)


def _see_through(run: api.Run, stop: Callable[[], bool], *, elastic: bool) -> None:
    """Shows a run to its end; where asked to, through the loss of devices."""
    survival = api.ElasticRecovery(run.folder, stop=stop)
    while True:
        try:
            show_run(run)
        except RankLost as lost:
            if not elastic:
                raise
            error_console.print(f"[yellow]lost:[/] {escape(str(lost))}", soft_wrap=True)
            with ProgressBars() as progress:
                run = survival.recover(lost, progress=progress)
        else:
            return


def show_run(run: api.Run) -> None:
    """Shows a run from its plan to the commands that come next."""
    seen = api.load(run.folder).steps[: run.done] if run.done else ()
    planned = run.planned
    for note in run.notes:
        error_console.print(f"[yellow]note:[/] {note}", soft_wrap=True)
    console.print(plan_table(planned.plan, planned.graph))
    prediction = planned.prediction
    step, peak = format_seconds(prediction.step_seconds), prediction.peaks[0].peak_bytes
    console.print(f"[bold]predicted[/]    {step} a step, {format_bytes(peak)} at the peak\n")
    view = TrainingView(planned.request.model.name, planned.request.train.steps, prediction, seen)
    try:
        _follow(run, view)
    finally:
        page = api.report(run.folder)
        console.print(f"run     {run.folder}", soft_wrap=True)
        console.print(f"report  {page}", soft_wrap=True)
    if is_causal(planned.request.model.name):
        console.print(f"sample  windlass sample {run.folder} --prompt 'def '", soft_wrap=True)


def _follow(run: api.Run, view: TrainingView) -> None:
    """Shows each step: a live display on a terminal, some lines elsewhere."""
    try:
        if console.is_terminal:
            with Live(view, console=console, refresh_per_second=4):
                for step in run:
                    view.update(step)
            return
        last = run.planned.request.train.steps
        every = max(1, last // _LINE_SHARE)
        for step in run:
            view.update(step)
            if step.step % every == 0 or step.step in (1, last):
                console.print(view.line(), soft_wrap=True)
    except RunInterrupted as wish:
        raise RunInterrupted(f"{wish}; go on with `windlass resume {run.folder}`") from None


@contextmanager
def graceful_stop() -> Iterator[Callable[[], bool]]:
    """A first Ctrl-C (or SIGTERM) asks for a stop and a save, a second one stops at once."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
