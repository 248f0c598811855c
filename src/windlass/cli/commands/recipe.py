"""`windlass recipe`: experiments of the field that one command plans, runs and reports."""

import shlex
from pathlib import Path

from windlass import api
from windlass.api import AsJson
from windlass.cli.commands.record.sweep import SweepView
from windlass.cli.console import (
    ProgressBars,
    console,
    error_console,
    print_bullets,
    print_json,
    print_line,
    print_table,
)
from windlass.document import format_overrides
from windlass.errors import RequestError, RunBroken
from windlass.report import cost_table, expert_table, loss_table, score_table
from windlass.schema import Step
from windlass.stop_signals import graceful_stop
from windlass.units import format_bytes, format_count, format_flop, format_seconds


def recipe(
    name: str | None = None,
    /,
    *overrides: str,
    scale: str = "tiny",
    seeds: int | None = None,
    jobs: int = 1,
    on: str | None = None,
    run: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Show what a recipe runs, plan it for a machine, or run it.

    For example: `windlass recipe gpt-depth=12 --scale full --on dgx-h100`.

    Args:
        name: A recipe; without one, all are listed.
        overrides: `key=value` for all its runs.
        scale: Its size; `tiny` ends in minutes on two cores.
        seeds: Runs from different seeds; 1, or 3 of each arm of a comparison, if not given.
        jobs: Most runs at a time, of a comparison.
        on: Plan it for this machine, with predicted times.
        run: Run it in this folder; what has run there is not run again.
        as_json: Print what would run, or what was found, as JSON.
    """
    if name is None:
        if overrides or run is not None or on is not None:
            raise RequestError(
                "`--run`, `--on` and overrides need a recipe; `windlass recipe` lists all"
            )
        _print_recipes(as_json=as_json)
    elif on is not None and run is not None:
        raise RequestError("`--run` trains on this machine; leave out `--on`, which only plans")
    elif api.is_training_recipe(name):
        plan = api.training_plan(name, *overrides, scale=scale)
        if run is not None:
            run_training(plan, run, 1 if seeds is None else seeds, as_json=as_json)
        else:
            print_training(plan, on, as_json=as_json)
    else:
        _compare(name, overrides, scale, seeds, jobs, on, run, as_json=as_json)


def _compare(
    name: str,
    overrides: tuple[str, ...],
    scale: str,
    seeds: int | None,
    jobs: int,
    on: str | None,
    run: Path | None,
    *,
    as_json: bool,
) -> None:
    """Shows or runs a recipe that compares arms."""
    seeds = api.RECIPE_SEEDS if seeds is None else seeds
    if on is not None:
        raise RequestError(f"recipe `{name}` is planned on this machine alone; leave out `--on`")
    if run is None:
        with ProgressBars() as progress:
            plan = api.plan_recipe(name, *overrides, scale=scale, progress=progress)
        _print_plan(plan, seeds, as_json=as_json)
    else:
        with graceful_stop() as stop, ProgressBars() as progress:
            view = SweepView()
            with view:
                result = api.run_recipe(
                    name, *overrides, folder=run, scale=scale, seeds=seeds, jobs=jobs, stop=stop,
                    observe=view.observe, progress=progress,
                )  # fmt: skip
        _print_result(result, as_json=as_json)


def _print_recipes(*, as_json: bool) -> None:
    listed = [(name, tuple(one.scales), one.summary) for name, one in api.known_recipes().items()]
    listed += [(name, tuple(one.scales), one.summary)
               for name, one in api.training_recipes().items()]  # fmt: skip
    if as_json:
        print_json({name: {"summary": summary, "scales": scales}
                    for name, scales, summary in listed})  # fmt: skip
        return
    rows = [(name, ", ".join(scales), summary) for name, scales, summary in listed]
    print_table(("recipe", "scales", "what it runs"), rows)


def _print_plan(plan: api.RecipePlan, seeds: int, *, as_json: bool) -> None:
    """The arms of a recipe with their predicted times, and how to run it."""
    if as_json:
        print_json({"predicted": True, "seeds": seeds, **plan.model_dump(mode="json")})
        return
    rows = [
        (
            arm.name, format_count(arm.parameters), str(arm.steps), format_flop(arm.flop),
            format_seconds(arm.predicted_seconds), arm.meaning,
        )
        for arm in plan.arms
    ]  # fmt: skip
    heads = ("arm", "weights", "steps", "FLOP a run", "a run, predicted", "what it is")
    print_table(heads, rows)
    shared = " ".join(format_overrides(plan.settings))
    print_line(f"all arms   {shared}")
    for arm in plan.arms:
        own = " ".join(format_overrides(arm.settings))
        print_line(f"{arm.name}   {own}")
    total = format_seconds(plan.predicted_seconds(seeds))
    count = seeds * len(plan.arms)
    print_line(f"predicted  {total} for the steps of {count} runs, {seeds} seeds of each arm")
    words = " ".join(("windlass recipe", plan.recipe, *plan.overrides, "--scale", plan.scale))
    print_line(f"run        {words} --run FOLDER")


def _print_result(result: api.RecipeResult, *, as_json: bool) -> None:
    """Tables and sentences of a recipe that has run."""
    report = result.report
    if as_json:
        print_json(report)
        return
    for heads, *rows in (loss_table(report), score_table(report), cost_table(report)):
        if rows:
            print_table(heads, rows)
    print_bullets(report.sentences)
    print_line(f"page       {result.page}")


_SHOWN_EVERY = 50


def print_training(plan: api.TrainingPlan, machine: str | None, *, as_json: bool) -> None:
    """Prints the settings of a training recipe, with predicted times if a machine is named."""
    if machine is not None:
        with ProgressBars() as progress:
            planned = api.plan_training(plan, machine=machine, progress=progress)
        _print_predictions(plan, planned, machine, as_json=as_json)
        return
    if as_json:
        print_json(plan)
        return
    for part in plan.parts:
        start = f", from the last checkpoint of {part.parent}" if part.parent else ""
        start += f", fine-tunes the model of {part.base}" if part.base else ""
        print_line(f"{part.name}{start}")
        print_line("  " + " ".join(format_overrides(part.settings)))
    if plan.target is not None:
        print_line(f"target     {plan.target}")
    print_bullets(plan.notes)
    words = _command(plan)
    print_line(f"plan       {words} --on MACHINE")
    print_line(f"run        {words} --run FOLDER")


def run_training(plan: api.TrainingPlan, folder: Path, seeds: int, *, as_json: bool) -> None:
    """Runs a training recipe and prints what it reached.

    Raises:
        RunBroken: a seed did not reach the target.
    """

    def observe(run: str, step: Step) -> None:
        if step.step % _SHOWN_EVERY == 0 or step.held_out_loss is not None:
            held_out = "" if step.held_out_loss is None else f"   held-out {step.held_out_loss:.4f}"
            error_console.print(f"{run}   step {step.step}   loss {step.loss:.4f}{held_out}")

    with graceful_stop() as stop, ProgressBars() as progress:
        result = api.run_training(
            plan, folder, seeds=seeds, stop=stop, observe=observe, progress=progress
        )
    if as_json:
        print_json(result)
    else:
        rows = [
            (
                str(part.seed), part.part, str(part.steps), format_seconds(part.seconds),
                f"{part.first_loss:.4f}",
                "" if part.held_out_loss is None else f"{part.held_out_loss:.4f}",
                "" if part.accuracy is None else f"{part.accuracy:.4f}",
            )
            for part in result.parts
        ]  # fmt: skip
        heads = (
            "seed", "part", "steps", "time of steps", "first loss", "held-out loss", "accuracy",
        )  # fmt: skip
        shown = len(heads) if plan.asks_questions else len(heads) - 1
        print_table(heads[:shown], [row[:shown] for row in rows])
        for part in result.parts:
            if (experts := expert_table(api.load(part.folder).steps)) is not None:
                console.print(experts)
        print_line(result.verdict)
    if result.missed:
        raise RunBroken(f"recipe `{plan.recipe}`: {result.verdict}")


def _print_predictions(
    plan: api.TrainingPlan, planned: tuple[api.Planned, ...], machine: str, *, as_json: bool
) -> None:
    seconds = [one.prediction.step_seconds for one in planned]
    steps = [one.request.train.steps for one in planned]
    total = sum(count * each for count, each in zip(steps, seconds, strict=True))
    if as_json:
        parts = [
            {
                "part": part.name,
                "plan": one.plan,
                "prediction": one.prediction,
                "notes": one.notes,
            }
            for part, one in zip(plan.parts, planned, strict=True)
        ]
        print_json({"predicted": True, "machine": machine, "seconds": total, "parts": parts})
        return
    rows = [
        (
            part.name, format_count(one.graph.parameter_count),
            str(one.plan.parallel.devices), str(count),
            format_seconds(each), format_bytes(one.prediction.peaks[0].peak_bytes),
            format_seconds(count * each),
        )
        for part, one, count, each in zip(plan.parts, planned, steps, seconds, strict=True)
    ]  # fmt: skip
    heads = (
        "part", "weights", "devices", "steps", "a step, predicted", "peak, predicted",
        "all steps, predicted",
    )  # fmt: skip
    print_table(heads, rows)
    print_line(f"predicted  {format_seconds(total)} for all steps on {machine}")
    print_bullets(
        [
            f"{p.name}: {note}"
            for p, one in zip(plan.parts, planned, strict=True)
            for note in one.notes
        ]
    )
    for part, one in zip(plan.parts, planned, strict=True):
        name = one.request.model.name
        settings = {key: value for key, value in part.settings.items() if key != "model.name"}
        words = format_overrides(settings)
        print_line(f"{part.name}   windlass plan {shlex.join((name, *words, '--on', machine))}")


def _command(plan: api.TrainingPlan) -> str:
    words = ("windlass", "recipe", plan.recipe, *plan.overrides, "--scale", plan.scale)
    return shlex.join(words)
