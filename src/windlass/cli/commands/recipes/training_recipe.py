"""Recipes of trainings on the command line: printed, planned for a machine, or run."""

import shlex
from pathlib import Path

from windlass import api
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
from windlass.errors import RunBroken
from windlass.report import expert_table
from windlass.schema import Step
from windlass.stop_signals import graceful_stop
from windlass.units import format_bytes, format_count, format_seconds

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
