"""`windlass recipe`: experiments of the field that one command plans, runs and reports."""

from pathlib import Path

from windlass import api
from windlass.cli.commands.record.sweep import SweepView
from windlass.cli.commands.train import graceful_stop
from windlass.cli.console import (
    ProgressBars,
    print_bullets,
    print_json,
    print_line,
    print_table,
)
from windlass.cli.flags import AsJson
from windlass.errors import RequestError
from windlass.report import cost_table, loss_table, score_table
from windlass.units import format_count, format_flop, format_seconds


def recipe(
    name: str | None = None,
    *overrides: str,
    scale: str = "tiny",
    seeds: int = api.RECIPE_SEEDS,
    jobs: int = 1,
    run: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Show what a recipe runs, with predicted times, or run it and write its page.

    For example: `windlass recipe sparse-then-dense --scale tiny --run parity`.

    Args:
        name: A recipe; without one, all are listed.
        overrides: `key=value` for all its runs.
        scale: Its size; `tiny` ends in minutes on two cores.
        seeds: Runs of each arm.
        jobs: Most runs at a time.
        run: Run it in this folder; what has run there is not run again.
        as_json: Print what would run, or what was found, as JSON.
    """
    if name is None:
        if overrides or run is not None:
            raise RequestError("`--run` and overrides need a recipe; `windlass recipe` lists all")
        _print_recipes(as_json=as_json)
    elif run is None:
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
    known = api.known_recipes()
    if as_json:
        print_json({name: {"summary": one.summary, "scales": one.scales}
                    for name, one in known.items()})  # fmt: skip
        return
    rows = [(name, ", ".join(one.scales), one.summary) for name, one in known.items()]
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
    shared = " ".join(f"{key}={value}" for key, value in plan.settings.items())
    print_line(f"all arms   {shared}")
    for arm in plan.arms:
        own = " ".join(f"{key}={value}" for key, value in arm.settings.items())
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
