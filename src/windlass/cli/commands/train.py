"""`windlass train` and `windlass resume`: run, show each step, and name the next commands."""

import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent

from rich.live import Live
from rich.text import Text

from windlass import api
from windlass.api import (
    EXPLAINED_PLAN,
    NO_PARENT,
    ExplainedPlanOptions,
    Flag,
    Names,
    ParentOptions,
    beside_adapters,
    build_plan,
    explain_values,
    plan_of_child,
    request_of_parent,
)
from windlass.cli.console import (
    ProgressBars,
    console,
    error_console,
    line_interval,
    print_notes,
    print_values,
    print_verdict,
)
from windlass.cli.plan_summary import print_predicted_plan
from windlass.errors import RankLost, RecordError, RunInterrupted, StorageError
from windlass.judge import Verdict
from windlass.models import is_causal, model_names
from windlass.report import TrainingView
from windlass.schema import Step
from windlass.sparsity import describe_leg
from windlass.stop_signals import graceful_stop
from windlass.units import format_bytes, format_seconds

_PRINTED_LINES = 20
"""Progress lines of a run at least, where the output is no terminal; more where it takes long."""


def train(
    model: str | None = None,
    /,
    *overrides: str,
    on: str | None = None,
    options: ExplainedPlanOptions = EXPLAINED_PLAN,
    parents: ParentOptions = NO_PARENT,
    runs: Path = api.RUNS,
    folder: Path | None = None,
    group: str | None = None,
    elastic: Flag = False,
) -> None:
    """Plan, predict, run and record the training of a model.

    For example: `windlass train gpt-tiny train.steps=200 --memory 2GiB`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.steps=500` or `model.layers=8`; `windlass keys`
            lists all.
        on: The machine (`windlass machines` lists them); `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        parents: A run, or adapters of PEFT, to start from.
        runs: The folder that holds the run folders.
        folder: Train into this folder instead of a new one under `runs`.
        group: A name that several runs share, to find and compare them by.
        elastic: If a device is lost, continue with the remaining ones.
    """
    with graceful_stop() as stop:
        with ProgressBars() as progress:
            parent = parents.find(runs)
            if parent is not None:
                options = request_of_parent(options, parent)
                planned = plan_of_child(
                    model, overrides, options, parent, machine=on, progress=progress
                )
            else:
                if parents.adapter is not None:
                    model, overrides = beside_adapters(model, overrides, parents.adapter)
                planned = build_plan(model, overrides, options, machine=on, progress=progress)
                if options.plan is None:
                    planned = api.on_default_stack(planned, progress=progress)
            run = api.train(
                planned,
                root=runs,
                folder=folder,
                parent=parent,
                group=group,
                stop=stop,
                progress=progress,
            )
        print_values(explain_values(planned, model, overrides, options, machine=on))
        _show_to_the_end(run, stop, root=runs, elastic=elastic)


def resume(
    run: str = "last",
    /,
    *overrides: str,
    skip_batches: Names = (),
    runs: Path = api.RUNS,
    elastic: Flag = False,
) -> None:
    """Resume a run from its newest good checkpoint, under the same plan or another one.

    For example: `windlass resume last parallel.data=1 phases=4`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        overrides: `key=value` of the plan, such as `parallel.data=1` or `phases=4`.
        skip_batches: Batches to leave out from now on, such as `120-125`; later ones move up.
        runs: The folder that holds the run folders.
        elastic: If a device is lost, continue with the remaining ones.
    """
    with graceful_stop() as stop:
        with ProgressBars() as progress:
            resumed = api.resume(
                run,
                *overrides,
                skip_batches=skip_batches,
                root=runs,
                stop=stop,
                progress=progress,
            )
        _show_to_the_end(resumed, stop, root=runs, elastic=elastic)


def _show_to_the_end(run: api.Run, stop: Callable[[], bool], *, root: Path, elastic: bool) -> None:
    """Shows a run to its end; an elastic one also through the loss of devices."""
    recovery = api.ElasticRecovery(run.folder, stop=stop)
    while True:
        try:
            show_run(run, root)
        except RankLost as lost:
            if not elastic:
                raise
            error_console.print(Text.assemble(("lost:", "yellow"), f" {lost}"), soft_wrap=True)
            with ProgressBars() as progress:
                run = recovery.recover(lost, progress=progress)
        else:
            return


def show_run(run: api.Run, root: Path) -> None:
    """Shows a run: its plan, its prediction, every step, and the commands that come next.

    Args:
        run: a run that was not iterated over yet.
        root: the folder with the runs that it is judged beside.
    """
    earlier = api.load(run.folder).steps[: run.done] if run.done else ()
    planned = run.planned
    print_notes(run.notes)
    with _stop_without_reader():
        print_predicted_plan(planned)
    model, steps = planned.request.model.name, planned.request.train.steps
    view = TrainingView(model, steps, planned.prediction, earlier)
    try:
        _follow(run, view, api.LiveJudge(run, root))
    except BaseException:
        # Without a folder, or on a full disk, its own error would hide the one that ends the run.
        with suppress(RecordError, StorageError):
            _print_record(run.folder)
        raise
    with ProgressBars() as progress:
        progress("writing a sample", 0, None)
        text = api.write_sample(run)
    if text:
        console.print(Text.assemble(("it writes\n", "bold"), indent(text.strip("\n"), "  "), "\n"))
    _print_record(run.folder)
    _print_next(run, root)


