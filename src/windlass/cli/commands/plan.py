"""`windlass plan` and `windlass fit`: what a step will cost, whether it fits, and why."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cyclopts import Parameter
from rich.text import Text

from windlass import api
from windlass.api import (
    EXPLAINED_PLAN,
    AsJson,
    ExplainedPlanOptions,
    Flag,
    build_plan,
    explain_values,
)
from windlass.atomic_files import require_output_file
from windlass.cli.console import (
    ProgressBars,
    console,
    print_answer,
    print_bullets,
    print_json,
    print_line,
    print_notes,
    print_plan,
    print_values,
    print_written,
)
from windlass.cli.plan_summary import print_summary
from windlass.errors import RequestError
from windlass.planner import Explanation, explain_result
from windlass.report import memory_table, prediction_table, runners_up_table
from windlass.schema import MemoryClass
from windlass.units import format_bytes

_INFEASIBLE_SHOWN = 4
_KEPT = "this plan was found before and kept; `--no-cache` searches anew"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingOptions:
    """What to draw of a plan, and where."""

    picture: Path | None = None
    """Draw the plan and its predicted cost to this file: `.html` is a page, `.svg` and `.png` hold
    its pictures one below the other."""
    only: str | None = None
    """Draw only one picture: mesh, phases, waterfall, memory, memory-timeline, memory-layers or
    timeline."""

    def require_drawable(self) -> None:
        """Refuses what cannot be drawn, before anything is planned.

        Raises:
            RequestError: no such kind of file or picture, or `only` without a file.
            StorageError: the file cannot be written there.
        """
        if self.picture is not None:
            api.require_drawable(self.picture, self.only)
        elif self.only is not None:
            raise RequestError(
                f"`--only {self.only}` names a picture; name its file by `--picture FILE`"
            )


_NO_DRAWING = DrawingOptions()


def plan(
    model: str | None = None,
    /,
    *overrides: str,
    on: str | None = None,
    options: ExplainedPlanOptions = EXPLAINED_PLAN,
    from_config: Path | None = None,
    runners_up: Flag = False,
    out: Path | None = None,
    drawing: DrawingOptions = _NO_DRAWING,
    trace: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Choose the plan to queue and predict its cost, in ten lines.

    The plan is the fastest that bears the margin; `train` and `launch` run the same one. Where the
    proved fastest plan is another, it is shown too.

    For example: `windlass plan gpt3-13b --on dgx-h100 train.batch=256 --picture plan.html`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.batch=32` or `batch.micro=4`; `windlass keys`
            lists all.
        on: The machine (`windlass machines` lists them), `NAME:N` for N hosts; `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        from_config: The configuration of an engine, a folder or its main file: the plan that it
            describes in place of a search, for `--stack ENGINE` and `--on MACHINE`.
        runners_up: Also show the plans that lost, why, and those that do not fit.
        out: Write the plan to this TOML file too.
        drawing: What to draw, and where.
        trace: Write the predicted timeline of a step to this `.json` file, as a trace for
            ui.perfetto.dev or chrome://tracing.
        as_json: Print plan and prediction as JSON.
    """
    drawing.require_drawable()
    if trace is not None:
        api.require_trace_file(trace)
    if out is not None:
        require_output_file(out)
    if options.stack == api.EVERY_ENGINE:
        _print_engines(model, overrides, options, on, as_json=as_json)
        return
    with ProgressBars() as progress:
        planned, unread = _find_plan(from_config, model, overrides, options, on, progress)
    print_notes((*unread, *planned.notes, *([_KEPT] if planned.is_kept else ())))
    chosen, prediction, explanation = (
        planned.plan,
        planned.prediction,
        explain_result(planned.result),
    )
    if out is not None:
        chosen.save(out)
    forecast = api.forecast(planned) if drawing.picture or trace else None
    if forecast is not None and drawing.picture is not None:
        api.draw_plan(forecast, drawing.picture, drawing.only)
    if forecast is not None and trace is not None:
        api.write_plan_trace(forecast, trace)
    print_written(out, drawing.picture, trace)
    values = explain_values(planned, model, overrides, options, machine=on)
    speedup = api.sparse_speedup(planned)
    if as_json:
        sparse = {} if speedup is None else {"sparsity": speedup}
        print_json(_json_tree(planned, explanation) | sparse | _why_tree(values))
        return
    print_summary(planned, speedup)
    steps = planned.request.train.steps
    if options.why:
        print_values(values)
        print_plan(planned)
        console.print()
        console.print(prediction_table(prediction, plan=chosen, steps=steps, speedup=speedup))
        _print_reasons(planned, explanation)
    if runners_up:
        _print_alternatives(planned, explanation)


def _print_engines(
    model: str | None,
    overrides: tuple[str, ...],
    options: ExplainedPlanOptions,
    machine: str | None,
    *,
    as_json: bool,
) -> None:
    """Prints the best plan of every engine."""
    with ProgressBars() as progress:
        table = api.plan_on_engines(model, overrides, options, machine=machine, progress=progress)
    print_answer(table, as_json=as_json)


