"""`windlass rehearse`: runs and verifies a downscaled large plan on local processes."""

from windlass import api
from windlass.cli.command_options import SEARCHED_PLAN, AsJson, PlanOptions, build_request
from windlass.cli.console import ProgressBars
from windlass.cli.verification_output import verify_and_print


def rehearse(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    options: PlanOptions = SEARCHED_PLAN,
    faults: bool = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan for a large machine downscaled, on local processes, and verify it as `check` does.

    Pipeline stages, tensor-parallel ranks, replicas, shards, phases, the schedule and recompute
    are kept; widths become tiny, and degrees are divided until 8 processes are enough. All
    communication is real. A plan that does not fit the machine is rehearsed too, with a note.

    For example: `windlass rehearse gpt3-175b --on dgx-h100:16 parallel.pipeline=8`.

    Args:
        model: A name (`windlass models` lists them).
        overrides: `key=value`, such as `parallel.pipeline=8` or `sharding.parameters=4`.
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
        train = request.train.model_copy(update={"steps": api.VERIFICATION_STEPS})
        request = request.model_copy(update={"train": train})
        small, changes = api.downscale_plan(full_plan, request, progress=progress)
        verify_and_print(small, (*misfit, *changes), progress, faults=faults, as_json=as_json)
