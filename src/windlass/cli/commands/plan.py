"""`windlass plan` and `windlass fit`: what a step will cost, whether it fits, and why."""

import sys
from collections.abc import Mapping
from pathlib import Path

from windlass import api
from windlass.atomic_files import require_writable
from windlass.cli.console import ProgressBars, console, print_bullets, print_json, print_line
from windlass.cli.options import AsJson, build_request
from windlass.errors import RequestError
from windlass.planner.explain import Explanation, explain
from windlass.report.terminal.plan_tables import plan_table, prediction_table, runners_up_table
from windlass.schema.plan import Plan
from windlass.schema.prediction import MemoryClass, Prediction
from windlass.units import format_bytes

_REFUSED_SHOWN = 4


def plan(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
    out: Path | None = None,
    picture: Path | None = None,
    only: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Choose a plan and say what it will cost, which plans came next, and why they lost.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `train.batch=32` or `batch.micro=4`.
        on: the machine; `here` if not given. `NAME:N` is N hosts of a family.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        out: write the plan to this TOML file too.
        picture: draw the plan and what it will cost: `.html` is a page, `.svg` and `.png` are
            its pictures below each other.
        only: draw one of them: decomposition, phases, waterfall, memory, occupancy or timeline.
        as_json: print plan and prediction as JSON.
    """
    _require_drawable(picture, only)
    if out is not None:
        require_writable(out)
    with ProgressBars() as progress:
        request = build_request(model, overrides, on=on, memory=memory, file=file)
        planned = api.plan(request, progress=progress)
    chosen, prediction, choice = planned.plan, planned.prediction, planned.result
    if out is not None:
        chosen.save(out)
    if picture is not None:
        api.draw_plan(api.forecast(planned), picture, only)
    if as_json:
        print_json(_told(chosen, prediction, explain(choice)))
        return
    told = explain(choice)
    console.print(plan_table(chosen, planned.graph))
    console.print()
    steps = planned.request.train.steps
    console.print(prediction_table(prediction, plan=chosen, steps=steps))
    if choice.runners_up:
        reasons = zip(choice.runners_up, told.runners_up, strict=True)
        console.print(runners_up_table([(r.plan, r.prediction, why) for r, why in reasons]))
    if told.standing is not None:
        print_line(f"where it stands: {told.standing}")
    _print_refused(told)
    if told.sensitive:
        console.print("what better constants of the machine would save, predicted")
        print_bullets(told.sensitive)


def fit(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
    picture: Path | None = None,
    only: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Say whether training a model fits, memory class by class, and if not, what would help.

    The exit code is 0 for yes and 1 for no.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `train.batch=32` or `batch.micro=4`.
        on: the machine; `here` if not given. `NAME:N` is N hosts of a family.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        picture: draw the plan, or the nearest that does not fit, to this file, as `plan` does.
        only: draw one of its pictures.
        as_json: print the verdict, the bytes of each memory class and what would help as JSON.
    """
    _require_drawable(picture, only)
    with ProgressBars() as progress:
        request = build_request(model, overrides, on=on, memory=memory, file=file)
        planned = api.plan(request, progress=progress)
    if picture is not None:
        api.draw_plan(api.forecast(planned), picture, only)
    choice, told = planned.result, explain(planned.result)
    held = choice.advice.by_class if choice.advice else planned.prediction.peaks[0].by_class
    if as_json:
        print_json(
            {"fits": choice.fits, "verdict": told.verdict, "by_class": held, "help": told.help}
        )
    else:
        answer = "[bold green]yes[/]" if choice.fits else "[bold red]no[/]"
        print_line(f"{answer}, `{request.model.name}` {told.verdict}")
        _print_memory(held)
        if told.help:
            console.print("what would help")
            print_bullets(told.help)
        else:
            _print_refused(told)
    if not choice.fits:
        # So that `windlass fit X && windlass train X` says what it means.
        sys.exit(1)


def _require_drawable(picture: Path | None, only: str | None) -> None:
    if picture is not None:
        api.require_drawable(picture, only)
    elif only is not None:
        raise RequestError(f"`--only {only}` names a picture; name its file by `--picture FILE`")


def _print_memory(by_class: Mapping[MemoryClass, int]) -> None:
    console.print("predicted at the fullest moment")
    for part, nbytes in by_class.items():
        console.print(f"  {part:<12} {format_bytes(nbytes):>9}")


def _print_refused(told: Explanation) -> None:
    if told.refused:
        console.print("plans that do not fit")
        print_bullets(told.refused[:_REFUSED_SHOWN])


def _told(plan: Plan, prediction: Prediction, told: Explanation) -> dict[str, object]:
    return {
        "plan": plan,
        "prediction": _tree(prediction),
        "runners_up": told.runners_up,
        "refused": told.refused,
        "standing": told.standing,
        "sensitive": told.sensitive,
    }


def _tree(prediction: Prediction) -> dict[str, object]:
    derived = {"tokens_per_second": prediction.tokens_per_second, "mfu": prediction.mfu}
    return {**prediction.model_dump(mode="json"), **derived}
