"""`windlass check` and `rehearse`: verify that a plan computes what a plain run computes."""

from pathlib import Path

from windlass import api
from windlass.api import SEARCHED_PLAN, AsJson, Flag, PlanOptions, build_request
from windlass.cli.console import ProgressBars, print_notes
from windlass.cli.verification_output import verify_and_print
from windlass.schema import Request


def check(
    model: str | None = None,
    /,
    *overrides: str,
    options: PlanOptions = SEARCHED_PLAN,
    faults: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Train a few steps under a plan, plainly on one device, and in plain PyTorch, and compare.

    A plan for several devices runs on as many local processes. It stops before its last step and
    goes on from its checkpoint. The plain run is on one device, eager, in memory, without phases,
    offload or recompute. Losses, gradient norms, every layer's output and input gradient, every
    weight gradient, every weight and the held-out loss are compared, in float64 where possible,
    and bit for bit for a plan of one device. Plain PyTorch shares no data, loss or optimizer code;
    the steps pass twice through a part of the text. The exit code is 0 if everything is equal, and
    1 if not.

    For example: `windlass check gpt-tiny parallel.pipeline=2 parallel.data=2`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, your own `file.py:function`, or the
            TOML file of a plan.
        overrides: `key=value`, such as `parallel.pipeline=2`, `phases=12` or `train.steps=5`;
            `windlass keys` lists all.
        options: Device memory budget, request file, and a plan file in place of a search; if the
            plan is too large for this machine, a downscaled one of the same structure is checked.
        faults: Also inject faults, and check that each is detected and its layer named.
        as_json: Print the comparison as JSON.
    """
    plan = options.plan
    if plan is None and model is not None and model.endswith(".toml"):
        plan, model = Path(model), None
    with ProgressBars() as progress:
        request = _shortened(build_request(model, overrides, options), overrides)
        if plan is not None:
            planned, notes = _from_file(plan, request, progress)
        else:
            planned, notes = api.plan(request, progress=progress), ()
        print_notes(planned.notes)
        verify_and_print(planned, notes, progress, faults=faults, as_json=as_json)


def rehearse(
    model: str | None = None,
    /,
    *overrides: str,
    on: str | None = None,
    options: PlanOptions = SEARCHED_PLAN,
    faults: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan for a large machine downscaled, on local processes, and verify it as `check` does.

    Pipeline stages, tensor-parallel ranks, replicas, shards, phases, the schedule and recompute
    are kept; widths become tiny, and degrees are divided until 8 processes are enough. All
    communication is real. A plan that does not fit the machine is rehearsed too, with a note.

    For example: `windlass rehearse gpt3-175b --on dgx-h100:16 parallel.pipeline=8`.

    Args:
        model: A name (`windlass models` lists them).
        overrides: `key=value`, such as `parallel.pipeline=8` or `sharding.parameters=4`;
            `windlass keys` lists all.
        on: The machine that the plan is for; `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        faults: Also inject faults, and check that each is detected.
        as_json: Print the comparison as JSON.
    """
    with ProgressBars() as progress:
        request = build_request(model, overrides, options, machine=on)
        misfit: tuple[str, ...] = ()
        if options.plan is not None:
            full_plan, request = api.load_plan(options.plan, request)
        else:
            full_plan, misfit = api.rehearsal(request, progress=progress)
        train = request.train.model_copy(update={"steps": api.verification_steps(request)})
        request = request.model_copy(update={"train": train})
        small, changes = api.downscale_plan(full_plan, request, progress=progress)
        verify_and_print(small, (*misfit, *changes), progress, faults=faults, as_json=as_json)


def _from_file(
    path: Path, request: Request, progress: api.Progress
) -> tuple[api.Planned, tuple[str, ...]]:
    """A plan from a file, downscaled if this machine needs it; and the changes, a sentence each."""
    plan, request = api.load_plan(path, request)
    planned = api.rehearse_as_is(plan, request, progress=progress)
    if planned is not None:
        return planned, ()
    return api.downscale_plan(plan, request, progress=progress)


def _shortened(request: Request, overrides: tuple[str, ...]) -> Request:
    """The request with the steps of a check, unless an override sets their number."""
    explicit = any(override.startswith("train.steps=") for override in overrides)
    needed = api.verification_steps(request)
    steps = request.train.steps if explicit and request.train.steps else needed
    changes = {"steps": steps, "evaluate_every": steps + 1, "save_every": steps + 1}
    return request.model_copy(update={"train": request.train.model_copy(update=changes)})
