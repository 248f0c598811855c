"""`windlass recipe`: experiments of the field that one command plans, runs and reports."""

from pathlib import Path

from windlass import api
from windlass.api import AsJson
from windlass.cli.commands.recipes.training_recipe import print_training, run_training
from windlass.cli.commands.record.sweep import SweepView
from windlass.cli.console import (
    ProgressBars,
    print_bullets,
    print_json,
    print_line,
    print_table,
)
from windlass.document import format_overrides
from windlass.errors import RequestError
from windlass.report import cost_table, loss_table, score_table
from windlass.stop_signals import graceful_stop
from windlass.units import format_count, format_flop, format_seconds


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
