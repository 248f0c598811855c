"""`windlass show`, `report` and `sample`: the record of one run, and its model."""

import sys
from itertools import chain
from pathlib import Path

from windlass import api
from windlass.atomic_files import require_output_file
from windlass.cli.console import (
    ProgressBars,
    console,
    print_json,
    print_notes,
    print_scores,
    print_written,
    without_controls,
)
from windlass.cli.flags import AsJson, Flag
from windlass.report import expert_table, record_table


def show(run: str = "last", *, runs: Path = api.RUNS, as_json: AsJson = False) -> None:
    """Show one run: predicted beside measured.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        runs: The folder that holds the run folders.
        as_json: Print plan, prediction and steps as JSON.
    """
    record = api.load(run, root=runs)
    if as_json:
        names = ("id", "folder", "state", "plan", "prediction", "steps", "evaluations", "faults")
        print_json({name: getattr(record, name) for name in names})
        return
    console.print(record_table(record))
    if (experts := expert_table(record.steps)) is not None:
        console.print(experts)
    if record.evaluations:
        print_scores(record.evaluations)


def report(
    run: str = "last",
    *,
    runs: Path = api.RUNS,
    out: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Write one run as a self-contained HTML page, and print the page's path.

    For example: `windlass report last --trace timeline.json`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        runs: The folder that holds the run folders.
        out: The page; if not given, `report.html` in the run's folder, or `NAME.html` here where
            that folder is read-only.
        trace: Also write the predicted and the measured timeline of a step to this `.json` file,
            as a trace for ui.perfetto.dev or chrome://tracing.
    """
    if out is not None:
        require_output_file(out)
    if trace is not None:
        api.require_trace_file(trace)
        api.write_run_trace(run, trace, root=runs)
    print_written(trace)
    console.print(str(api.report(run, root=runs, path=out)), soft_wrap=True)


def sample(
    run: str = "last",
    *,
    prompt: str = "",
    chat: Flag = False,
    system: str | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
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
        tokens: Number of tokens to generate.
        temperature: 0 always takes the likeliest token; 1 samples the model's distribution.
        top_k: Sample only from this many of the likeliest tokens.
        top_p: Sample only from the likeliest tokens that together have this probability.
        seed: The same seed generates the same text.
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        ema: Let the averages of the weights write that the run keeps (`train.ema`).
        runs: The folder that holds the run folders.
    """
    if chat and system is None:
        note = api.usual_system_prompt(api.load(run, root=runs).meta)[1]
        print_notes(() if note is None else (note,))
    pieces = api.sample(
        run,
        prompt,
        root=runs,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat=chat,
        system=system,
        phases=phases,
        ema=ema,
    )
    with ProgressBars() as progress:
        progress("loading the model", 0, None)
        first = next(pieces, "")
    for piece in chain(("" if chat else prompt, first), pieces):
        sys.stdout.write(without_controls(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