def _print_next(run: api.Run, root: Path) -> None:
    """Prints the commands that come next after a run, each with what it does."""
    request = run.planned.request
    model, steps = request.model.name, request.train.steps
    is_listed = run.folder.parent == root == api.RUNS
    name = run.short_id if is_listed else shlex.quote(str(run.folder))
    writes = run.planned.graph.examples is None and is_causal(model)
    prompts = api.load(run.folder).meta.get("prompts")
    prompt = "--prompt 'def '" if request.data.format == "text" else "--chat --prompt Hi"
    if isinstance(prompts, dict) and prompts["untemplated"] > prompts["conversations"] / 2:
        prompt = "--prompt Hi"
    larger = "gpt3-13b" if model in model_names() else shlex.quote(model)
    commands = {
        **({f"sample {name} {prompt}": "text from the model"} if writes else {}),
        f"show {name}": "predicted beside measured",
        f"train --from {name} --continue train.steps={2 * steps}": "more steps",
        f"plan {larger} --on dgx-h100": "on another machine",
    }
    width = max(map(len, commands))
    for index, (command, purpose) in enumerate(commands.items()):
        head = "" if index else "next"
        console.print(f"{head:8}windlass {command:{width}}  {purpose}", soft_wrap=True)


def _print_record(folder: Path) -> None:
    """Writes the page of a run, and prints its path and the run's."""
    page = api.report(folder)
    console.print(f"run     {folder}", soft_wrap=True)
    console.print(f"report  {page}", soft_wrap=True)


def _follow(run: api.Run, view: TrainingView, judge: api.LiveJudge) -> None:
    """Shows each step, some of them where there is no terminal, and each new verdict."""
    try:
        if console.is_terminal:
            with Live(view, console=console, refresh_per_second=4):
                for step in _steps(run, view):
                    view.update(step)
                    _print_known(judge.observe(step))
            return
        last = run.planned.request.train.steps
        every = max(1, last // _PRINTED_LINES)
        begun = printed = time.monotonic()
        for step in _with_wait(_steps(run, view)):
            view.update(step)
            verdict = judge.observe(step)
            now = time.monotonic()
            is_due = now - printed >= line_interval(now - begun)
            with _stop_without_reader():
                if is_due or step.step % every == 0 or step.step in (1, last):
                    console.print(view.line(), soft_wrap=True)
                    printed = now
                _print_known(verdict)
    except (RunInterrupted, KeyboardInterrupt) as error:
        what = str(error) or "interrupted"
        message = f"{what}; continue with `windlass resume {shlex.quote(str(run.folder))}`"
        raise RunInterrupted(message) from None


def _steps(run: api.Run, view: TrainingView) -> Iterator[Step]:
    """The steps of a run; says when another leg begins, and when the disk takes no record."""
    fault, planned = None, run.planned
    for step in run:
        if run.planned is not planned:
            planned = run.planned
            view.begin_leg(planned.prediction)
            _print_leg(planned, step.step)
        if run.record_fault != fault:
            fault = run.record_fault
            what = f"{fault}; training goes on, and its record waits" if fault else "complete again"
            error_console.print(Text.assemble(("record:", "yellow"), f" {what}"), soft_wrap=True)
        yield step


def _with_wait(steps: Iterator[Step]) -> Iterator[Step]:
    """The steps; shows on stderr that the first one is awaited, before which much may compile."""
    with ProgressBars() as progress:
        progress("waiting for the first step", 0, None)
        first = next(steps, None)
    if first is not None:
        yield first
        yield from steps


def _print_leg(planned: api.Planned, step: int) -> None:
    """Prints the leg of a run that a step begins, and what is predicted for it."""
    request, prediction = planned.request, planned.prediction
    words = describe_leg(request.sparsity, step, request.train.steps)
    seconds, peak = format_seconds(prediction.step_seconds), prediction.peaks[0].peak_bytes
    console.print(
        f"{words}: predicted {seconds} a step, {format_bytes(peak)} at the peak", soft_wrap=True
    )


def _print_known(verdict: Verdict | None) -> None:
    """Prints a new verdict, unless too little is known to say anything."""
    if verdict is not None and verdict.level != "unknown":
        print_verdict(verdict)


@contextmanager
def _stop_without_reader() -> Iterator[None]:
    """Ends a run as SIGTERM does, with a checkpoint, if nobody reads its output any more."""
    try:
        yield
    except BrokenPipeError:
        signal.raise_signal(signal.SIGTERM)