def _find_plan(
    place: Path | None,
    model: str | None,
    overrides: tuple[str, ...],
    options: ExplainedPlanOptions,
    machine: str | None,
    progress: api.Progress,
) -> tuple[api.Planned, tuple[str, ...]]:
    """The best plan, or the one that a configuration describes, and what was not read of that."""
    if place is None:
        return build_plan(model, overrides, options, machine=machine, progress=progress), ()
    if options.stack is None or options.plan is not None:
        raise RequestError(
            "`--from-config` needs `--stack ENGINE`, whose configuration it is, and no `--plan`"
        )
    given, unread = api.plan_of_config(place, options.stack, model=model, machine=machine)
    planned = api.plan(
        None, *overrides, machine=machine, memory=options.memory, plan=given, progress=progress
    )
    return planned, unread


def fit(
    model: str | None = None,
    /,
    *overrides: str,
    on: str | None = None,
    options: ExplainedPlanOptions = EXPLAINED_PLAN,
    drawing: DrawingOptions = _NO_DRAWING,
    as_json: AsJson = False,
) -> None:
    """Say whether training a model fits, by which plan, and if not, what would help.

    The exit code is 0 if it fits and 1 if it does not.

    For example: `windlass fit gpt2-1.5b --on v100 train.batch=8`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.batch=32` or `batch.micro=4`; `windlass keys`
            lists all.
        on: The machine (`windlass machines` lists them), `NAME:N` for N hosts; `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        drawing: What to draw, and where.
        as_json: Print the verdict, the plan, its memory and what would help as JSON.
    """
    drawing.require_drawable()
    with ProgressBars() as progress:
        planned = build_plan(model, overrides, options, machine=on, progress=progress)
    print_notes((*planned.notes, *([_KEPT] if planned.is_kept else ())))
    if drawing.picture is not None:
        api.draw_plan(api.forecast(planned), drawing.picture, drawing.only)
    print_written(drawing.picture)
    result, explanation = planned.result, explain_result(planned.result)
    values = explain_values(planned, model, overrides, options, machine=on)
    if as_json:
        print_json(_fit_tree(planned, explanation) | _why_tree(values))
    else:
        print_values(values)
        answer = ("yes", "bold green") if result.fits else ("no", "bold red")
        words = f", `{planned.request.model.name}` {explanation.verdict}"
        print_line(Text.assemble(answer, words))
        if result.advice is None:
            print_plan(planned)
            console.print()
            console.print(memory_table(planned.prediction))
            _print_infeasible(explanation)
        else:
            _print_memory(result.advice.by_class)
            console.print("what would help")
            print_bullets(explanation.help)
    if not result.fits:
        # An exit code of 1 stops `windlass fit X && windlass train X` where X does not fit.
        sys.exit(1)


def _print_reasons(planned: api.Planned, explanation: Explanation) -> None:
    """Prints what was searched, the rank of a pinned plan, and sensitivities."""
    if planned.result.axes:
        print_line(planned.result.axes)
    if explanation.pinned_rank is not None:
        print_line(f"rank of this plan: {explanation.pinned_rank}")
    if explanation.sensitivity:
        console.print("predicted savings if a constant of the machine were better")
        print_bullets(explanation.sensitivity)


def _print_alternatives(planned: api.Planned, explanation: Explanation) -> None:
    """Prints runners-up, and plans that do not fit."""
    rows = zip(planned.result.runners_up, explanation.runners_up, strict=True)
    console.print(runners_up_table([(each.plan, each.prediction, why) for each, why in rows]))
    _print_infeasible(explanation)


def _print_memory(by_class: Mapping[MemoryClass, int]) -> None:
    console.print("predicted memory at the peak")
    for name, nbytes in by_class.items():
        if nbytes:
            console.print(f"  {name:<12} {format_bytes(nbytes):>9}")


def _print_infeasible(explanation: Explanation) -> None:
    if explanation.infeasible:
        console.print("plans that do not fit")
        print_bullets(explanation.infeasible[:_INFEASIBLE_SHOWN])


def _why_tree(values: Sequence[api.ValueOrigin]) -> dict[str, object]:
    return {"why": values} if values else {}


def _fit_tree(planned: api.Planned, explanation: Explanation) -> dict[str, object]:
    advice = planned.result.advice
    tree = {"fits": planned.result.fits, "verdict": explanation.verdict, "help": explanation.help}
    if advice is not None:
        return {**tree, "by_class": advice.by_class}
    peaks = planned.prediction.peaks
    return {**tree, "by_class": peaks[0].by_class, "plan": planned.plan, "peaks": peaks}


def _json_tree(planned: api.Planned, explanation: Explanation) -> dict[str, object]:
    prediction, job = planned.prediction, api.job_size(planned)
    derived = {"tokens_per_second": prediction.tokens_per_second, "mfu": prediction.mfu}
    return {
        "plan": planned.plan,
        "defaults": planned.defaults,
        "job": {**asdict(job), "device_hours": job.device_hours},
        "prediction": {**prediction.model_dump(mode="json"), **derived},
        "fastest": planned.result.fastest,
        "larger_batch": planned.result.larger_batch,
        "runners_up": explanation.runners_up,
        "infeasible": explanation.infeasible,
        "pinned_rank": explanation.pinned_rank,
        "sensitivity": explanation.sensitivity,
    }
